"""Which requests are answered as a whole, without ASGI."""

import asyncio
import re
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.config import Config

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.serve import make_service, unrestricted
from postroom.adapters.http_server.app import WholeRequest
from postroom.adapters.http_server.connection import HttpConnection, State
from postroom.adapters.http_server.routes import Reply
from postroom.adapters.http_server.server import make_app
from postroom.adapters.http_server.settings import HttpSettings

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


ID = "0199d2c4-6f00-7a10-8c21-3b5b0f6f9e01"
BODIES = [
    b'{"topic": "t", "payload_b64": "AP8=", "idem_key": "a:b", "attrs": {"x": "1"}}',
    b'[{"topic": "t", "payload_b64": ""}, {"topic": "no spaces", "payload_b64": ""}]',
    b'{"topic": "t", "max_messages": 2, "visibility_ms": 500}',
    b'{"receipt": "r.AZnSxG8AehCMITtbD2-eAQAAAAIAAAAAAAE"}',
    b'{"receipts": ["r.AZnSxG8AehCMITtbD2-eAQAAAAIAAAAAAAE"], "reason": "why"}',
    b'{"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": 1}',
    b"{}",
    b"",
]
bodies = st.sampled_from(BODIES) | st.builds(
    lambda body, at, damage: body[: at % (len(body) + 1)] + damage + body[at % (len(body) + 1) + 1 :],
    st.sampled_from(BODIES),
    st.integers(0, 100),
    st.sampled_from([b"", b'"', b":", b"\\u0000", b"\xff", b"{"]) | st.binary(max_size=3),
)
targets = st.sampled_from(
    f"/v1/send /v1/recv /v1/ack/{ID} /v1/nack/{ID} /v1/extend/{ID} /v1/ack /v1/nack /v1/nothing /v1/backlog "
    "/v1/send?a=1 /v1/%73end /v1/ack/%ff /v1/topics/t/purge /v1/".split()
)
FIELDS = """\
Host: localhost
Host: evil.example
Content-Type: application/json
Content-Type: text/plain
Content-Type: application/cloudevents+json
Content-Encoding: gzip
Origin: http://localhost
Origin: null
Authorization: Bearer x
Authorization: Basic x
X-Corr-Id: own
X-Corr-Id: a b
Connection: close
Expect: nothing
X-Idempotency-Mode: 409-conflict
ce-specversion: 1.0"""
fields = st.lists(st.sampled_from(FIELDS.split("\n")), max_size=4).map(
    lambda more: ["Host: localhost", "Content-Type: application/json", *more][len(more) % 3 :]
)
VARYING = re.compile(
    rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|r\.[\w-]{30,}|b3:\w+|[\d:T.-]+Z|\"timestamp\":\d+"
)


async def answer_of(pieces: list[bytes]) -> tuple[bytes, bool]:
    """Return the answer of a new server to the pieces of a request, and whether it closes the connection."""
    limits = HttpSettings(frame_bytes=80)
    async with open_mailbox("memory:") as mailbox:
        app = make_app(make_service("memory:", mailbox, access=unrestricted), limits)
        config = Config(app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False)
        config.load()
        connection, wire = HttpConnection(config, State(limits), limits, app), Wire()
        connection.connection_made(wire)
        for piece in pieces:
            connection.data_received(piece)
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            while not (connection.cycle and connection.cycle.response_complete):
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        is_closed = connection.transport.is_closing()
        connection.connection_lost(None)
    return VARYING.sub(b"*", b"".join(wire.writes)), is_closed


@settings(deadline=None)
@given(targets, fields, bodies, st.integers(0, 400))
def test_any_request_has_the_same_answer_whole_and_in_pieces(
    target: str, lines: list[str], body: bytes, cut: int
) -> None:
    head = "\r\n".join([f"POST {target} HTTP/1.1", *lines, f"Content-Length: {len(body)}", "\r\n"]).encode()
    sent = head + body
    cut = cut % len(sent)
    whole = asyncio.run(answer_of([sent]))
    assert whole == asyncio.run(answer_of([sent[:cut], sent[cut:]] if cut else [sent[:-1], sent[-1:]]))
    assert whole[0].startswith(b"HTTP/1.1 ")
