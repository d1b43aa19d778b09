"""Results of the queries on one mailbox, and the moments that queries accept."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, get_args

import msgspec

from postroom.application.messages import MessageResult
from postroom.domain.arguments import MAX_PAGE, check_choice, check_int, check_optional_text
from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.mailbox.counts import TopicCount

Moment = int | datetime
"""A log position, or a time: the mailbox after that record, or after all records up to that log time."""


def check_moment(at: object, name: str = "at") -> Moment:
    """Return a past moment, or raise InvalidRequest with the `name` of the argument."""
    return at if isinstance(at, datetime) else check_int(name, at)


def check_due(at: object) -> datetime:
    """Return a time with its UTC offset, or raise InvalidRequest."""
    if not isinstance(at, datetime) or at.utcoffset() is None:
        raise InvalidRequest("at must be a datetime with a UTC offset; add its time zone.")
    return at


DlqProfile = Literal["durable", "ephemeral"]
"""Whether dead letters survive a restart, or are in memory and lost with the process (svc-mailbox I-16)."""


class Backlog(msgspec.Struct, frozen=True):
    """Unsettled messages of one mailbox by topic and shard, at log position `position` (SDS-047 QRY-050).

    Arguments:
        mailbox: name of the mailbox.
        position: of the log, up to which it was read.
        epoch, owner: number and name of the owner that wrote the record at `position`.
        archived: number of messages that are stored, and never delivered.
        shards: numbers of messages, by topic and shard.
        at: when the record at `position` was written.
        as_of: log time at which messages count as ready or delayed.
        paused_topics: topics whose messages are not delivered, sorted.
        dlq_profile: whether dead letters survive a restart.
    """

    mailbox: str
    position: int
    epoch: int
    owner: str
    at: str
    archived: int
    as_of: str
    shards: list[TopicCount]
    paused_topics: list[str] = []
    dlq_profile: DlqProfile = "durable"

    @property
    def ready(self) -> int:
        """Count the messages that may be delivered now."""
        return sum(shard.ready for shard in self.shards)


class HistoryEntry(msgspec.Struct, frozen=True):
    """One event of a message: its position and time in the log, the owner's epoch, and its fields.

    Arguments:
        position: of the event in the log.
        at: log time, RFC 3339.
        event: type of the event, such as `MessageSent`.
        epoch: number of the owner that wrote it.
        facts: its fields by name.
    """

    position: int
    at: str
    event: str
    epoch: int
    facts: dict[str, Any]


class MessageDetail(msgspec.Struct, frozen=True):
    """A message with its current state, headers and history.

    Arguments:
        status: ready, delayed, in_flight, acked, dead, expired or archived.
        attempt: number of the latest delivery, from 1; 0 before the first.
        redriven: how often it was redriven from the dead letters.
        reason, last_error: why it is a dead letter or was removed, and the error of the latest failure.
        intact: whether the stored bytes match their hash.
        item: headers, and the envelope with the payload.
        history: its events, oldest first.
        traceback: of the latest failed attempt, if its handler reported one.
        erased: whether the key of its subject was destroyed; the payload in `item` is ciphertext then.
        stream_id: UUID of its events in the log; it finds the message even if other topics have its id.
        result: of the ack of its consumer; None without one, or if it can't be decrypted.
        copy_of: id of the message of which a subscription got this copy, its stream id if other topics may
            have its id; None for any other message.
    """

    mailbox: str
    message_id: str
    topic: str
    shard: int
    status: str
    attempt: int
    redriven: int
    reason: str | None
    last_error: str | None
    intact: bool
    item: MailboxItem
    history: list[HistoryEntry]
    erased: bool = False
    stream_id: str = ""
    result: MessageResult | None = None
    copy_of: str | None = None
    traceback: str | None = None


ENDED = ("acked", "dead", "expired", "archived")
"""Statuses of messages that are not delivered any more, unless an operator redrives a dead letter."""


class MessageOutcome(msgspec.Struct, frozen=True):
    """Outcome of a message, or its status at the end of the wait.

    Arguments:
        reason, last_error: why it was dead-lettered or removed, and the error of the latest failure.
        status: `acked`; `dead`; `expired`, if it was removed or cancelled, as `reason` says; `ready`,
            `delayed` or `in_flight` if none of these happened yet; `archived` if it is never delivered.
        result: of the ack of its consumer; None without one, or if it can't be decrypted.
        erased: whether the key of its subject was destroyed, and the result with it.
    """

    message_id: str
    topic: str
    status: str
    reason: str | None = None
    last_error: str | None = None
    result: MessageResult | None = None
    erased: bool = False

    @property
    def is_final(self) -> bool:
        """Return whether the message is acked, dead-lettered or removed."""
        return self.status in ENDED

    @property
    def payload(self) -> bytes:
        """Return the payload of the result.

        Raises: NotFound with the reason if the message has no result.
        """
        if self.result is not None:
            return self.result.payload
        reason = ": ".join(each for each in (self.reason, self.last_error) if each)
        why = {
            "acked": "its consumer returned none",
            "dead": f"it is a dead letter ({reason})",
            "expired": f"it was removed ({self.reason})",
            "archived": "it is archived, not delivered (an archive, or subscriptions_only of its topic)",
        }.get(self.status, f"it is {self.status.replace('_', ' ')}; wait again")
        if self.erased:
            why = "the key of its subject was destroyed"
        raise NotFound(f"Message {self.message_id} on topic {self.topic} has no result: {why}.")


class HistoryStep(msgspec.Struct, frozen=True):
    """One event of a message's history: its position and time in the log, and a sentence about it."""

    position: int
    at: str
    text: str


class DeliveryExplanation(msgspec.Struct, frozen=True):
    """One delivery with its consumer, deadline and outcome; `why` is the reason why it took place.

    Arguments:
        principal, capability: of the consumer's capability, whose root nonce is in hexadecimal; None for a
            process of the mailbox's own user.
    """

    number: int
    attempt: int
    position: int
    at: str
    consumer: str | None
    epoch: int
    visible_again: str
    ended: str | None
    ended_position: int | None
    ended_at: str | None
    error: str | None
    why: str
    principal: str | None = None
    capability: str | None = None


class Explanation(msgspec.Struct, frozen=True):
    """A message's history, its deliveries, and its current state with the reason for it.

    Arguments:
        now: log time of the explanation, RFC 3339.
        deliveries: each delivery, and why it began and ended.
        story: the history in sentences.
    """

    mailbox: str
    message_id: str
    topic: str
    shard: int
    now: str
    deliveries: list[DeliveryExplanation]
    story: list[HistoryStep]


class DeadLetter(msgspec.Struct, frozen=True):
    """A dead letter with `{reason, attempt, last_error}` (svc-mailbox I-4) and its times.

    Arguments:
        reason: why it was dead-lettered, such as `max_attempts`.
        attempt: number of deliveries.
        last_error: of the latest failed attempt.
        first_seen: when it was sent.
        redriven: how often it was redriven before.
        position: of its `MessageSent` in the log.
        last_seen: when it became a dead letter.
        held_key: the ordered key that it holds, by the policy `dead_letters_hold_keys`.
        waiting: number of messages of that key that wait until it is redriven or removed.
    """

    mailbox: str
    topic: str
    shard: int
    message_id: str
    reason: str
    attempt: int
    last_error: str | None
    first_seen: str
    last_seen: str
    redriven: int
    position: int
    held_key: str | None = None
    waiting: int = 0


class PeekedMessage(msgspec.Struct, frozen=True):
    """A ready message.

    Arguments:
        sent_at: log time, RFC 3339.
        attrs: custom headers.
        attempts: deliveries so far.
        payload: None where the stored bytes do not match their hash, or the message was erased; a receive
            dead-letters or removes such a message.
    """

    message_id: str
    topic: str
    shard: int
    attempts: int
    sent_at: str
    attrs: Mapping[str, str]
    payload: bytes | None


class RedriveGroup(msgspec.Struct, frozen=True):
    """Dead letters of a topic with the same fingerprint, and the last error of one of them.

    Waiting messages have their status as the reason: `ready`, `delayed` or `in_flight`, and no fingerprint.
    """

    topic: str
    reason: str
    fingerprint: str
    count: int
    last_error: str | None


class RedrivePreview(msgspec.Struct, frozen=True):
    """The messages that a redrive job would select now.

    Arguments:
        cutoff: end of the log at the time of the preview.
        matched: number of messages.
        groups: the largest groups, up to 100.
        samples: the first messages, up to 10; the reason of one that waits is its status.
        digest: equal for two previews that select the same messages with the same last events; empty from
            servers of earlier versions.
    """

    mailbox: str
    cutoff: int
    matched: int
    groups: list[RedriveGroup]
    samples: list[DeadLetter]
    digest: str = ""


Outcome = Literal["redriven", "archived", "purged", "cancelled", "rescheduled", "skipped", "undone"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


ChangeOutcome = Literal["changed", "in_flight", "dead", "settled", "expires_first", "unknown"]
LEFT_ALONE: dict[ChangeOutcome, str] = {
    "in_flight": "is in flight: its consumer settles it; cancel it to remove it",
    "dead": "is a dead letter: redrive or purge it",
    "settled": "is settled",
    "expires_first": "would become a dead letter before, as its time to live ends",
    "unknown": "is unknown: check the id, and the mailbox it was sent to",
}
"""Reasons why a message was not changed; each continues a sentence that begins with `Message ID`."""


class MessageChange(msgspec.Struct, frozen=True):
    """The outcome of a change of a message by its id.

    Arguments:
        message_id: as the caller named it.
        outcome: `changed`, or why the mailbox did not change it: it is in flight, a dead letter, settled or
            unknown, or `expires_first`: its time to live ends before it would be due.
    """

    message_id: str
    outcome: ChangeOutcome


def check_page(outcome: object, cursor: object, limit: object) -> None:
    """Raise InvalidRequest unless these are arguments of `list_redrive_messages`."""
    if outcome is not None:
        check_choice("The outcome", outcome, OUTCOMES)
    check_optional_text("cursor", cursor)
    check_int("limit", limit, 1, MAX_PAGE)
