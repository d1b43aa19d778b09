"""The owner's side of a connection to the local socket: reads requests, and replies to them."""

import asyncio
import inspect
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from time import time_ns
from typing import Any, Protocol

import msgspec

from postroom.adapters.local import protocol
from postroom.adapters.local.endpoints import Engine
from postroom.adapters.local.protocol import FRAME_BYTES, Frames, Hello, MalformedFrame, Receiving, frame
from postroom.adapters.local.shared import OWNER_LOST
from postroom.adapters.sockets.address import is_own_or_root
from postroom.application.caller import call_as
from postroom.application.mailbox.groups import QueuedAnswers, deliveries_of
from postroom.application.mailbox.receive import STREAM_ENDED
from postroom.application.messages import MessageDelivery
from postroom.application.ports.event_log import Answer
from postroom.application.remote_errors import ProblemBrief
from postroom.application.telemetry import logger
from postroom.application.threads import cancel_and_wait, set_close_on_fork
from postroom.application.tracing import correlate
from postroom.domain.errors import InternalError, InvalidRequest, PostroomError, Saturated
from postroom.domain.mailbox.commands import Ack, Command, Extend, Nack
from postroom.domain.message import Receipt

MAX_REQUESTS = 10_000
"""Requests of one connection that may be in progress."""


class ServedMailbox(Protocol):
    """The mailbox that the server answers from: the engine, and the queries as methods."""

    @property
    def engine(self) -> Engine:
        """Return the owner."""


class Outboxes(Protocol):
    """Relays of the outboxes of other processes."""

    def add(self, addresses: Sequence[str]) -> None:
        """Relay the messages recorded at these addresses."""


class ConnectionServer(Protocol):
    """The part of a server that its connections use."""

    hello: Hello
    is_closing: bool
    connections: "set[ServedConnection]"

    @property
    def engine(self) -> Engine | None:
        """Return the owner if the mailbox is open."""

    async def mailbox(self) -> ServedMailbox:
        """Return the mailbox once it is open."""

    async def outboxes(self) -> Outboxes:
        """Return the relays of outboxes once the mailbox is open."""

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that outlives a connection."""

    def disconnect(self) -> None:
        """Close all connections without answers."""


class ServedConnection(asyncio.Protocol):
    """Connection of one client."""

    def __init__(self, server: ConnectionServer, *, is_peer_checked: bool = False) -> None:
        self._server = server
        self._is_peer_checked = is_peer_checked
        self._loop = asyncio.get_running_loop()
        self._frames = Frames()
        self.requests: dict[int, asyncio.Task[None] | _Reply] = {}
        self.answered: list[_Reply] = []
        self._arrived: dict[int, protocol.Request] = {}
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
            self._start_all()
        except MalformedFrame as error:
            self._start_all()
            logger().warning("mailbox.malformed_frame", mailbox=self._server.hello.mailbox, error=str(error))
            self._replies.append(frame((0, ProblemBrief.of(InvalidRequest(str(error))), None)))
            self._flush()
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        set_close_on_fork(self._descriptor, False)
        self._server.connections.discard(self)
        for request in list(self.requests.values()):
            request.cancel()
        if not self._closed.done():
            self._closed.set_result(None)
        # When the server closes, the client goes on with the next owner.
        if self._streamed and not self._server.is_closing:
            self._server.run(self._return_streamed())

    def pause_writing(self) -> None:
        self._transport.pause_reading()  # this client does not take its answers

    def resume_writing(self) -> None:
        if not self._server.is_closing:
            self._transport.resume_reading()

    # -- for the server ---

    def stop_reading(self) -> None:
        """Accept no more requests."""
        self._transport.pause_reading()

    def abort(self) -> None:
        """End the connection without answers."""
        self._transport.abort()

    async def close(self) -> None:
        """Cancel the requests, send the answers that are ready, and end the connection."""
        await cancel_and_wait(*(each for each in self.requests.values() if isinstance(each, asyncio.Task)))
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
            cancelled = protocol.read_id(content)
            if self._arrived.pop(cancelled, None) is None and cancelled in self.requests:
                self.requests[cancelled].cancel()
        elif len(self.requests) + len(self._arrived) >= MAX_REQUESTS:
            self._reply_error(id_, Saturated(f"A connection has {MAX_REQUESTS} requests in progress.", 100))
        elif id_ in self.requests or id_ in self._arrived:
            raise MalformedFrame(f"There are two requests with the id {id_}.")
        else:
            self._arrived[id_] = request

    def _start_all(self) -> None:
        """Start the requests that have arrived and were not cancelled at once."""
        arrived, self._arrived = self._arrived, {}
        for id_, request in arrived.items():
            with correlate(request.corr_id), call_as(request.caller):  # the task gets the context, too
                self._start(id_, request.kind, request.body)

    def _start(self, id_: int, kind: str, content: msgspec.Raw) -> None:
        try:
            match kind:
                case protocol.RECEIVE:
                    receiving = protocol.read_receive(content)
                    if self._queue(id_, (receiving.command,), receiving):
                        return
                    work = self._receive(receiving)
                case protocol.QUERY:
                    work = self._query(protocol.read_query(content))
                case protocol.FIND_ID:
                    work = self._find_id(protocol.read_stream(content))
                case protocol.RELAY:
                    work = self._relay(protocol.read_outboxes(content))
                case _:
                    commands = protocol.read_commands(kind, content)
                    if self._queue(id_, commands, None):
                        return
                    work = self._submit(commands)
        except MalformedFrame as error:
            self._reply_error(id_, InvalidRequest(str(error)))
            return
        except PostroomError as error:
            self._reply_error(id_, error)
            return
        self._run(id_, work)

    def _queue(self, id_: int, commands: Sequence[Command], receiving: Receiving | None) -> bool:
        """Queue the commands of a request, without a task; return whether that was possible."""
        engine = self._server.engine
        if engine is None or (
            receiving is not None
            and receiving.wait_ms
            and not engine.is_deliverable(receiving.command.topics)
        ):
            return False
        self.requests[id_] = reply = _Reply(
            self.answered,
            self.reply_all,
            id=id_,
            commands=commands,
            receiving=receiving,
            requests=self.requests,
        )
        if engine.start(commands, reply):
            return True
        del self.requests[id_]
        return False

    def reply_all(self) -> None:
        """Reply to the requests that were answered in this turn of the event loop."""
        answered, engine = list(self.answered), self._server.engine
        self.answered.clear()
        for reply in answered:
            if reply.is_cancelled:
                if engine is not None:
                    engine.release(deliveries_of(reply.result or ()))
                continue
            del self.requests[reply.id]
            receiving = reply.receiving
            if receiving is not None and receiving.wait_ms and reply.result == [[]]:
                self._run(reply.id, self._receive(receiving))
                continue
            try:
                if reply.error is not None:
                    raise reply.error
                if receiving is None:
                    self._reply(reply.id, self._after_submit(reply.commands, reply.result))
                elif isinstance(reply.result[0], PostroomError):
                    raise reply.result[0]
                else:
                    self._reply(reply.id, self._after_receive(receiving, reply.result[0]))
            except Exception as error:
                self._fail(reply.id, error)

    def _run(self, id_: int, work: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(self._answer(id_, work))
        self.requests[id_] = task

        def end(_: asyncio.Task[None]) -> None:
            self.requests.pop(id_, None)
            work.close()  # it never starts if the task was cancelled before

        task.add_done_callback(end)

    async def _answer(self, id_: int, work: Any) -> None:
        try:
            self._reply(id_, await work)
        except Exception as error:
            self._fail(id_, error)

    def _fail(self, id_: int, error: Exception) -> None:
        """Reply with the error of a request."""
        if isinstance(error, OWNER_LOST):
            self._server.disconnect()
        elif isinstance(error, PostroomError):
            if not self._server.is_closing:  # when closing, the client asks the next owner
                self._reply_error(id_, error)
        else:
            mailbox = self._server.hello.mailbox
            logger().error("mailbox.request_failed", mailbox=mailbox, exc_info=error)
            text = (
                f"Mailbox {mailbox} failed on a request ({type(error).__name__}); report the traceback that "
            )
            self._reply_error(id_, InternalError(f"{text}its owner logged."))

    async def _submit(self, commands: list[Command]) -> object:
        owner = (await self._server.mailbox()).engine
        return self._after_submit(commands, await owner.submit(commands))

    def _after_submit(self, commands: Sequence[Command], answers: Sequence[Answer]) -> object:
        if self._streamed:
            self._note(commands)
        return protocol.write_answers(answers)

    async def _receive(self, receiving: Receiving) -> object:
        owner = (await self._server.mailbox()).engine
        return self._after_receive(receiving, await owner.receive(receiving.command, receiving.wait_ms))

    def _after_receive(self, receiving: Receiving, deliveries: list[MessageDelivery]) -> object:
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
        if not nacks:
            return
        with suppress(PostroomError):  # otherwise the visibility timeout returns them
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


class _Reply(QueuedAnswers, eq=False, kw_only=True):
    """The answers to a request whose commands are queued without a task."""

    id: int
    commands: Sequence[Command]
    receiving: Receiving | None
    requests: dict[int, Any]

    def cancel(self) -> None:
        """Cancel the request of a client that has given up; nothing is delivered to it."""
        self.is_cancelled = True
        self.requests.pop(self.id, None)


def _now_us() -> int:
    return time_ns() // 1_000
