"""The owner's side of the local socket: answers the other processes that use its mailbox."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import time_ns
from typing import Any, Protocol

import msgspec

from postroom.adapters.local import protocol
from postroom.adapters.local.endpoints import bound_path, socket_address
from postroom.adapters.local.protocol import FRAME_BYTES, Frames, Hello, MalformedFrame, frame
from postroom.adapters.sockets.address import is_own_or_root
from postroom.application.caller import call_as
from postroom.application.mailbox.receive import STREAM_ENDED
from postroom.application.ports.event_log import MailboxOwner
from postroom.application.remote_errors import ProblemBrief
from postroom.application.telemetry import logger
from postroom.application.threads import cancel_and_wait, set_close_on_fork
from postroom.application.tracing import correlate
from postroom.domain.errors import (
    Fenced,
    InternalError,
    InvalidRequest,
    PostroomError,
    Saturated,
    Unavailable,
    WrongPosition,
)
from postroom.domain.mailbox.commands import Ack, Command, Extend, Nack
from postroom.domain.message import Receipt

MAX_REQUESTS = 10_000
"""Requests of one connection that may be in progress."""
BACKLOG = 512
WATCH_SECONDS = 5.0
"""Interval in which the owner looks whether its socket is still there."""
FLUSH_SECONDS = 1.0
"""Time that clients have to take the last answers."""


class ServedMailbox(Protocol):
    """The mailbox that the server answers from: the engine, and the queries as methods."""

    @property
    def engine(self) -> MailboxOwner:
        """Return the owner."""


class Outboxes(Protocol):
    """What relays the outboxes of other processes."""

    def add(self, addresses: Sequence[str]) -> None:
        """Relay what is recorded at these addresses."""


class LocalServer:
    """Server of one mailbox at a Unix socket, for processes of the same user or of root.

    Arguments:
        incumbent: token of the ownership of this process; see `bound_path`.

    It listens from the moment this process owns the mailbox, so that others can tell an owner that is loading
    its log from one that hangs; requests wait until `serve` is called.
    """

    def __init__(self, path: Path, mailbox: str, incumbent: str | None) -> None:
        self._path = path
        self._bound_path = bound_path(path, incumbent)
        self.hello = Hello(protocol.VERSION, mailbox)
        self.is_closing = False
        self.connections: set[_Connection] = set()
        self._served: asyncio.Future[tuple[ServedMailbox, Outboxes]] = (
            asyncio.get_running_loop().create_future()
        )
        self._server: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None
        self._inode = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; replace the socket of an owner that is gone.

        Raises: Unavailable when the socket can't be created.
        """
        await self._listen()
        self._watching = asyncio.create_task(self._watch(), name=f"watch of {self._path}")

    async def _listen(self) -> None:
        temporary = self._bound_path
        try:
            temporary.unlink(missing_ok=True)
            # In two steps: the first is not interrupted, so that a cancellation leaks no socket.
            with socket_address(temporary) as address:
                self._server = await asyncio.get_running_loop().create_unix_server(
                    lambda: _Connection(self), address, backlog=BACKLOG, start_serving=False
                )
            await self._server.start_serving()
            for listening_socket in self._server.sockets:
                set_close_on_fork(listening_socket.fileno(), True)
            temporary.chmod(0o600)
            self._inode = temporary.stat().st_ino
            temporary.rename(self._path)
        except asyncio.CancelledError:
            temporary.unlink(missing_ok=True)
            raise
        except OSError as error:
            raise Unavailable(
                f"The socket {self._path} can't be created: {error}. Check the folder's permissions."
            ) from error

    async def _watch(self) -> None:
        """Listen again if the socket was deleted, such as by a job that cleans folders."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._server is None or self._path.exists():
                continue
            logger().retry("mailbox.socket_deleted", mailbox=self.hello.mailbox, path=str(self._path))
            self._stop_listening(self._server)
            with suppress(Unavailable):  # tried again
                await self._listen()

    def serve(self, mailbox: ServedMailbox, outboxes: Outboxes) -> None:
        """Answer requests, also those that have waited."""
        self._served.set_result((mailbox, outboxes))

    async def mailbox(self) -> ServedMailbox:
        """Return the mailbox once it is open."""
        return (await asyncio.shield(self._served))[0]

    async def outboxes(self) -> Outboxes:
        """Return the relays of outboxes once the mailbox is open."""
        return (await asyncio.shield(self._served))[1]

    def make_connection(self) -> asyncio.Protocol:
        """Return the protocol of a connection whose peer was checked: one from another host."""
        return _Connection(self, is_peer_checked=True)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what outlives a connection."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop_reading(self) -> None:
        """Accept no more connections and requests; those in progress are still answered."""
        self.is_closing = True
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            with suppress(OSError):
                if self._path.stat().st_ino == self._inode:  # not that of the next owner
                    self._path.unlink()
            self._stop_listening(self._server)
        for connection in self.connections:
            connection.stop_reading()

    def _stop_listening(self, server: asyncio.Server) -> None:
        for listening_socket in server.sockets:
            set_close_on_fork(listening_socket.fileno(), False)
        server.close()

    def disconnect(self) -> None:
        """Close all connections without answers; clients then look for the new owner."""
        self.is_closing = True
        for connection in list(self.connections):
            connection.abort()

    async def close(self) -> None:
        """Send pending answers, and close all connections."""
        self.stop_reading()
        self._served.cancel()
        closing = [asyncio.ensure_future(each.close()) for each in list(self.connections)]
        if closing:
            await asyncio.wait(closing, timeout=FLUSH_SECONDS)
        self.disconnect()
        await cancel_and_wait(*self._tasks)


@asynccontextmanager
async def listening(path: Path, mailbox: str, incumbent: str | None) -> AsyncIterator[LocalServer]:
    """Listen at a Unix socket while the context lasts; see `LocalServer`."""
    server = LocalServer(path, mailbox, incumbent)
    try:
        await server.start()
        yield server
    finally:
        await server.close()


class _Connection(asyncio.Protocol):
    """Connection of one client."""

    def __init__(self, server: LocalServer, *, is_peer_checked: bool = False) -> None:
        self._server = server
        self._is_peer_checked = is_peer_checked
        self._loop = asyncio.get_running_loop()
        self._frames = Frames()
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._replies: list[bytes] = []
        self._streamed: dict[Receipt, int] = {}
        """Visibility deadlines (µs) of the unsettled deliveries of streams."""
        self._transport: Any = None
        self._descriptor = -1
        self._closed = self._loop.create_future()

    # -- the transport's callbacks ---

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        peer = transport.get_extra_info("socket")
        self._descriptor = peer.fileno()
        set_close_on_fork(self._descriptor, True)
        if self._server.is_closing or not (self._is_peer_checked or is_own_or_root(peer)):
            transport.abort()
            return
        self._server.connections.add(self)
        transport.write(frame(self._server.hello))

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._handle(body)
        except MalformedFrame as error:
            logger().warning("mailbox.malformed_frame", mailbox=self._server.hello.mailbox, error=str(error))
            self._replies.append(frame((0, ProblemBrief.of(InvalidRequest(str(error))), None)))
            self._flush()
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        set_close_on_fork(self._descriptor, False)
        self._server.connections.discard(self)
        for task in self._requests.values():
            task.cancel()
        if not self._closed.done():
            self._closed.set_result(None)
        if self._streamed and not self._server.is_closing:  # its client goes on with the next owner
            self._server.run(self._return_streamed())

    def pause_writing(self) -> None:
        self._transport.pause_reading()  # of a client that does not take its answers

    def resume_writing(self) -> None:
        if not self._server.is_closing:
            self._transport.resume_reading()

    # -- for the server ---

    def stop_reading(self) -> None:
        self._transport.pause_reading()

    def abort(self) -> None:
        self._transport.abort()

    async def close(self) -> None:
        await cancel_and_wait(*self._requests.values())
        self._flush()
        self._transport.close()
        await self._closed

    # -- requests ---

    def _handle(self, body: bytes) -> None:
        request = protocol.read_request(body)
        id_, kind, content = request.id, request.kind, request.body
        if kind == protocol.PING:
            self._reply(id_, None)
        elif kind == protocol.CANCEL:
            task = self._requests.get(protocol.read_id(content))
            if task is not None:
                task.cancel()
        elif len(self._requests) >= MAX_REQUESTS:
            self._reply_error(id_, Saturated(f"A connection has {MAX_REQUESTS} requests in progress.", 100))
        elif id_ in self._requests:
            raise MalformedFrame(f"There are two requests with the id {id_}.")
        else:
            with correlate(request.corr_id), call_as(request.caller):  # and the task that is started
                self._start(id_, kind, content)

    def _start(self, id_: int, kind: str, content: msgspec.Raw) -> None:
        try:
            match kind:
                case protocol.RECEIVE:
                    work = self._receive(protocol.read_receive(content))
                case protocol.QUERY:
                    work = self._query(protocol.read_query(content))
                case protocol.FIND_ID:
                    work = self._find_id(protocol.read_stream(content))
                case protocol.RELAY:
                    work = self._relay(protocol.read_outboxes(content))
                case _:
                    work = self._submit(protocol.read_commands(kind, content))
        except MalformedFrame as error:
            self._reply_error(id_, InvalidRequest(str(error)))
            return
        except PostroomError as error:
            self._reply_error(id_, error)
            return
        task = self._loop.create_task(self._answer(id_, work))
        self._requests[id_] = task

        def end(_: asyncio.Task[None]) -> None:
            self._requests.pop(id_, None)
            work.close()  # not started if the task was cancelled before

        task.add_done_callback(end)

    async def _answer(self, id_: int, work: Any) -> None:
        try:
            self._reply(id_, await work)
        except (Fenced, WrongPosition):
            self._server.disconnect()
        except PostroomError as error:
            if not self._server.is_closing:  # the next owner is asked
                self._reply_error(id_, error)
        except Exception as error:
            logger().exception("mailbox.request_failed", mailbox=self._server.hello.mailbox)
            self._reply_error(
                id_,
                InternalError(
                    f"Mailbox {self._server.hello.mailbox} failed on a request ({type(error).__name__}); "
                    "report the traceback that its owner logged."
                ),
            )

    async def _submit(self, commands: list[Command]) -> object:
        owner = (await self._server.mailbox()).engine
        answers = await owner.submit(commands)
        if self._streamed:
            self._note(commands)
        return protocol.write_answers(answers)

    async def _receive(self, receiving: protocol.Receiving) -> object:
        owner = (await self._server.mailbox()).engine
        deliveries = await owner.receive(receiving.command, receiving.wait_ms)
        if receiving.is_stream:
            now_us = _now_us()
            self._streamed = {receipt: due for receipt, due in self._streamed.items() if due > now_us}
            self._streamed |= {each.receipt: each.due for each in deliveries}
        return deliveries

    def _note(self, commands: Sequence[Command]) -> None:
        """Note which deliveries of streams were settled or extended."""
        for command in commands:
            if isinstance(command, Ack | Nack):
                self._streamed.pop(command.receipt, None)
            elif isinstance(command, Extend) and command.receipt in self._streamed:
                self._streamed[command.receipt] = _now_us() + command.visibility_ms * 1_000

    async def _return_streamed(self) -> None:
        """Make the unsettled messages of a departed client's streams ready."""
        now_us = _now_us()
        nacks = [Nack(each, 0.0, STREAM_ENDED, 0) for each, due in self._streamed.items() if due > now_us]
        with suppress(PostroomError):  # the visibility timeout does it otherwise
            await (await self._server.mailbox()).engine.submit(nacks)

    async def _find_id(self, stream: bytes) -> object:
        return await (await self._server.mailbox()).engine.find_message_id(stream)

    async def _query(self, query: protocol.Query) -> object:
        ask = getattr(await self._server.mailbox(), query.name)
        try:
            inspect.signature(ask).bind(*query.arguments, **query.options)
        except TypeError as error:
            raise InvalidRequest(f"The query {query.name} does not take these arguments: {error}.") from error
        return await ask(*query.arguments, **query.options)

    async def _relay(self, addresses: Sequence[str]) -> object:
        (await self._server.outboxes()).add(addresses)
        return None

    def _reply(self, id_: int, result: object) -> None:
        reply = frame((id_, None, result))
        if len(reply) > FRAME_BYTES:
            raise InvalidRequest(
                f"The answer has {len(reply)} bytes, above the limit of {FRAME_BYTES}; ask for fewer items."
            )
        self._write(reply)

    def _reply_error(self, id_: int, error: PostroomError) -> None:
        self._write(frame((id_, ProblemBrief.of(error), None)))

    def _write(self, reply: bytes) -> None:
        if not self._replies:
            self._loop.call_soon(self._flush)
        self._replies.append(reply)

    def _flush(self) -> None:
        if self._replies and not self._transport.is_closing():
            self._transport.write(b"".join(self._replies))
        self._replies.clear()


def _now_us() -> int:
    return time_ns() // 1_000
