"""Results of the queries on one mailbox, and the moments that queries accept."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec

from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.mailbox.counts import TopicCount

Moment = int | datetime
"""A log position, or a time: the mailbox after that record, or after all records up to that log time."""


DlqProfile = Literal["durable", "ephemeral"]
"""Whether dead letters survive a restart, or are in memory and lost with the process (svc-mailbox I-16)."""


class Backlog(msgspec.Struct, frozen=True):
    """Unsettled messages of one mailbox by topic and shard, at log position `position` (SDS-047 QRY-050).

    Arguments:
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
    """One event of a message: its position and time in the log, the owner's epoch, and its fields."""

    position: int
    at: str
    event: str
    epoch: int
    facts: dict[str, Any]


class MessageDetail(msgspec.Struct, frozen=True):
    """A message with its current state, headers and history.

    Arguments:
        erased: whether the key of its subject was destroyed; the payload in `item` is ciphertext then.
        stream_id: UUID of its events in the log; it finds the message even if other topics have its id.
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
    """A message's history, its deliveries, and its current state with the reason for it."""

    mailbox: str
    message_id: str
    topic: str
    shard: int
    now: str
    deliveries: list[DeliveryExplanation]
    story: list[HistoryStep]


class DeadLetter(msgspec.Struct, frozen=True):
    """A dead letter with `{reason, attempt, last_error}` (svc-mailbox I-4) and its times."""

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


class PeekedMessage(msgspec.Struct, frozen=True):
    """A ready message.

    Arguments:
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
