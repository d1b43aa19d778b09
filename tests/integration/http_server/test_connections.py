"""Connections without a valid token: they hold a small share for a short time, and keep nobody out."""

import asyncio
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from uvicorn.config import Config

from postroom.adapters.compose.access import open_capabilities, open_key_ring
from postroom.adapters.http_server.connection import State
from postroom.adapters.http_server.server import NewConnection
from postroom.adapters.http_server.settings import HttpSettings
from postroom.domain.capability.rights import Right, Rights
from tests.support.servers.http import PostroomServer, receive_all
from tests.support.waiting import wait_until

PUBLIC = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
LONG = {"header_timeout": "10m", "idle_timeout": "10m", "unauthenticated_timeout": "10m"}
"""Times that end no connection during a test."""


@contextmanager
def idle(server: PostroomServer, count: int, sent: bytes = PUBLIC) -> Iterator[list[socket.socket]]:
    """Open connections that send the same bytes and then nothing, and close them at the end."""
    with ExitStack() as opened:
        connections = [opened.enter_context(server.raw()) for _ in range(count)]
        for connection in connections:
            connection.sendall(sent)
        yield connections


def is_open(connection: socket.socket) -> bool:
    """Return whether the server has not closed a connection; reads what it sent."""
    connection.setblocking(False)
    try:
        while connection.recv(65_536):
            pass
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


def wait_until_closed(connection: socket.socket) -> None:
    """Return when the server has closed a connection; raises TimeoutError after a minute."""
    receive_all(connection)


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HT", PUBLIC], ids=["silent", "half a header", "public"])
def test_one_client_without_a_token_shuts_nobody_out(tmp_path: Path, sent: bytes) -> None:
    with PostroomServer(tmp_path, max_connections=20, **LONG) as server:
        before = server.connect()
        before.request("GET", "/v1/mailbox")
        assert before.getresponse().read()
        with idle(server, 60, sent):
            for _ in range(30):
                assert server.call("GET", "/v1/mailbox").status == 200
            before.request("GET", "/v1/mailbox")  # on the same connection
            assert before.getresponse().status == 200
        before.close()


def test_a_client_that_reads_no_answers_keeps_no_place(tmp_path: Path) -> None:
    with (
        PostroomServer(tmp_path, max_connections=5, write_timeout="10m", **LONG) as server,
        idle(server, 20, PUBLIC * 200),
    ):
        for _ in range(10):
            assert server.call("GET", "/v1/mailbox").status == 200


def test_connections_with_a_valid_token_are_limited_by_all_of_them(tmp_path: Path) -> None:
    with PostroomServer(tmp_path, max_connections=3, **LONG) as server:
        request = b"GET /v1/mailbox HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with idle(server, 3, request) as connections:
            for connection in connections:
                assert connection.recv(65_536)
            assert server.call("GET", "/v1/mailbox").status == 503


def test_a_connection_without_a_token_ends_before_one_with_a_token(tmp_path: Path) -> None:
    with PostroomServer(tmp_path, **LONG | {"unauthenticated_timeout": "200ms"}) as server:
        known = server.connect()
        known.request("GET", "/v1/mailbox")
        known.getresponse().read()
        with idle(server, 1) as (stranger,):
            wait_until_closed(stranger)
        known.request("GET", "/v1/mailbox")
        assert known.getresponse().status == 200
        known.close()


def test_a_connection_whose_token_is_no_longer_valid_counts_as_one_without(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    with PostroomServer(tmp_path, dev=True):
        pass  # which creates the store
    with open_capabilities(store, open_key_ring(store)) as capabilities:
        capabilities.rotate()
        token = capabilities.issue("p", Rights(("*",), ("*",), (Right.READ_HEADERS,)), lifetime_ms=60_000)
    with PostroomServer(tmp_path, dev=False, **LONG | {"unauthenticated_timeout": "200ms"}) as server:
        get = b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n\r\n"
        with server.raw() as raw:
            raw.sendall(get % token.encode() + get % b"prm1_other")
            received = receive_all(raw)
            assert b"HTTP/1.1 200" in received
            assert b"HTTP/1.1 401" in received
        with server.raw() as raw:  # a token in a trailer is none
            head = b"POST /v1/recv HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            trailer = b"0\r\nAuthorization: Bearer %b\r\n\r\n" % token.encode()
            body = b'{"topic": "t"}'
            chunk = b"Content-Type: application/json\r\n\r\n%x\r\n%b\r\n" % (len(body), body)
            raw.sendall(head + chunk + trailer)
            assert b"HTTP/1.1 401" in raw.recv(65_536)


@pytest.mark.parametrize("path", [b"/healthz", b"/readyz"])
def test_the_answer_to_a_health_check_closes_its_connection(tmp_path: Path, path: bytes) -> None:
    with PostroomServer(tmp_path, **LONG) as server, server.raw() as raw:
        raw.sendall(PUBLIC.replace(b"/openapi.json", path))
        answer = receive_all(raw)
        assert b"\r\nconnection: close\r\n" in answer


def test_connections_above_the_share_of_an_address_are_closed(tmp_path: Path) -> None:
    with (
        PostroomServer(tmp_path, max_unauthenticated_per_address=3, **LONG) as server,
        idle(server, 5) as connections,
        ExitStack() as opened,
    ):

        def oldest_is_closed() -> bool:
            latest = opened.enter_context(server.raw())
            latest.sendall(PUBLIC)
            assert latest.recv(65_536)
            return not is_open(connections[0]) and is_open(latest)

        wait_until(oldest_is_closed)


def test_a_refused_connection_that_its_client_resets_is_forgotten() -> None:
    class Refused(set[NewConnection]):
        """Connections that are refused; their number is asked for between the answer and its end."""

        def __len__(self) -> int:
            client.close()
            return super().__len__()

    async def refuse() -> None:
        settings = HttpSettings(max_connections=1)
        state = State(settings)
        state.connections.add(object())  # type: ignore[arg-type]  # only their number counts
        state.refused = refused = Refused()
        errors: list[dict[str, object]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, error: errors.append(error))
        made: list[NewConnection] = []

        def connect() -> NewConnection:
            made.append(NewConnection(Config(app=None), state, settings))  # type: ignore[arg-type]  # not called
            return made[-1]

        server = await loop.create_server(connect, "127.0.0.1", 0)
        async with server:
            await loop.run_in_executor(None, client.connect, server.sockets[0].getsockname())
            async with asyncio.timeout(60):
                while not made:
                    await asyncio.sleep(0)
                await made[0].closed.wait()
        assert not list(refused)
        assert not errors

    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets
    asyncio.run(refuse())
