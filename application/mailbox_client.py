"""A mailbox that another process serves, over any transport."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from functools import partial
from time import time_ns
from typing import Any, Protocol, TypeVar

from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.mailbox.outgoing import NewId, name_job, send_outgoing
from postroom.application.mailbox.receive import make_receive, record_receive
from postroom.application.mailbox.settle import (
    NackOptions,
    check_nack,
    check_receipt,
    check_results,
    submit_valid,
)
from postroom.application.message_stream import HEARTBEAT_MS, MAX_WAIT_MS, MessageStream, check_stream
from postroom.application.messages import MessageDelivery, MessageResult, NewMessage, Sent
from postroom.application.operations.mailbox import Mailbox
from postroom.application.operations.operation import Arguments, Operation, derive
from postroom.application.received_messages import ReceivedMessage
from postroom.application.tracing import ACK, EXTEND, NACK, REDRIVE, REMOTE_SEND, MessagingOperation, tracer
from postroom.domain.arguments import check_int, check_items
from postroom.domain.errors import FrameTooLarge, MailboxClosed, Rejected, Saturated, Unavailable, WrongOwner
from postroom.domain.mailbox.commands import Receive
from postroom.domain.message import NackAction, Receipt
from postroom.domain.policy import DEFAULT_MAX_BYTES, DEFAULT_MAX_MESSAGES, check_visibility
from postroom.domain.search import filter_of_mailbox

MAX_ITEMS = 1_000
"""Maximum number of messages or receipts in one request."""
OVERHEAD_BYTES = 512
"""Estimated size of a message in a batch besides its payload and attributes."""
RECEIPT_BYTES = 48
"""Estimated size of a receipt in a batch."""


T = TypeVar("T")


def split_batches(items: Sequence[T], max_bytes: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield messages or receipts in batches of up to `max_bytes`, or of one."""
    batch: list[T] = []
    size = 0
    for item in items:
        added = size_of(item)
        if batch and (size + added > max_bytes or len(batch) == MAX_ITEMS):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += added
    if batch:
        yield batch


def size_of_message(message: NewMessage) -> int:
    """Return the estimated size of a message in a batch."""
    return OVERHEAD_BYTES + len(message.payload) + sum(len(k) + len(v) for k, v in message.attrs.items())


JITTER = 0.25
MAX_SILENT_HEARTBEATS = 3


SPANS = ("redrive_dead_letters",)
"""Operations that have a span of their own, besides sends and settlements."""


class MailboxTransport(Protocol):
    """Port: one attempt of each call of `Mailbox`, with arguments that are valid.

    Every call raises the error that the server reported, or Unavailable with a retry time when the server
    can't be reached. A call that is cancelled may have taken effect.
    """

    where: str
    """Address of the server, for errors."""
    max_batch_bytes: int
    """Size of the payloads and attributes that one batch may have."""

    async def get_name(self) -> str:
        """Return the name of the mailbox that the server serves."""

    async def send(self, message: NewMessage) -> Sent:
        """Send a message."""

    async def send_batch(self, messages: Sequence[NewMessage]) -> list[Sent | Rejected]:
        """Send messages; return an answer for each, in their order."""

    async def receive(self, command: Receive, wait_ms: int) -> list[MessageDelivery]:
        """Receive messages; wait up to `wait_ms` for one."""

    def stream(self, command: Receive, heartbeat_ms: int) -> AsyncGenerator[list[MessageDelivery], None]:
        """Yield messages as they come, at most `command.max_messages` of them unsettled at a time.

        A batch comes at least every `heartbeat_ms`, if need be an empty one. The server makes unsettled
        messages ready when the generator is closed. It never ends by itself.

        Raises: as every call, when the server refuses or ends the stream.
        """

    async def ack(
        self, receipts: Sequence[Receipt], results: Mapping[Receipt, MessageResult] = {}
    ) -> list[Rejected | None]:
        """Settle deliveries, some of them with a result."""

    async def nack(self, receipts: Sequence[Receipt], options: NackOptions) -> list[Rejected | None]:
        """Fail deliveries."""

    async def extend(self, receipts: Sequence[Receipt], visibility_ms: int) -> list[Rejected | None]:
        """Extend deliveries."""

    async def ask(self, operation: Operation, arguments: Arguments) -> Any:
        """Return the result of any other operation."""


@derive(Mailbox)
class MailboxClient(Mailbox):
    """`Mailbox` over a transport.

    It retries `Saturated` and `Unavailable` until the time of the call is over, after the pause that the
    server asks for, or after a second if the server can't be reached. Sends are safe to repeat: a message
    without an id gets one here. `redrive_dead_letters` and `purge_topic` are not repeated when their outcome
    is unknown.

    Arguments:
        name: the mailbox that the server serves.
        timeout_ms: time for each call, besides the wait for messages.
        new_id: generator of UUIDv7s.
    """

    def __init__(self, transport: MailboxTransport, name: str, timeout_ms: int, new_id: NewId) -> None:
        self._transport = transport
        self._name = name
        self._timeout_ms = timeout_ms
        self._is_closed = False
        self._messages = MessageFactory(name, lambda: 0, new_id)
        self._new_id = new_id

    @classmethod
    @asynccontextmanager
    async def open(
        cls, transport: MailboxTransport, timeout_ms: int, new_id: NewId
    ) -> AsyncIterator["MailboxClient"]:
        """Use the mailbox that the server serves, for as long as the context lasts.

        Raises: Unavailable when the server can't be reached in time.
        """
        name = await cls(transport, "", timeout_ms, new_id)._repeat(transport.get_name)
        client = cls(transport, name, timeout_ms, new_id)
        try:
            yield client
        finally:
            client.close()

    def close(self) -> None:
        """Refuse all later calls."""
        self._is_closed = True

    @property
    def name(self) -> str:
        """Return the name of the mailbox."""
        return self._name

    async def send_message(self, message: NewMessage, /) -> Sent:
        outgoing = self._messages.prepare(message)
        new = outgoing.message
        with tracer().span(REMOTE_SEND, (new.topic,), message_id=new.message_id):
            return outgoing.result(await self._repeat(lambda: self._transport.send(new)))

    async def send_batch(self, messages: Sequence[NewMessage], /) -> list[Sent | Rejected]:
        items = check_items("messages", messages)
        return await send_outgoing(items, self._messages.prepare, self._send)

    async def receive_messages(
        self,
        topic: str | Sequence[str],
        /,
        *,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        max_bytes: int = DEFAULT_MAX_BYTES,
        visibility_ms: int | None = None,
        consumer: str | None = None,
        wait_ms: int = 0,
    ) -> list[ReceivedMessage]:
        end = asyncio.get_running_loop().time() + check_int("wait_ms", wait_ms, 0, MAX_WAIT_MS) / 1_000
        topics = (topic,) if isinstance(topic, str) else check_items("topic", topic)
        command = make_receive(topics, max_messages, max_bytes, visibility_ms, consumer)

        def receive() -> Awaitable[list[MessageDelivery]]:
            remaining = end - asyncio.get_running_loop().time()
            return self._transport.receive(command, max(0, int(remaining * 1_000)))

        started_ns = time_ns()
        received = [ReceivedMessage(each, self) for each in await self._repeat(receive, wait_ms)]
        record_receive(received, started_ns)
        return received

    def stream_messages(
        self,
        topic: str | Sequence[str],
        /,
        *,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        max_bytes: int = DEFAULT_MAX_BYTES,
        visibility_ms: int | None = None,
        consumer: str | None = None,
        heartbeat_ms: int = HEARTBEAT_MS,
        wait_ms: int | None = None,
    ) -> AbstractAsyncContextManager[MessageStream]:
        check_stream(max_messages, heartbeat_ms, wait_ms)
        topics = (topic,) if isinstance(topic, str) else check_items("topic", topic)
        command = make_receive(topics, max_messages, max_bytes, visibility_ms, consumer)
        return MessageStream(self._stream(command, heartbeat_ms), max_messages, wait_ms)

    async def ack_messages(
        self, receipts: Sequence[Receipt], /, *, results: Sequence[MessageResult | None] | None = None
    ) -> list[Rejected | None]:
        if results is None:
            return await self._settle(ACK, receipts, self._transport.ack)
        by_receipt = check_results(receipts, results)
        return await self._settle(ACK, receipts, partial(self._ack_with_results, by_receipt))

    async def nack_messages(
        self,
        receipts: Sequence[Receipt],
        /,
        *,
        reason: str | None = None,
        delay_ms: int | None = None,
        action: NackAction = "retry",
        traceback: str | None = None,
    ) -> list[Rejected | None]:
        options = check_nack(reason, delay_ms, action, traceback)
        return await self._settle(NACK, receipts, lambda valid: self._transport.nack(valid, options))

    async def extend_visibility(
        self, receipts: Sequence[Receipt], visibility_ms: int, /
    ) -> list[Rejected | None]:
        check_visibility(visibility_ms)
        return await self._settle(
            EXTEND, receipts, lambda valid: self._transport.extend(valid, visibility_ms)
        )

    async def _call(self, operation: Operation, arguments: Arguments) -> Any:
        named = name_job(arguments, self._new_id)
        if operation.name == "search_messages":
            named = {**named, "filter_": filter_of_mailbox(named["filter_"], self._name)}

        now, wait_ms = asyncio.get_running_loop().time, named.get("wait_ms", 0)
        end = now() + wait_ms / 1_000

        async def ask() -> Any:
            rest = {"wait_ms": max(0, int((end - now()) * 1_000))} if wait_ms else {}
            return await self._transport.ask(operation, {**named, **rest})

        with tracer().span(REDRIVE, (named["topic"],)) if operation.name in SPANS else nullcontext():
            return await self._repeat(ask, wait_ms, is_idempotent=operation.is_repeatable)

    async def _stream(self, command: Receive, heartbeat_ms: int) -> AsyncIterator[list[ReceivedMessage]]:
        """Yield the deliveries of one stream after the other, while the server can be reached."""
        loop, silence = asyncio.get_running_loop(), MAX_SILENT_HEARTBEATS * heartbeat_ms / 1_000
        deadline: float | None = None
        failure: Saturated | Unavailable = self._closed()
        while not self._is_closed:
            try:
                async with aclosing(self._transport.stream(command, heartbeat_ms)) as batches:
                    while True:
                        async with asyncio.timeout(silence):
                            deliveries = await anext(batches)
                        deadline = None
                        yield [ReceivedMessage(each, self) for each in deliveries]
            except TimeoutError:
                failure = Unavailable(
                    f"A stream of {self._transport.where} was silent for {MAX_SILENT_HEARTBEATS} heartbeats."
                )
            except (Saturated, Unavailable) as error:
                failure = error
            pause = failure.retry_after_ms / 1_000 * random.uniform(1, 1 + JITTER)
            deadline = deadline or loop.time() + self._timeout_ms / 1_000
            if loop.time() + pause >= deadline:
                raise failure
            await asyncio.sleep(pause)
        raise self._closed()

    def _closed(self) -> MailboxClosed:
        return MailboxClosed(f"The connection to {self._transport.where} is closed; connect again.")

    async def _send(self, messages: list[NewMessage]) -> list[Sent | Rejected]:
        """Send messages in batches that fit into a request, and return an answer for each."""
        answers: list[Sent | Rejected] = []
        for batch in split_batches(messages, self._transport.max_batch_bytes, size_of_message):
            try:
                with tracer().span(REMOTE_SEND, (each.topic for each in batch), count=len(batch)):
                    answers += await self._repeat(partial(self._transport.send_batch, batch))
            except Rejected as refusal:
                if len(batch) > 1:
                    raise
                answers.append(refusal)  # a single message may be too large for a request
        return answers

    async def _ack_with_results(
        self, results: Mapping[Receipt, MessageResult], receipts: Sequence[Receipt]
    ) -> list[Rejected | None]:
        """Ack deliveries in batches that fit into a request, and return an answer for each."""

        def size_of(receipt: Receipt) -> int:
            return RECEIPT_BYTES + (len(results[receipt].payload) if receipt in results else 0)

        answers: list[Rejected | None] = []
        for batch in split_batches(receipts, self._transport.max_batch_bytes, size_of):
            try:
                answers += await self._transport.ack(batch, results)
            except FrameTooLarge as refusal:
                if len(batch) > 1:
                    raise
                answers.append(refusal)  # a single result may be too large for a request
        return answers

    async def _settle(
        self,
        operation: MessagingOperation,
        receipts: Sequence[Receipt],
        settle: Callable[[list[Receipt]], Awaitable[list[Rejected | None]]],
    ) -> list[Rejected | None]:
        async def submit(valid: list[Receipt]) -> list[Rejected | None]:
            results: list[Rejected | None] = []
            for start in range(0, len(valid), MAX_ITEMS):
                some = valid[start : start + MAX_ITEMS]
                results += await self._repeat(partial(settle, some))
            return results

        items = check_items("receipts", receipts)
        with tracer().span(operation, count=len(items)):
            return await submit_valid(items, check_receipt, submit)

    async def _repeat(
        self, call: Callable[[], Awaitable[T]], wait_ms: int = 0, *, is_idempotent: bool = True
    ) -> T:
        """Make a call until it succeeds or is refused for good, for as long as its time lasts.

        Arguments:
            call: one attempt.
            wait_ms: how long the call itself may wait for messages.
            is_idempotent: repeat it although its outcome is unknown.

        Raises: Unavailable instead of WrongOwner after an attempt whose outcome is unknown.
        """
        loop = asyncio.get_running_loop()
        is_in_doubt = False
        deadline = loop.time() + (self._timeout_ms + wait_ms) / 1_000
        while True:
            if self._is_closed:
                raise self._closed()
            try:
                async with asyncio.timeout_at(deadline):
                    return await call()
            except TimeoutError:
                raise Unavailable(
                    f"{self._transport.where} did not answer within {self._timeout_ms} ms; whether the call "
                    "took effect is unknown. Repeat it, or raise timeout_ms."
                ) from None
            except WrongOwner as error:
                if not is_in_doubt:
                    raise
                raise Unavailable(
                    f"{self._transport.where} does not own the mailbox any more; whether an earlier attempt "
                    "of the call took effect is unknown. Repeat the call at its owner."
                ) from error
            except (Saturated, Unavailable) as error:
                is_in_doubt = is_in_doubt or isinstance(error, Unavailable)
                # Clients that were refused together don't come back together.
                pause = error.retry_after_ms / 1_000 * random.uniform(1, 1 + JITTER)
                is_repeatable = is_idempotent or isinstance(error, Saturated)
                if not is_repeatable or loop.time() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)
