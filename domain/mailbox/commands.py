"""Commands of a mailbox; facts that require I/O or randomness are fields of the commands."""

import msgspec

from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.message import DEFAULT_PRIORITY, Headers, Message, NackAction, OnConflict, Receipt
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.job import RedriveCommand
from postroom.domain.schedule import ScheduleSpec
from postroom.domain.settings import UNCHANGED, SettingsChanges
from postroom.domain.subscription import SubscriptionCommand


class Send(msgspec.Struct, frozen=True, gc=False):
    """Command to accept a message (svc-mailbox C-1 `SEND`).

    Arguments:
        message: the new message's stream id, 16 bytes.
        sticky_key: messages with the same key share a shard; None uses the topic's name (svc-mailbox P-6).
        size: payload bytes.
        deliver_after_ms: delay before the first delivery.
        ttl_ms: age at which it is dead-lettered if undelivered; None uses the topic's retention.
        envelope: the `PrismEnvelope` bytes, stored unchanged.
        has_external_id: whether the sender chose the message's id; such ids are never reused (RFC-037).
        other_stream: stream id of an existing message with this id from a sender of the other kind: one
            limited to topics if this one is not, and vice versa. On the same topic, it is the same message
            (ADR 0106). None if the id is new.
        existing_hash: payload hash of the existing message with this id, empty if it can't be read any more;
            None if the id is new.
        priority: of the envelope, 0 to 10.
        unique_key: of all unsettled messages of the topic, dead letters aside, only one has this key.
        on_conflict: what happens if another message has the unique key. `keep`: the send is a duplicate, and
            changes nothing. `reschedule`: the send is a duplicate, and the other message, if it waits, is due
            after the delay of this send. `replace`: the other message is removed, even in flight, and this
            one is sent.
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
    has_external_id: bool = False
    existing_hash: bytes | None = None
    priority: int = DEFAULT_PRIORITY
    other_stream: bytes | None = None
    unique_key: str | None = None
    on_conflict: OnConflict = "keep"


class Receive(msgspec.Struct, frozen=True, gc=False):
    """Command to deliver ready messages of topics (svc-mailbox C-1 `RECV`).

    Arguments:
        topics: in the order in which they are served.
        visibility_ms: how long they stay hidden; None uses the policy of each topic.
        max_messages, max_bytes: bounds of this delivery; at least one ready message is always delivered.
        corrupt: messages to quarantine instead, as their stored bytes failed the hash check.
        erased: messages to remove instead, as the key of their subject was destroyed.
        principal, capability: of the caller; see `MessageReceived`.
    """

    topics: tuple[str, ...]
    max_messages: int
    max_bytes: int
    visibility_ms: int | None = None
    consumer: str | None = None
    corrupt: frozenset[bytes] = frozenset()
    erased: frozenset[bytes] = frozenset()
    principal: str | None = None
    capability: str | None = None


class Ack(msgspec.Struct, frozen=True, gc=False):
    """Command to settle a delivery (svc-mailbox C-1 `ACK`).

    Arguments:
        stored_message: the message read from the log if the mailbox no longer holds it; None if the log does
            not hold it either.
        result, result_type: see `MessageAcked`.
    """

    receipt: Receipt
    stored_message: Message | None = None
    result: bytes | None = None
    result_type: str | None = None


class Nack(msgspec.Struct, frozen=True, gc=False):
    """Command to give a delivery back (svc-mailbox C-1 `NACK`).

    Arguments:
        action: `retry` fails the attempt, so that the message is delivered again or dead-lettered after the
            last attempt; `reject` dead-letters it at once; `release` requeues it and counts no attempt.
        jitter: a uniform random number in [0, 1).
        reason: the consumer's reason.
        delay_ms: time until the next delivery; None uses the policy's backoff, or no delay after a release.
        stored_message: see `Ack`.
        traceback: see `MessageDeadLettered`; dropped if the message does not become a dead letter.
    """

    receipt: Receipt
    jitter: float
    reason: str | None = None
    delay_ms: int | None = None
    stored_message: Message | None = None
    action: NackAction = "retry"
    traceback: bytes | None = None


class Extend(msgspec.Struct, frozen=True, gc=False):
    """Command to hide a received message for `visibility_ms` from now on (svc-mailbox C-1 `EXTEND`)."""

    receipt: Receipt
    visibility_ms: int
    stored_message: Message | None = None


class Redrive(msgspec.Struct, frozen=True, gc=False):
    """Command to redrive dead letters of a topic, oldest first (svc-mailbox C-4).

    Arguments:
        limit: maximum number of messages.
        reason: redrive only those dead-lettered for this reason.
        messages: redrive only these stream ids.
    """

    topic: str
    limit: int
    reason: str | None = None
    messages: frozenset[bytes] | None = None


class Purge(msgspec.Struct, frozen=True, gc=False):
    """Command to remove dead letters, ready messages, or both from a topic."""

    topic: str
    dead: bool = True
    ready: bool = True
    limit: int = 1_000


class Erase(msgspec.Struct, frozen=True, gc=False):
    """Command to remove unsettled messages and dead letters, as the key of their subject was destroyed.

    Consumers may still ack and nack messages in flight; this changes nothing, and they are never redelivered.
    """

    messages: frozenset[bytes]


class Cancel(msgspec.Struct, frozen=True, gc=False):
    """Command to remove a message that is ready, delayed or in flight; no event for any other.

    Arguments:
        note: why.
        principal: of the operator; see `MessageRescheduled`.
    """

    message: bytes
    note: str | None = None
    principal: str | None = None


class Reschedule(msgspec.Struct, frozen=True, gc=False):
    """Command to change when a ready or delayed message may be delivered; no event for any other.

    Arguments:
        deliver_after_ms: from now, unless `at` says when.
        at: time in µs since 1970 UTC; one in the past is now.
    """

    message: bytes
    deliver_after_ms: int = 0
    principal: str | None = None
    at: int | None = None


class SetPolicy(msgspec.Struct, frozen=True, gc=False):
    """Command to set the policy of a topic, all its fields."""

    topic: str
    policy: TopicPolicy


class SetSettings(msgspec.Struct, frozen=True, gc=False):
    """Command to change the settings of the mailbox.

    Arguments:
        replace: everything that the changes leave out becomes the default.
    """

    changes: SettingsChanges
    replace: bool = False


class SaveSearch(msgspec.Struct, frozen=True, gc=False):
    """Command to save a search; see `Mailbox.save_search`."""

    name: str
    query: str
    replace: bool = False
    principal: str | None = None


class DeleteSearch(msgspec.Struct, frozen=True, gc=False):
    """Command to delete a saved search."""

    search_id: str


class Pause(msgspec.Struct, frozen=True, gc=False):
    """Command to stop the delivery of a topic's messages; other operations continue."""

    topic: str


class Resume(msgspec.Struct, frozen=True, gc=False):
    """Command to deliver the messages of a topic again."""

    topic: str


class Sweep(msgspec.Struct, frozen=True, gc=False):
    """Command to time out deliveries and expire messages (svc-mailbox C-3)."""

    limit: int = 1_000


class TakeOwnership(msgspec.Struct, frozen=True, gc=False):
    """Command to become the only writer, under a higher epoch; creates the mailbox if it does not exist.

    Arguments:
        mode: expected mode; None accepts any, and creates a queue.
        boot, uptime, clock_continues: see `OwnershipTaken`.
        epoch: epoch of the owner's lease (RFC-049); None takes the next one.
        settings: settings of a new mailbox; an existing one must have the same.
        can_encrypt: whether the owner has the key store of a mailbox that encrypts messages.
    """

    name: str
    mode: MailboxMode | None
    owner: str
    boot: str
    uptime: int
    clock_continues: bool
    epoch: int | None = None
    settings: SettingsChanges = UNCHANGED
    can_encrypt: bool = True


class Truncate(msgspec.Struct, frozen=True, gc=False):
    """Command to remove the commits up to `through`; `link` is the chain hash of the last one."""

    through: int
    link: bytes


class SetSchedule(msgspec.Struct, frozen=True, gc=False):
    """Command to create a schedule, or to change one.

    Arguments:
        stream: id of the events of a new one, 16 random bytes.
        from_code: whether a worker sets what its code says. Then an existing schedule is changed only if the
            code differs from what was set by code last, so that a change by an operator stays until the code
            changes.
        principal: see `ScheduleSet`.
    """

    schedule: str
    spec: ScheduleSpec
    stream: bytes
    from_code: bool = False
    principal: str | None = None


class PauseSchedule(msgspec.Struct, frozen=True, gc=False):
    """Command to pause a schedule."""

    schedule: str
    principal: str | None = None


class ResumeSchedule(msgspec.Struct, frozen=True, gc=False):
    """Command to resume a schedule; ticks that passed meanwhile are left out."""

    schedule: str
    principal: str | None = None


class RunSchedule(msgspec.Struct, frozen=True, gc=False):
    """Command to send the message of a schedule's tick, to leave ticks out, or to run it besides its ticks.

    Arguments:
        send: the message; None to leave ticks out.
        stream, version: the schedule for which the command was made; it has no effect on any other. A version
            of None runs the schedule besides its ticks.
        through: log time (µs) of the tick; all ticks up to it are done then.
        principal: who runs it besides its ticks.
    """

    schedule: str
    send: Send | None
    stream: bytes = b""
    version: int | None = None
    through: int = 0
    principal: str | None = None


class DeleteSchedule(msgspec.Struct, frozen=True, gc=False):
    """Command to delete a schedule; the messages that it sent stay."""

    schedule: str
    principal: str | None = None


ScheduleCommand = SetSchedule | PauseSchedule | ResumeSchedule | RunSchedule | DeleteSchedule


Command = (
    Send
    | Receive
    | Ack
    | Nack
    | Extend
    | Redrive
    | Purge
    | Erase
    | Cancel
    | Reschedule
    | SetPolicy
    | SetSettings
    | SaveSearch
    | DeleteSearch
    | Pause
    | Resume
    | Sweep
    | TakeOwnership
    | Truncate
    | RedriveCommand
    | SubscriptionCommand
    | ScheduleCommand
)
