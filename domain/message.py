"""The Message aggregate: its events and its state."""

from collections.abc import Sequence
from enum import IntEnum
from itertools import repeat
from typing import Literal

import msgspec

from postroom.domain.commit import EventColumns
from postroom.domain.record import Event

MS = 1_000
"""Microseconds in a millisecond: events carry microseconds, policies milliseconds."""
DEFAULT_PRIORITY = 5
MAX_PRIORITY = 10
MAX_EPOCH = (1 << 48) - 1
"""Greatest epoch that a receipt can carry."""

RequeueReason = Literal["nacked", "visibility_expired", "released"]
NackAction = Literal["retry", "reject", "release"]
NACK_ACTIONS: tuple[NackAction, ...] = ("retry", "reject", "release")
"""What a nack does with its delivery; see `Nack`."""
DeadReason = Literal["max_attempts", "rejected", "ttl_expired", "retention_expired", "integrity", "replaced"]
ExpiryReason = Literal[
    "retention", "capacity", "purged", "archived", "undone", "erased", "cancelled", "superseded", "rewound"
]
OnConflict = Literal["keep", "replace", "reschedule"]
ON_CONFLICT: tuple[OnConflict, ...] = ("keep", "replace", "reschedule")
"""What a send does with the unsettled message that has its unique key; see `Send`."""
REPLACED: DeadReason = "replaced"
"""Reason of a dead letter whose copy a redrive job sent (ADR 0082)."""


class Headers(msgspec.Struct, frozen=True, gc=False):
    """Searchable headers of a message besides its topic (RFC-037 header table).

    Arguments:
        message_id: an external id that is not a UUID; None if the stream id is the id.
        timestamp: `metadata.published_at` in Unix ms.
        custom_headers: the envelope's extensions, as text.
    """

    timestamp: int
    message_id: str | None = None
    content_type: str | None = None
    schema_url: str | None = None
    schema_version: str | None = None
    encryption: str | None = None
    correlation_id: str | None = None
    principal: str | None = None
    namespace: str | None = None
    trace_id: str | None = None
    span_id: str | None = None
    custom_headers: dict[str, str] | None = None


class MessageSent(Event, frozen=True, gc=False):
    """A message was accepted (svc-mailbox I-1).

    Arguments:
        shard: number of its FIFO queue.
        due: log time in µs from which it may be delivered; None for an archived message.
        expires_at: log time in µs at which it is dead-lettered if undelivered.
        size: payload bytes.
        payload_hash, hash_chain: 32-byte BLAKE3 digests (svc-mailbox I-7, I-12).
        envelope: the `PrismEnvelope` bytes as received, stored unchanged.
        priority: of the envelope, 0 to 10.
        sticky_key: see `Send`; None also in logs from before it was stored.
        unique_key: see `Send`.
        copy_of: id of the message of which a subscription got this copy; None for any other message.
    """

    topic: str
    shard: int
    due: int | None
    expires_at: int
    size: int
    idem_key: str | None
    payload_hash: bytes
    hash_chain: bytes
    headers: Headers
    envelope: bytes
    priority: int = DEFAULT_PRIORITY
    sticky_key: str | None = None
    unique_key: str | None = None
    copy_of: str | None = None


class MessageReceived(Event, frozen=True, gc=False):
    """The message was delivered to a consumer; it is hidden until `due` (svc-mailbox I-3).

    Arguments:
        consumer: the name that the consumer gives itself.
        principal, capability: to whom the capability of the consumer was issued, and its root nonce in
            hexadecimal; None for a process of the mailbox's own user (svc-mailbox I-8).
    """

    attempt: int
    due: int
    consumer: str | None
    principal: str | None = None
    capability: str | None = None


class MessageVisibilityExtended(Event, frozen=True, gc=False):
    """The consumer extended the visibility timeout to `due`."""

    attempt: int
    due: int


class MessageAcked(Event, frozen=True, gc=False):
    """The consumer settled the message, which is final (svc-mailbox I-3).

    Arguments:
        result: of the consumer, for the sender; encrypted if the message is.
        result_type: media type of the result.
    """

    attempt: int
    result: bytes | None = None
    result_type: str | None = None


class MessageRequeued(Event, frozen=True, gc=False):
    """The delivery failed, timed out or was released; the message may be delivered again from `due` on.

    Arguments:
        attempt: number of deliveries that count as attempts; a released one does not.
    """

    attempt: int
    due: int
    reason: RequeueReason
    last_error: str | None


class MessageDeadLettered(Event, frozen=True, gc=False):
    """The message became a dead letter (svc-mailbox I-4).

    Arguments:
        traceback: of the error, for people, in UTF-8; encrypted if the message is.
    """

    attempt: int
    reason: DeadReason
    last_error: str | None
    expires_at: int
    traceback: bytes | None = None


class MessageRedriven(Event, frozen=True, gc=False):
    """An operator redrove a dead letter; attempts count from 1 again (svc-mailbox C-4)."""

    due: int
    expires_at: int


class MessageRescheduled(Event, frozen=True, gc=False):
    """An operator changed when the waiting message may be delivered.

    Arguments:
        principal: to whom the capability of the operator was issued; None for the mailbox's own user.
    """

    due: int
    expires_at: int
    principal: str | None = None


class MessageExpired(Event, frozen=True, gc=False):
    """The message was removed unsettled: by retention, the capacity of the DLQ, an operator, or another send.

    Arguments:
        note: why an operator cancelled it, or the id of the message that supersedes it.
        principal: of the operator; see `MessageRescheduled`.
    """

    reason: ExpiryReason
    note: str | None = None
    principal: str | None = None


class Status(IntEnum):
    """Status of a message; delayed messages are `ready`."""

    READY = 0
    IN_FLIGHT = 1
    ACKED = 2
    DEAD = 3
    EXPIRED = 4
    ARCHIVED = 5


# Module constants: attribute access on an enum class costs as much as the rest of a fold step.
READY, IN_FLIGHT, ACKED = Status.READY, Status.IN_FLIGHT, Status.ACKED
DEAD, EXPIRED, ARCHIVED = Status.DEAD, Status.EXPIRED, Status.ARCHIVED


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Token of one delivery of a message; stale receipts are refused (fencing).

    Arguments:
        message: stream id, 16 bytes.
        delivery: version of the `MessageReceived` event; unlike attempts, unique across redrives.
        epoch: fencing number of the owner that delivered the message.
    """

    message: bytes
    delivery: int
    epoch: int


class Deliveries(msgspec.Struct, gc=False, array_like=True):
    """State of a message by its events after `MessageSent`; most messages that wait have none.

    Arguments:
        changed_at: log time of its latest event (µs).
        received_at: log time of its latest RECV (µs).
        visibility: visibility timeout of its latest RECV (µs).
        hidden: visibility timeout of its latest RECV or EXTEND (µs); restarted when log time is.
        reason: why it was last requeued, dead-lettered or removed.
        last_error: of its latest nack.
        redriven: how often it was redriven.
    """

    changed_at: int = 0
    received_at: int = 0
    visibility: int = 0
    hidden: int = 0
    reason: str | None = None
    last_error: str | None = None
    redriven: int = 0


_NONE = Deliveries()
"""Deliveries of a message that has none; never changed."""


class Message(msgspec.Struct, gc=False, array_like=True, eq=False):
    """State of a message; `evolve` changes it in place.

    Arguments:
        position: of its `MessageSent` in the log; determines the order within the shard.
        due: µs at which a ready message may be delivered, or the delivery of one in flight times out.
        delivery, epoch: of the receipt that settles it; delivery is 0 if no receipt does.
        priority: 0 to 10; obeyed if the topic's policy asks for it.
        ready_at: µs from which it could first be delivered since it was sent or redriven.
        last: position of its latest event in the log.
        sticky_key, unique_key: see `MessageSent`.
        deliveries: None before its second event, as a mailbox may have millions of messages that wait.
    """

    stream: bytes
    version: int
    status: Status
    topic: str
    shard: int
    position: int
    size: int
    sent_at: int
    expires_at: int
    due: int
    attempt: int = 0
    delivery: int = 0
    epoch: int = 0
    priority: int = DEFAULT_PRIORITY
    ready_at: int = 0
    last: int = 0
    sticky_key: str | None = None
    unique_key: str | None = None
    deliveries: Deliveries | None = None

    @property
    def changed_at(self) -> int:
        """Return the log time of its latest event (µs)."""
        return self.sent_at if self.deliveries is None else self.deliveries.changed_at

    @property
    def received_at(self) -> int:
        """Return the log time of its latest RECV (µs)."""
        return (self.deliveries or _NONE).received_at

    @property
    def visibility(self) -> int:
        """Return the visibility timeout of its latest RECV (µs)."""
        return (self.deliveries or _NONE).visibility

    @property
    def hidden(self) -> int:
        """Return the visibility timeout of its latest RECV or EXTEND (µs)."""
        return (self.deliveries or _NONE).hidden

    @property
    def reason(self) -> str | None:
        """Return why it was last requeued, dead-lettered or removed."""
        return (self.deliveries or _NONE).reason

    @property
    def last_error(self) -> str | None:
        """Return the error of its latest nack."""
        return (self.deliveries or _NONE).last_error

    @property
    def redriven(self) -> int:
        """Return how often it was redriven."""
        return (self.deliveries or _NONE).redriven

    @property
    def receipt(self) -> Receipt:
        """Return the receipt of its latest delivery."""
        return Receipt(self.stream, self.delivery, self.epoch)


MessageEvent = (
    MessageSent
    | MessageReceived
    | MessageVisibilityExtended
    | MessageAcked
    | MessageRequeued
    | MessageDeadLettered
    | MessageRedriven
    | MessageRescheduled
    | MessageExpired
)


def receive_all(messages: Sequence[Message], events: EventColumns, first: int, epoch: int) -> None:
    """Change each message by its delivery, in place; see `evolve`.

    Arguments:
        events: `MessageReceived` of one time, one for each message.
        first: position of the first event.
        epoch: of their commit.
    """
    _, versions, times, attempts, dues, *_ = events.columns
    at = times[0]
    changes = zip(messages, versions, attempts, dues, range(first, first + len(events)), strict=True)
    for message, version, attempt, due, position in changes:
        message.version = message.delivery = version
        message.status = IN_FLIGHT
        message.due = due
        message.attempt = attempt
        message.epoch = epoch
        message.last = position
        deliveries, hidden = message.deliveries, due - at
        if deliveries is None:
            message.deliveries = Deliveries(at, at, hidden, hidden)
        else:
            deliveries.changed_at = deliveries.received_at = at
            deliveries.visibility = deliveries.hidden = hidden


def ack_all(messages: Sequence[Message], events: EventColumns, first: int) -> None:
    """Change each message by its `MessageAcked`, in place; see `receive_all`."""
    _, versions, times, *_ = events.columns
    at = times[0]
    for message, version, position in zip(messages, versions, range(first, first + len(events)), strict=True):
        message.version = version
        message.status = ACKED
        message.last = position
        if message.deliveries is None:
            message.deliveries = Deliveries()
        message.deliveries.changed_at = at


def new_messages(events: EventColumns, first: int) -> list[Message]:
    """Return the messages that were sent from position `first` on; none of them is archived."""
    streams, versions, times, topics, shards, dues, expires_at, sizes, *others = events.columns
    priorities, sticky_keys, unique_keys, _ = others[-4:]
    positions, none = range(first, first + len(events)), repeat(0)
    return list(
        map(
            Message,
            streams,
            versions,
            repeat(READY),
            topics,
            shards,
            positions,
            sizes,
            times,
            expires_at,
            dues,
            none,
            none,
            none,
            priorities,
            dues,
            positions,
            sticky_keys,
            unique_keys,
        )
    )
