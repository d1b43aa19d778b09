"""Given-when-then scenarios for the tests of deciders.

Times are milliseconds of log time. `Life` creates the events of one message and counts their versions.
"""

import re
from collections.abc import Sequence
from typing import Any

from postroom.domain.errors import Rejected
from postroom.domain.integrity import payload_hash
from postroom.domain.mailbox.commands import Command, Send
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.events import MailboxCreated, MailboxMode, OwnershipTaken, TopicPolicySet
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.state import Mailbox, shard_of
from postroom.domain.message import (
    DEFAULT_PRIORITY,
    MS,
    DeadReason,
    ExpiryReason,
    Headers,
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageReceived,
    MessageRedriven,
    MessageRequeued,
    MessageRescheduled,
    MessageSent,
    MessageVisibilityExtended,
    Receipt,
    RequeueReason,
)
from postroom.domain.names import mailbox_stream, message_id
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.record import Event
from postroom.domain.settings import MailboxSettings
from tests.support.snapshots import take_snapshot

NAME = "acme@one"
TOPIC = "orders"
POLICY = TopicPolicy(visibility_ms=5_000)
BOOT = "5d0b0000-boot"
NOTHING: list[Event] = []


def new_mailbox(
    mode: MailboxMode = "queue",
    settings: MailboxSettings = MailboxSettings(),  # noqa: B008  # it is frozen
) -> list[Event]:
    """Return the first events of every scenario: a new mailbox and its first owner."""
    own = mailbox_stream(NAME)
    return [MailboxCreated(own, 1, 0, NAME, mode, settings), taken_over(epoch=1, version=2, at=0)]


def taken_over(
    *, epoch: int, version: int, at: int, uptime: int = 0, continues: bool = False
) -> OwnershipTaken:
    """Return the event that a process took the mailbox over."""
    return OwnershipTaken(
        mailbox_stream(NAME), version, at * MS, epoch, f"process {epoch}", BOOT, uptime * MS, continues
    )


def policy_set(policy: TopicPolicy, *, at: int = 0, version: int = 3, topic: str = TOPIC) -> TopicPolicySet:
    """Return the event that an operator set a topic's policy."""
    return TopicPolicySet(mailbox_stream(NAME), version, at * MS, topic, policy)


class Life:
    """Factory of one message's `Send` command and events."""

    def __init__(
        self, name: str, *, topic: str = TOPIC, policy: TopicPolicy = POLICY, epoch: int = 1
    ) -> None:
        self.stream = name.encode().rjust(16, b"-")
        self.topic = topic
        self.policy = policy
        self.epoch = epoch
        self.version = 0
        self.attempt = 0
        self.receipts: list[Receipt] = []

    @property
    def receipt(self) -> Receipt:
        """Return the receipt of the latest delivery."""
        return self.receipts[-1]

    @property
    def shown(self) -> str:
        """Return the message's id."""
        return message_id(self.stream)

    def send(self, payload: bytes = b"hello", **fields: Any) -> Send:
        """Return the command that sends the message."""
        envelope = fields.pop("envelope", b"envelope of " + payload)
        return Send(
            self.stream,
            self.topic,
            len(payload),
            payload_hash(payload),
            b"chain",
            Headers(0),
            envelope,
            **fields,
        )

    def sent(
        self,
        *,
        at: int,
        payload: bytes = b"hello",
        due: int | None = None,
        ttl: int | None = None,
        idem_key: str | None = None,
        sticky_key: str | None = None,
        unique_key: str | None = None,
        priority: int = DEFAULT_PRIORITY,
    ) -> MessageSent:
        """Return the event that the message was sent, to be delivered from `due` on."""
        due = at if due is None else due
        end = due + self.policy.ready_retention_ms
        command = self.send(payload)
        return MessageSent(
            *self._next(at),
            self.topic,
            shard_of(sticky_key or self.topic, self.policy.shards),
            due * MS,
            (end if ttl is None else min(end, at + ttl)) * MS,
            command.size,
            idem_key,
            command.payload_hash,
            command.hash_chain,
            command.headers,
            command.envelope,
            priority,
            sticky_key,
            unique_key,
        )

    def received(
        self, *, at: int, visibility: int | None = None, consumer: str | None = None
    ) -> MessageReceived:
        """Return the event that the message was delivered."""
        self.attempt += 1
        visibility = self.policy.visibility_ms if visibility is None else visibility
        event = MessageReceived(*self._next(at), self.attempt, (at + visibility) * MS, consumer)
        self.receipts.append(Receipt(self.stream, self.version, self.epoch))
        return event

    def extended(self, *, at: int, due: int) -> MessageVisibilityExtended:
        """Return the event that the consumer got time until `due`."""
        return MessageVisibilityExtended(*self._next(at), self.attempt, due * MS)

    def acked(self, *, at: int, result: bytes | None = None, type_: str | None = None) -> MessageAcked:
        """Return the event that the message was settled."""
        return MessageAcked(*self._next(at), self.attempt, result, type_)

    def requeued(
        self, *, at: int, due: int, reason: RequeueReason = "nacked", error: str | None = None
    ) -> MessageRequeued:
        """Return the event that the message is to be delivered again from `due` on."""
        self.attempt -= reason == "released"
        return MessageRequeued(*self._next(at), self.attempt, due * MS, reason, error)

    def timed_out(self, *, at: int) -> MessageRequeued:
        """Return the event that the delivery's visibility ran out."""
        return self.requeued(at=at, due=at, reason="visibility_expired")

    def dead(
        self, *, at: int, reason: DeadReason = "max_attempts", error: str | None = None
    ) -> MessageDeadLettered:
        """Return the event that the message was dead-lettered."""
        expires = (at + self.policy.dead_retention_ms) * MS
        return MessageDeadLettered(*self._next(at), self.attempt, reason, error, expires)

    def redriven(self, *, at: int) -> MessageRedriven:
        """Return the event that an operator put the message back."""
        self.attempt = 0
        return MessageRedriven(*self._next(at), at * MS, (at + self.policy.ready_retention_ms) * MS)

    def rescheduled(
        self, *, at: int, due: int, expires: int | None = None, principal: str | None = None
    ) -> MessageRescheduled:
        """Return the event that an operator changed when the message may be delivered."""
        end = due + self.policy.ready_retention_ms if expires is None else expires
        return MessageRescheduled(*self._next(at), due * MS, end * MS, principal)

    def expired(
        self, *, at: int, reason: ExpiryReason, note: str | None = None, principal: str | None = None
    ) -> MessageExpired:
        """Return the event that the message left unsettled."""
        return MessageExpired(*self._next(at), reason, note, principal)

    def _next(self, at: int) -> tuple[bytes, int, int]:
        self.version += 1
        return self.stream, self.version, at * MS


class Given:
    """Mailbox with a history."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def when(self, command: Command, *, at: int) -> "Outcome":
        """Decide a command, and check that this does not change the state."""
        before = take_snapshot(self.mailbox)
        events: Sequence[Event] = []
        rejection: Rejected | None = None
        try:
            events = decide(command, self.mailbox, at * MS)
        except Rejected as error:
            rejection = error
        assert take_snapshot(self.mailbox) == before
        return Outcome(self.mailbox, events, rejection)


class Outcome:
    """Events or rejection of a command."""

    def __init__(self, mailbox: Mailbox, events: Sequence[Event], rejection: Rejected | None) -> None:
        self._mailbox = mailbox
        self.events = events
        self._rejection = rejection

    def then(self, events: Sequence[Event]) -> Given:
        """Check that the command caused exactly these events, and apply them."""
        assert self._rejection is None
        assert list(self.events) == list(events)
        for event in self.events:
            evolve(self._mailbox, event)
        return Given(self._mailbox)

    def then_nothing_happens(self) -> Given:
        """Check that the command was accepted and changed nothing."""
        return self.then([])

    def then_rejected(self, error: type[Rejected], match: str, **fields: object) -> Given:
        """Check that the command was refused for this reason, with these fields."""
        assert type(self._rejection) is error, f"instead came {self._rejection!r} {self.events}"
        assert re.search(match, str(self._rejection)), str(self._rejection)
        assert {name: getattr(self._rejection, name) for name in fields} == fields
        return Given(self._mailbox)


def given(
    events: Sequence[Event],
    *,
    policy: TopicPolicy = POLICY,
    limits: MailboxLimits | None = None,
    mode: MailboxMode = "queue",
    before: Sequence[Event] | None = None,
) -> Given:
    """Return a mailbox after its creation, its first owner and `events`.

    Arguments:
        policy: the default policy of its topics.
        before: events that replace the creation and the first owner.
    """
    mailbox, settings = Mailbox(NAME), MailboxSettings(limits or MailboxLimits(), policy)
    for event in [*(new_mailbox(mode, settings) if before is None else before), *events]:
        evolve(mailbox, event)
    return Given(mailbox)
