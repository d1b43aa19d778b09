"""Relay of an outbox to a mailbox: the owner of the mailbox sends what transactions recorded for it.

A row is deleted after its message is durable in the mailbox. If the owner ends in between, the next owner
sends the row again under the same message id, which adds nothing: every committed message is sent exactly
once.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from typing import Protocol

from blake3 import blake3
from msgspec.structs import replace

from postroom.application.messages import NewMessage, Sent
from postroom.application.operations.mailbox import Mailbox
from postroom.application.outbox.events import (
    AGGREGATE_ID,
    CAUSATION_ID,
    CONTENT_TYPE,
    CORRELATION_ID,
    TRACEPARENT,
    read_message,
    recorded_at,
)
from postroom.application.outbox.formats import EVENT_ID
from postroom.application.ports.outbox import MessageOutbox, NotStored, PublishAck, RecordedMessage
from postroom.application.telemetry import logger, summarize
from postroom.application.tracing import RELAY, current_corr_id, make_context, read_context, tracer
from postroom.domain.errors import Fenced, InvalidRequest, Rejected, Saturated, Unavailable, WrongPosition
from postroom.domain.message import MS
from postroom.domain.names import MAX_ID_CHARS
from postroom.domain.policy import SECOND_MS, OutageBackoff, backoff_ms

BATCH = 500
BATCH_BYTES = 256 << 10
"""Size of payloads from which no message is added to a batch."""
BACKOFF = OutageBackoff(50, 5_000)
"""Backoff while the database or the mailbox can't be used."""


class SendBatch(Protocol):
    """Sender of messages into the mailbox; see `postroom.application.mailbox.send.SendBatch`."""

    def __call__(self, messages: Sequence[NewMessage]) -> Awaitable[list[Sent | Rejected]]:
        """Send messages and return an answer for each."""


class MessageRelay:
    """Sender of the messages of an outbox into the mailbox that this process owns.

    Messages are sent in the order of recording. A refused message stays in the outbox with its error and
    holds back no other; a topic that is full is retried later and holds back only itself.

    Arguments:
        where: name of the outbox's database for log events.
        now: returns the log time of the mailbox, µs since 1970 UTC.
        jitter: returns uniform random numbers in [0, 1).
    """

    def __init__(
        self,
        outbox: MessageOutbox,
        send: SendBatch,
        where: str,
        now: Callable[[], int],
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._outbox = outbox
        self._send = send
        self._where = where
        self._now = now
        self._jitter = jitter
        self._full_until: dict[str, float] = {}

    async def run(self) -> None:
        """Relay messages until cancelled, or until another process owns the mailbox."""
        failures = 0
        while True:
            try:
                if not await self.relay_once():
                    await self._wait()
                failures = 0
            except (Fenced, WrongPosition):
                return
            except Exception as error:  # an outage, or a defect; the messages stay in the outbox
                failures += 1
                pause_ms = backoff_ms(BACKOFF, failures, self._jitter())
                logger().retry(
                    "outbox.relay_failed", outbox=self._where, error=summarize(error), pause_ms=pause_ms
                )
                await asyncio.sleep(pause_ms / SECOND_MS)

    async def relay_once(self) -> int:
        """Send one batch and return the number of messages that left the outbox.

        Raises: Unavailable when the database or the mailbox can't be used, Saturated when the mailbox accepts
            no commands.
        """
        now = asyncio.get_running_loop().time()
        self._full_until = {topic: until for topic, until in self._full_until.items() if until > now}
        rows = await self._outbox.find(BATCH, self._full_until)
        messages: list[tuple[RecordedMessage, NewMessage]] = []
        refused: list[tuple[RecordedMessage, Rejected]] = []
        for row in rows:
            try:
                messages.append((row, self._read(row)))
            except InvalidRequest as error:
                refused.append((row, error))
        corr_ids = {row.id: message.correlation_id or row.id for row, message in messages}
        answers = await self._send_all([message for _, message in messages]) if messages else []
        sent: list[RecordedMessage] = []
        for (row, message), answer in zip(messages, answers, strict=True):
            match answer:
                case Saturated():
                    self._full_until[message.topic] = now + answer.retry_after_ms / SECOND_MS
                case Rejected():
                    refused.append((row, answer))
                case Sent():
                    sent.append(row)
        for row, rejection in refused:
            logger().error(
                "outbox.refused",
                outbox=self._where,
                message_id=row.id,
                corr_id=corr_ids.get(row.id, row.id),
                error=str(rejection),
            )
        if sent or refused:
            await self._outbox.settle(sent, [(row, str(rejection)) for row, rejection in refused])
        return len(sent) + len(refused)

    def _read(self, row: RecordedMessage) -> NewMessage:
        """Return the message of a row, whose delay counts from when it was recorded."""
        message = read_message(row)
        at = recorded_at(row.id, row.message) if message.deliver_after_ms else None
        if at is None:
            return message
        waited_ms = max(0, self._now() - at) // MS
        return replace(message, deliver_after_ms=max(0, message.deliver_after_ms - waited_ms))

    async def _send_all(self, messages: Sequence[NewMessage]) -> list[Sent | Rejected]:
        links = (make_context(each.trace_id, each.span_id) for each in messages)
        with tracer().span(RELAY, (each.topic for each in messages), count=len(messages), links=links):
            return await self._send(messages)

    async def _wait(self) -> None:
        """Wait for new messages, or until a full topic is to be tried again."""
        until = min(self._full_until.values(), default=None)
        try:
            async with asyncio.timeout_at(until):
                await self._outbox.wait()
        except TimeoutError:
            pass


JSON = "application/json"
_OWN_FIELDS = (EVENT_ID, CONTENT_TYPE, CORRELATION_ID, CAUSATION_ID, TRACEPARENT)
"""Headers that correspond to fields of a message; all others become custom headers."""


class MailboxPublisher:
    """A publisher to the topics of a mailbox, which stores each event once.

    The header `Event-Id` becomes the message id, and `Aggregate-Id` the sticky key. Events that are published
    in one turn of the event loop are sent together; each has its own answer.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._count = 0
        self._is_closed = False
        self._waiting: list[tuple[NewMessage, asyncio.Future[Sent]]] = []
        self._sends: set[asyncio.Task[None]] = set()

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        """Send one message to the topic `subject` and return when it is durable; see `Publisher.publish`.

        The sequence number counts the messages of this publisher.
        """
        name = self._mailbox.name
        if self._is_closed:
            raise Unavailable(f"Mailbox {name} can't be sent to: the publisher was closed.")
        try:
            sent = await self._send(_message(subject, payload, headers))
        except Saturated as error:
            raise NotStored(f"Mailbox {name} is full: {error}", error.retry_after_ms) from error
        except InvalidRequest:
            raise
        except Rejected as error:
            raise InvalidRequest(f"Mailbox {name} refuses a message for topic {subject}: {error}") from error
        self._count += 1
        return PublishAck(name, self._count, sent.duplicate)

    async def close(self) -> None:
        """Refuse further messages; the mailbox stays open."""
        self._is_closed = True

    async def _send(self, message: NewMessage) -> Sent:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sent] = loop.create_future()
        self._waiting.append((message, answer))
        if len(self._waiting) == 1:
            loop.call_soon(self._send_waiting)
        return await answer

    def _send_waiting(self) -> None:
        """Send the messages that wait, in batches of limited number and size."""
        waiting, self._waiting = self._waiting, []
        start = size = 0
        for n, (message, _) in enumerate(waiting, 1):
            size += len(message.payload)
            if n == len(waiting) or n - start == BATCH or size >= BATCH_BYTES:
                work = self._send_batch(waiting[start:n])
                task = asyncio.get_running_loop().create_task(work, context=Context())  # of no event
                self._sends.add(task)
                task.add_done_callback(self._sends.discard)
                start, size = n, 0

    async def _send_batch(self, batch: Sequence[tuple[NewMessage, asyncio.Future[Sent]]]) -> None:
        messages = [message for message, _ in batch]
        answers: Sequence[object]
        try:
            answers = await self._mailbox.send_batch(messages)
        except Rejected as error:  # maybe due to one message, unless no message can be sent
            answers = [error] * len(batch)
            if not isinstance(error, Saturated):
                sends = (self._mailbox.send_message(message) for message in messages)
                answers = await asyncio.gather(*sends, return_exceptions=True)
        except Exception as error:
            answers = [error] * len(batch)
        for (_, waiting), answer in zip(batch, answers, strict=True):
            if waiting.done():
                continue
            if isinstance(answer, Sent):
                waiting.set_result(answer)
            elif isinstance(answer, Exception):
                waiting.set_exception(answer)
            else:
                waiting.cancel()


def _message(topic: str, payload: bytes, headers: Mapping[str, str]) -> NewMessage:
    trace = read_context(headers.get(TRACEPARENT))
    return NewMessage(
        topic=topic,
        payload=payload,
        message_id=headers.get(EVENT_ID),
        sticky_key=_sticky_key(headers.get(AGGREGATE_ID)),
        attrs={name: value for name, value in headers.items() if name not in _OWN_FIELDS},
        content_type=headers.get(CONTENT_TYPE, JSON),
        correlation_id=headers.get(CORRELATION_ID) or current_corr_id(),
        causality_parent=headers.get(CAUSATION_ID),
        trace_id=trace.trace_id if trace else None,
        span_id=trace.span_id if trace else None,
    )


def _sticky_key(aggregate_id: str | None) -> str | None:
    """Return the sticky key of an aggregate: its id, or a hash of a long id."""
    if aggregate_id is None or len(aggregate_id) <= MAX_ID_CHARS:
        return aggregate_id
    return f"b3:{blake3(aggregate_id.encode()).hexdigest()}"
