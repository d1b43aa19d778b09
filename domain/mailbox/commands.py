"""Commands that a mailbox decides on. What needed I/O or chance to find out is a field of the command."""

import msgspec

from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.message import Headers, Message, Receipt
from postroom.domain.policy import TopicPolicy


class Send(msgspec.Struct, frozen=True, gc=False):
    """Accept a message (svc-mailbox C-1 `SEND`).

    Arguments:
        message: its stream id, 16 bytes, new.
        sticky_key: messages with the same key share a shard; None shares by topic (svc-mailbox P-6).
        size: payload bytes.
        deliver_after_ms: hide it for this long first.
        ttl_ms: dead-letter it when undelivered for this long; None leaves it to the topic's retention.
        envelope: the `PrismEnvelope` bytes, stored as they are.
        outside_id: whether the sender chose the message's id; such ids are unique for ever (RFC-037).
        known: whether the log already holds a message with this id.
    """

    message: bytes
    topic: str
    size: int
    payload_hash: bytes
    hash_chain: bytes
    headers: Headers
    envelope: bytes
    idem_key: str | None = None
    sticky_key: str | None = None
    deliver_after_ms: int = 0
    ttl_ms: int | None = None
    outside_id: bool = False
    known: bool = False


class Receive(msgspec.Struct, frozen=True, gc=False):
    """Deliver ready messages of a topic (svc-mailbox C-1 `RECV`).

    Arguments:
        visibility_ms: how long they stay hidden; None takes the topic's.
        max_messages, max_bytes: bounds of this delivery; at least one ready message is always delivered.
        corrupt: messages whose stored bytes failed their hash check: they are quarantined instead.
    """

    topic: str
    max_messages: int
    max_bytes: int
    visibility_ms: int | None = None
    consumer: str | None = None
    corrupt: frozenset[bytes] = frozenset()


class Ack(msgspec.Struct, frozen=True, gc=False):
    """Settle a delivery (svc-mailbox C-1 `ACK`).

    Arguments:
        settled: what the log says of the message, where the mailbox holds it no more; None when it knows
            nothing.
    """

    receipt: Receipt
    settled: Message | None = None


class Nack(msgspec.Struct, frozen=True, gc=False):
    """Give a delivery back (svc-mailbox C-1 `NACK`); `jitter` is a uniform random number in [0, 1)."""

    receipt: Receipt
    jitter: float
    reason: str | None = None
    delay_ms: int | None = None
    settled: Message | None = None


class Extend(msgspec.Struct, frozen=True, gc=False):
    """Hide a received message for `visibility_ms` from now on."""

    receipt: Receipt
    visibility_ms: int
    settled: Message | None = None


class Reprocess(msgspec.Struct, frozen=True, gc=False):
    """Put dead letters of a topic back into its queues, oldest first (svc-mailbox C-4).

    Arguments:
        limit: how many at most.
        reason: only those that died of this.
        messages: only these stream ids.
    """

    topic: str
    limit: int
    reason: str | None = None
    messages: frozenset[bytes] | None = None


class Purge(msgspec.Struct, frozen=True, gc=False):
    """Remove messages of a topic that are not in flight: dead letters, waiting ones, or both."""

    topic: str
    dead: bool = True
    ready: bool = True
    limit: int = 1_000


class SetPolicy(msgspec.Struct, frozen=True, gc=False):
    """Set what a topic promises; its shard count is fixed once it holds messages."""

    topic: str
    policy: TopicPolicy


class Sweep(msgspec.Struct, frozen=True, gc=False):
    """End what has run out of time: deliveries, undelivered messages, dead letters (svc-mailbox C-3)."""

    limit: int = 1_000


class TakeOwnership(msgspec.Struct, frozen=True, gc=False):
    """Become the only writer, under the next epoch; create the mailbox where it is new.

    Arguments:
        boot, uptime, clock_continues: see `OwnershipTaken`.
    """

    name: str
    mode: MailboxMode
    owner: str
    boot: str
    uptime: int
    clock_continues: bool


class Truncate(msgspec.Struct, frozen=True, gc=False):
    """Drop the log's records up to `through`, whose chain hash is `link`."""

    through: int
    link: bytes


Command = (
    Send | Receive | Ack | Nack | Extend | Reprocess | Purge | SetPolicy | Sweep | TakeOwnership | Truncate
)
