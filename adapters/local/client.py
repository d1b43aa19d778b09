"""A client's side of a connection to the owner of a mailbox in another process."""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count, groupby
from typing import Any, TypeVar

import msgspec

from postroom.adapters.local import protocol
from postroom.adapters.local.endpoints import Endpoint
from postroom.adapters.local.protocol import Frames, MalformedFrame, Query, Receiving, frame
from postroom.application.caller import current_caller
from postroom.application.mailbox.groups import Answers, releases_of
from postroom.application.messages import MessageDelivery
from postroom.application.ports.event_log import Answer
from postroom.application.threads import has_result, set_close_on_fork, wait_at_most
from postroom.application.tracing import current_corr_id
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable
from postroom.domain.mailbox.commands import Ack, Command, Nack, Receive, Send

T = TypeVar("T")

TICKS = 5
"""Silent intervals, of a fifth of the owner's time each, after which the owner counts as hanging.

Counted in intervals, because a client that was paused itself would find the whole time elapsed.
"""
QUIET_TICKS = 3
"""Intervals between two pings to an owner that only owes messages, which may take long to arrive."""
MAX_GIVEN_UP = 1_000
MAX_BATCH_COMMANDS = 5_000
COMMAND_BYTES = 256


class OwnerGone(Exception):
    """The connection to the owner ended, and with it the calls in progress.

    Arguments:
        was_sent: whether the owner may have received the call.
    """

    def __init__(self, *, was_sent: bool) -> None:
        super().__init__("the owner is gone")
        self.was_sent = was_sent


class LocalClient(asyncio.Protocol):
    """Connection to the owner of a mailbox.

    Arguments:
        owner_timeout_ms: time without any answer after which an owner with unanswered calls counts as
            hanging.
    """

    def __init__(self, endpoint: Endpoint, owner_timeout_ms: int) -> None:
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._interval = owner_timeout_ms / 1_000 / TICKS
        self._frames = Frames()
        self._ids = count(1)
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._receives: set[int] = set()
        """Calls that receive messages, and may have been given up in the meantime."""
        self._requests: list[bytes] = []
        self._transport: Any = None
        self._descriptor = -1
        self._waits = 0
        """How many of the calls wait for messages."""
        self._asked = asyncio.Event()
        self._heard = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        self._ticks: asyncio.Task[None] | None = None
        self._greeting: asyncio.Future[protocol.Hello] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.hanging: str | None = None
        """Token of the ownership to end, if the connection was closed because the owner hangs."""
        self.is_replaced = False
        """Whether it was closed because the mailbox has another owner by now."""

    @classmethod
    async def connect(cls, endpoint: Endpoint, mailbox: str, owner_timeout_ms: int) -> "LocalClient | None":
        """Return a connection to the owner; None if nobody listens.

        `hanging` is set when the owner does not greet in time.

        Raises: Unavailable when the address can't be reached, belongs to another user, or its owner speaks
            another version of the protocol.
        """
        connected = await endpoint.dial()
        if connected is None:
            return None
        client = cls(endpoint, owner_timeout_ms)
        client._opening = client._loop.create_task(endpoint.open(client, connected))
        client._ticks = client._loop.create_task(client._watch())
        try:
            await asyncio.wait([client._opening])
            if client._transport is not None:
                waiting: list[asyncio.Future[Any]] = [client._greeting, client.ended]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            client.close()
            raise
        client._check_opening()
        if client.has_greeted:
            client._check(client._greeting.result(), mailbox)
        return client

    @property
    def has_served(self) -> bool:
        """Return whether the owner greeted, and did not hang."""
        return self.has_greeted and self.hanging is None

    @property
    def has_greeted(self) -> bool:
        """Return whether the owner has greeted."""
        return self._greeting.done()

    # -- for the shared mailbox ---

    async def submit(self, commands: Sequence[Command]) -> Sequence[Answer]:
        """Have the owner decide commands; see `MailboxOwner.submit`."""
        answers: list[Answer] = []
        for kind, batch in _batches(commands):
            answers += self._read(protocol.read_answers, await self._call(kind, batch))
        return answers

    async def receive(
        self, command: Receive, wait_ms: int, *, is_stream: bool = False
    ) -> list[MessageDelivery]:
        """Receive messages; see `MailboxOwner.receive`."""
        receiving = Receiving(command, wait_ms, is_stream)
        received = await self._call(protocol.RECEIVE, receiving, is_wait=wait_ms > 0)
        return self._read(protocol.read_deliveries, received)

    async def find_message_id(self, stream: bytes) -> str:
        """Return the id of a message; see `MailboxOwner.find_message_id`."""
        return self._read(protocol.read_text, await self._call(protocol.FIND_ID, stream))

    async def query(self, name: str, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return the result of a query of the mailbox."""
        query = Query(name, list(arguments), options)
        result = await self._call(protocol.QUERY, query, is_wait=bool(options.get("wait_ms")))
        return self._read(lambda body: protocol.read_result(name, body), result)

    async def relay(self, outboxes: Sequence[str]) -> None:
        """Have the owner send the messages recorded for its mailbox in these databases.

        Arguments:
            outboxes: absolute paths of SQLite files and `postgresql://...`.
        """
        await self._call(protocol.RELAY, list(outboxes))

    def close(self) -> None:
        """End the connection."""
        if self._opening is not None:
            self._opening.cancel()
        if self._transport is not None:
            self._transport.abort()
        elif self._ticks is not None:
            self._ticks.cancel()

    # -- the transport's callbacks ---

    def connection_made(self, transport: Any) -> None:
        """Check that the socket belongs to the owner."""
        self._transport = transport
        socket = transport.get_extra_info("socket")
        self._descriptor = socket.fileno()
        set_close_on_fork(self._descriptor, True)
        if os.geteuid() and not self._endpoint.is_owner(socket):  # root may use sockets of all users
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Hand the replies to their callers."""
        self._heard.set()
        try:
            for body in self._frames.feed(data):
                self._handle(body)
        except MalformedFrame:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """End the calls in progress."""
        set_close_on_fork(self._descriptor, False)
        if self._ticks is not None:
            self._ticks.cancel()
        if not self.ended.done():
            self.ended.set_result(None)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(OwnerGone(was_sent=True))
        self._calls.clear()

    # -- internals ---

    def _check_opening(self) -> None:
        """Raise Unavailable when the peer is not the owner; a connection that was lost has ended."""
        if self._opening is None or self._opening.cancelled():  # `_watch` cancels it
            return
        error = self._opening.exception()
        if error is None:
            return
        self.close()
        if not isinstance(error, OSError):
            raise error
        if not self.ended.done():
            self.ended.set_result(None)

    def _check(self, hello: protocol.Hello, mailbox: str) -> None:
        if hello.version == protocol.VERSION and hello.mailbox == mailbox:
            return
        self.close()
        raise Unavailable(
            f"The process that owns mailbox {mailbox} speaks version {hello.version} of the protocol of "
            f"{self._endpoint}, and this one version {protocol.VERSION}; run the same version of Postroom in "
            "both."
        )

    def _read(self, read: Callable[[msgspec.Raw], T], body: msgspec.Raw) -> T:
        """Return a result; the connection to an owner whose results can't be read ends."""
        try:
            return read(body)
        except MalformedFrame as error:
            self._transport.abort()
            raise Unavailable(
                f"The owner of the mailbox sent an answer that can't be read ({error}); run the same version "
                "of Postroom in both processes."
            ) from error

    def _handle(self, body: bytes) -> None:
        if not self._greeting.done():
            self._greeting.set_result(protocol.read_hello(body))
            return
        id_, error, result = protocol.read_reply(body)
        if id_ == 0 and error is not None:  # the owner could not read a request, and ends the connection
            for waiting in self._calls.values():
                if not waiting.done():
                    waiting.set_exception(protocol.read_error(error))
            self._calls.clear()
            return
        call = self._calls.pop(id_, None)
        if call is None or call.done():  # given up in the meantime
            if id_ in self._receives and error is None:
                self._release(result)
            self._receives.discard(id_)
            return
        self._receives.discard(id_)
        if error is not None:
            call.set_exception(protocol.read_error(error))
        else:
            call.set_result(result)

    async def _call(self, kind: str, body: object, *, is_wait: bool = False) -> msgspec.Raw:
        if self.ended.done():
            raise OwnerGone(was_sent=False)
        id_ = next(self._ids)
        try:
            context = (current_corr_id(), current_caller())
            request = frame((id_, kind, body) if context == (None, None) else (id_, kind, body, *context))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"The arguments can't be sent to the owner: {error}.") from error
        call: asyncio.Future[msgspec.Raw] = self._loop.create_future()
        if not is_wait or not self._calls:
            self._asked.set()
        self._calls[id_] = call
        if kind == protocol.RECEIVE:
            if len(self._receives) >= MAX_GIVEN_UP:  # receives that the owner cancelled get no answer
                self._receives &= self._calls.keys()
            self._receives.add(id_)
        self._waits += is_wait
        self._write(request)
        try:
            return await call
        except asyncio.CancelledError:
            if self._calls.pop(id_, None) is not None:
                self._write(frame((0, protocol.CANCEL, id_)))
            elif kind == protocol.RECEIVE and has_result(call):
                self._release(call.result())
            raise
        finally:
            self._waits -= is_wait

    def _release(self, result: msgspec.Raw) -> None:
        """Release the messages of a receive that was given up, without waiting."""
        with suppress(MalformedFrame):
            if commands := releases_of(protocol.read_deliveries(result)):
                self._write(frame((next(self._ids), Nack.__name__, commands)))

    def _write(self, request: bytes) -> None:
        if not self._requests:
            self._loop.call_soon(self._flush)
        self._requests.append(request)

    def _flush(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"".join(self._requests))
        self._requests.clear()

    async def _watch(self) -> None:
        """End the connection when the owner owes an answer and is silent for the owner timeout.

        End it sooner if the mailbox has a new owner, which must not be evicted.
        """
        silent = 0
        while True:
            self._heard.clear()
            if self._calls:
                self._write(frame((0, protocol.PING, None)))
            if not silent and self._greeting.done() and len(self._calls) <= self._waits:
                if await self._is_quiet():
                    continue
            else:
                await asyncio.sleep(self._interval)
            is_silent = not self._heard.is_set() and (bool(self._calls) or not self._greeting.done())
            silent = silent + 1 if is_silent else 0
            if not silent:
                continue
            incumbent = None
            with suppress(PostroomError):  # an unusable store says nothing about the owner
                incumbent = await self._endpoint.incumbent()
                self.is_replaced = incumbent is None and not self._heard.is_set()
            if self.is_replaced or silent >= TICKS:
                break
        if not self.is_replaced and await self._endpoint.is_host_up():
            self.hanging = incumbent
        if self._opening is not None:
            self._opening.cancel()
        if self._transport is not None:
            self._transport.abort()
        elif not self.ended.done():
            self.ended.set_result(None)

    async def _is_quiet(self) -> bool:
        """Wait for the next question to an owner that owes no answer; return False if it does not answer."""
        self._asked.clear()
        if not self._calls:
            await self._asked.wait()
            return True
        await wait_at_most(self._interval, self._heard.wait())
        if self._heard.is_set():
            await wait_at_most(QUIET_TICKS * self._interval, self._asked.wait())
        return self._heard.is_set() or self._asked.is_set()


def _batches(commands: Sequence[Command]) -> Iterator[tuple[str, list[Command]]]:
    """Yield commands of one kind, as many as one request may have."""
    for kind, group in groupby(commands, type):
        batch: list[Command] = []
        size = 0
        for command in group:
            added = COMMAND_BYTES
            if isinstance(command, Send):
                added += len(command.envelope)
            elif isinstance(command, Ack) and command.result is not None:
                added += len(command.result)
            elif isinstance(command, Nack) and command.traceback is not None:
                added += len(command.traceback)
            if batch and (size + added > protocol.BATCH_BYTES or len(batch) >= MAX_BATCH_COMMANDS):
                yield kind.__name__, batch
                batch, size = [], 0
            batch.append(command)
            size += added
        yield kind.__name__, batch


class Deadlines:
    """Time limits of answers under one timer, as a timer for each would take longer than its commands.

    Arguments:
        timeout_ms: time for each answer.
        error: returns the error of commands that are not answered in time.
    """

    def __init__(self, timeout_ms: int, error: Callable[[], PostroomError]) -> None:
        self._seconds = timeout_ms / 1_000
        self._error = error
        self._answers: deque[tuple[float, Answers]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, answers: Answers) -> None:
        """Limit the time for the answers to commands that were just queued."""
        loop, all_answers = asyncio.get_running_loop(), self._answers
        while all_answers and all_answers[0][1].done():
            all_answers.popleft()
        all_answers.append((loop.time() + self._seconds, answers))
        if self._timer is None:
            self._timer = loop.call_at(all_answers[0][0], self._expire)

    def _expire(self) -> None:
        loop, all_answers = asyncio.get_running_loop(), self._answers
        while all_answers and (all_answers[0][1].done() or all_answers[0][0] <= loop.time()):
            _, answers = all_answers.popleft()
            if not answers.done():
                answers.set_exception(self._error())
        self._timer = loop.call_at(all_answers[0][0], self._expire) if all_answers else None
