"""Connections of the load: asyncio protocols that do no more than they must."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from postroom.adapters.local import protocol

HEAD = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
AUTHORIZATION = b"authorization: Bearer %b\r\n\r\n"
MAX_OPENING = 64
"""The kernel drops attempts to connect that exceed the server's backlog, and repeats them after 1 s."""
CLOSE = b"connection: close"
LENGTH = b"content-length: "

Answer = tuple[int, bytes]
"""Status and body."""


class HttpConnections:
    """Connections to a server, one for each request in progress."""

    def __init__(self, host: str, port: int, token: str | None) -> None:
        self._host = host
        self._port = port
        self._head = HEAD if token is None else HEAD[:-2] + AUTHORIZATION % token.encode()
        self._idle: list[_HttpConnection] = []
        self._opened: set[_HttpConnection] = set()
        self._opening = asyncio.Semaphore(MAX_OPENING)

    @classmethod
    @asynccontextmanager
    async def open(cls, host: str, port: int, token: str | None = None) -> AsyncIterator["HttpConnections"]:
        """Open connections as they are needed, and close them in the end.

        Arguments:
            token: of the requests.
        """
        connections = cls(host, port, token)
        try:
            yield connections
        finally:
            for connection in connections._opened:
                connection.abort()

    async def post(self, path: bytes, body: bytes) -> Answer:
        """Post JSON."""
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            answer = await connection.post(path, body)
        except BaseException:
            connection.abort()
            self._opened.discard(connection)
            raise
        if connection.is_open:
            self._idle.append(connection)
        else:
            self._opened.discard(connection)
        return answer

    async def _connect(self) -> "_HttpConnection":
        loop = asyncio.get_running_loop()
        async with self._opening:
            _, connection = await loop.create_connection(
                lambda: _HttpConnection(self._head), self._host, self._port
            )
        self._opened.add(connection)
        return connection


class _HttpConnection(asyncio.Protocol):
    def __init__(self, head: bytes) -> None:
        self._head = head
        self.is_open = False
        self._transport: Any = None
        self._received = b""
        self._answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    async def post(self, path: bytes, body: bytes) -> Answer:
        if self.is_open:
            self._transport.write(self._head % (path, len(body)) + body)
        answer = await self._answer  # that of a refused connection comes before any request
        self._answer = asyncio.get_running_loop().create_future()
        return answer

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        start = head.index(LENGTH) + len(LENGTH)
        size = int(head[start : start + 10].partition(b"\r")[0])
        if len(body) >= size:
            self._received = b""
            self.is_open &= CLOSE not in head
            if not self._answer.done():
                self._answer.set_result((int(head[9:12]), body))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the server closed the connection"))
            self._answer.exception()  # silences asyncio's 'exception was never retrieved'


class LocalConnection(asyncio.Protocol):
    """A connection to the owner of a mailbox at its local socket."""

    def __init__(self) -> None:
        self._frames = protocol.Frames()
        self._ids = count(1)
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._requests: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._greeted = self._loop.create_future()

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path) -> AsyncIterator["LocalConnection"]:
        """Connect, and disconnect in the end."""
        _, connection = await asyncio.get_running_loop().create_unix_connection(cls, str(path))
        await connection._greeted
        try:
            yield connection
        finally:
            connection._transport.abort()

    async def call(self, kind: str, body: bytes) -> msgspec.Raw:
        """Make a request and return the result; raises the error that is answered."""
        id_ = next(self._ids)
        call: asyncio.Future[msgspec.Raw] = self._loop.create_future()
        self._calls[id_] = call
        if not self._requests:
            self._loop.call_soon(self._flush)
        self._requests.append(protocol.frame((id_, kind, msgspec.Raw(body))))
        return await call

    def _flush(self) -> None:
        self._transport.write(b"".join(self._requests))
        self._requests.clear()

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Give the answers to their callers."""
        for body in self._frames.feed(data):
            if not self._greeted.done():
                self._greeted.set_result(None)
                continue
            id_, error, result = protocol.read_reply(body)
            call = self._calls.pop(id_, None)
            if call is None or call.done():
                continue
            if error is not None:
                call.set_exception(protocol.read_error(error))
            else:
                call.set_result(result)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the calls in progress."""
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error or ConnectionResetError("the owner closed the connection"))
