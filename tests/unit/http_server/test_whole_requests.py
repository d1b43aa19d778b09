"""Which requests are answered as a whole, without ASGI."""

import asyncio
import re
from collections.abc import Coroutine
from typing import Any

import pytest
from uvicorn.config import Config

from postroom.adapters.http_server.app import WholeRequest
from postroom.adapters.http_server.connection import HttpConnection
from postroom.adapters.http_server.routes import Reply
from postroom.adapters.http_server.settings import HttpSettings, State

HEAD = b"POST /v1/send HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Answering:
    """An application that notes in which way each request came."""

    def __init__(self) -> None:
        self.ways: list[str] = []
        self.whole_targets = re.compile(b"/v1/send")

    def begin(
        self, connection: Any, target: bytes, headers: Any, body: bytes, *, keep_alive: bool
    ) -> tuple[Any, Coroutine[Any, Any, None]]:
        self.ways.append("whole")
        request = WholeRequest(connection, target, headers, body, keep_alive, "http")
        return request, request.send(Reply(b"{}"), "corr")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.ways.append("asgi")
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


async def ways_of(*pieces: bytes) -> tuple[list[str], list[bytes]]:
    """Return in which ways the requests in pieces of bytes come, and what is written."""
    app, limits = Answering(), HttpSettings()
    config = Config(app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    connection, wire = HttpConnection(config, State(limits), limits, app), Wire()
    connection.connection_made(wire)
    for piece in pieces:
        connection.data_received(piece)
    for _ in range(20):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    return app.ways, wire.writes


@pytest.mark.parametrize(
    ("way", "pieces"),
    [
        ("whole", [HEAD + b"\r\n{}"]),
        ("whole", [HEAD[:30], HEAD[30:] + b"\r\n{}"]),
        ("asgi", [HEAD + b"\r\n", b"{}"]),
        ("asgi", [HEAD + b"\r\n{", b"}"]),
        ("asgi", [HEAD + b"Expect: 100-continue\r\n\r\n{}"]),
        ("asgi", [HEAD.replace(b"1.1", b"1.0") + b"\r\n{}"]),
        ("asgi", [HEAD.replace(b"POST", b"PUT") + b"\r\n{}"]),
        ("asgi", [HEAD.replace(b"/v1/send", b"/v1/recv/stream") + b"\r\n{}"]),
    ],
)
async def test_a_post_that_comes_at_once_is_whole(way: str, pieces: list[bytes]) -> None:
    assert (await ways_of(*pieces))[0] == [way]


async def test_an_answer_to_a_whole_request_is_one_write() -> None:
    _, writes = await ways_of(HEAD + b"\r\n{}")
    assert len(writes) == 1
    assert writes[0].startswith(b"HTTP/1.1 200 OK\r\n")
    assert writes[0].endswith(b"\r\n\r\n{}")


async def test_a_request_behind_an_unanswered_one_comes_by_asgi_after_it() -> None:
    ways, writes = await ways_of((HEAD + b"\r\n{}") * 3)
    assert ways == ["whole", "asgi", "asgi"]
    assert b"".join(writes).count(b"HTTP/1.1 200 OK") == 3
