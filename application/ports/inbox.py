"""Ports: the inbox of a bounded context, and the handler of its events (SDS-047 PORT-047-002)."""

from base64 import b64decode
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol
from uuid import UUID

import msgspec

from postroom.application.ports.outbox import Backlog
from postroom.application.ports.source import SourceMessage, StreamState
from postroom.domain.inbox import HandlerResult, InboxMessage


class PartitionBacklog(msgspec.Struct, frozen=True):
    """Messages of ordered workers that are not settled, in one partition of a consumer's queue.

    Arguments:
        consumer: `STREAM/DURABLE`.
        first_sequence: position in the stream of the first one.
        oldest_at: when the first one was added to the queue, µs UTC.
    """

    consumer: str
    partition: int
    count: int
    first_sequence: int
    oldest_at: int


class InboxRepository(Protocol):
    """The messages that an inbox received, and their states; see `tests/conformance/inbox_repository.py`.

    Changes return the message's new state. All times are in µs UTC.

    Raises: Unavailable when the database can't be used, or another transaction has locked the message.
    """

    async def insert(
        self, message_id: UUID, subject: str, at: int, *, redrive: bool = False, busy_ms: int = 0
    ) -> InboxMessage:
        """Record that a delivery of a message starts (SDS-047 CMD-051).

        Arguments:
            redrive: start it although the message is a dead letter.
            busy_ms: refuse while another delivery that started less than this ago is in progress.

        Raises:
            DuplicateInboxMessage: the message is settled (SDS-047 POL-047-003).
            Unavailable: another delivery of the message is in progress.
        """

    async def mark_processed(self, message_id: UUID, at: int) -> InboxMessage:
        """Record that the handler processed the message; the second time changes nothing.

        Raises: InvalidTimestamp if `at` is before the message was received (SDS-047 POL-047-004).
        """

    async def record_error(self, message_id: UUID, error: str, at: int) -> InboxMessage:
        """Record that a delivery failed and the message will be delivered again."""

    async def mark_dead_lettered(self, message_id: UUID, reason: str, at: int) -> InboxMessage:
        """Record that the message was published to the dead-letter subject."""

    async def mark_discarded(self, message_id: UUID, reason: str, letter: bytes, at: int) -> InboxMessage:
        """Record that an operator discarded a dead letter, whose JSON the history keeps.

        Raises: NotFound if the inbox has no such message.
        """

    async def backlog(self) -> Backlog:
        """Count messages that are neither processed nor dead-lettered (SDS-047 QRY-051)."""

    async def queue_backlog(self, consumer: str | None = None) -> Sequence[PartitionBacklog]:
        """Count the messages in the queues of ordered workers, by partition; those without any are omitted.

        Arguments:
            consumer: only its queue, `STREAM/DURABLE`.
        """

    async def delete_processed(self, before: int, limit: int) -> int | None:
        """Delete up to `limit` messages processed before a time; None if another process does so."""

    def exclusive(self, task: str) -> AbstractAsyncContextManager[bool]:
        """Try to lock a task on this inbox while the context manager lasts; yield whether that succeeded."""

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""


class NewMessage(msgspec.Struct, frozen=True, gc=False):
    """A message to be added to the queue.

    Arguments:
        lane: hash of the key that keeps its order, 64 bits with sign.
    """

    partition: int
    lane: int
    message: SourceMessage


class QueuedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message of the queue.

    Arguments:
        position: its place in the queue.
        epoch: the epoch of its partition when it was read.
        failures: deliveries that failed.
    """

    position: int
    partition: int
    epoch: int
    lane: int
    failures: int
    message: SourceMessage


class Turn(msgspec.Struct, frozen=True):
    """The right to add to the queue for a time.

    Arguments:
        sequence: sequence of the stream up to which its messages are in the queue.
        queued: length of the queue, up to the limit that the caller named.
    """

    sequence: int
    queued: int


class Retry(msgspec.Struct, frozen=True, gc=False):
    """A message that failed, to be delivered after `delay_ms`."""

    position: int
    partition: int
    epoch: int
    delay_ms: int


class Ownership(msgspec.Struct, frozen=True):
    """Partitions that a worker owns.

    Arguments:
        epochs: its partitions with their epochs.
        workers: live workers of the consumer, itself included.
    """

    epochs: Mapping[int, int]
    workers: int


class InboxQueue(Protocol):
    """Messages of one consumer in the order of its stream, and the partitions of one worker.

    Each method is one transaction. A partition has one owner, who keeps it until it releases it, or until it
    has not renewed its lease in time and another worker claims it. The tests are in
    `tests/integration/test_inbox_queue.py`.

    Raises: Unavailable when the database can't be used.
    """

    async def open(self, state: StreamState) -> None:
        """Open the queue; a recreated stream or consumer is read from its ack floor."""

    async def take_turn(self, ms: int, most: int) -> Turn | None:
        """Take or prolong the right to add, for `ms`; None while another worker has it.

        Arguments:
            most: count the messages of the queue up to this number.
        """

    async def add(self, after: int, last: int, messages: Sequence[NewMessage]) -> bool:
        """Add the messages of the stream after one sequence up to another.

        Returns: False, and changes nothing, if the queue has the stream up to another sequence than `after`.
        """

    async def renew(self, ms: int) -> None:
        """Renew the lease of this worker's partitions for `ms`."""

    async def claim(self) -> Ownership:
        """Claim partitions without a live owner, up to this worker's share of them."""

    async def release(self, partitions: Collection[int]) -> None:
        """Give up partitions; messages of theirs must not be in hand."""

    async def leave(self) -> None:
        """Give up all partitions, and the turn."""

    async def next(
        self, limit: int, in_hand: Collection[int], draining: Collection[int]
    ) -> Sequence[QueuedMessage]:
        """Return the first messages of each of this worker's partitions, in the order of the queue.

        A message that waits for its retry keeps back the later ones of its lane.

        Arguments:
            limit: maximum number of messages; of one partition, a part of that may be returned.
            in_hand: positions of messages to pass over.
            draining: partitions to pass over.
        """

    async def settle(self, settled: Collection[int], retries: Collection[Retry]) -> None:
        """Remove messages, and postpone others whose partition still has the epoch."""

    async def close(self) -> None:
        """Disconnect; closing twice is fine."""


class HandlerRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Request to a handler, with SDS-047's field names (section 12).

    Arguments:
        message_id, event_type, event_version: id, type and version of the event.
        subject: that it was published on.
        occurred_at: RFC 3339, UTC.
        payload: JSON value; bytes if there is a `content_type`, in JSON as base64.
        attributes: attributes of a CloudEvent; None, and left out of the JSON, for messages of other formats.
        content_type: media type of a payload that is not JSON; None, and left out of the JSON, for JSON.
        correlation_id, causation_id: ids of the request, and of the event's cause.
    """

    message_id: str
    subject: str
    event_type: str
    event_version: int
    occurred_at: str | None
    correlation_id: str | None
    causation_id: str | None
    payload: Any
    attributes: dict[str, str] | None = None
    content_type: str | None = None

    def __post_init__(self) -> None:
        if self.content_type is not None and isinstance(self.payload, str):  # decoded from JSON
            msgspec.structs.force_setattr(self, "payload", b64decode(self.payload, validate=True))


class EventHandler(Protocol):
    """Code that handles events; every adapter passes `tests/conformance/event_handler.py`."""

    async def handle(self, request: HandlerRequest) -> HandlerResult:
        """Handle an event and return the result; a missing response is a failure."""

    async def close(self) -> None:
        """Release connections; closing twice is fine."""
