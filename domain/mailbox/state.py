"""State of a mailbox and how events change it: `evolve(state, event) -> state`."""

from collections.abc import Callable
from typing import Any

import msgspec

from postroom.domain.event import Event
from postroom.domain.mailbox.alarms import Alarms
from postroom.domain.mailbox.events import (
    LogTruncated,
    MailboxCreated,
    MailboxMode,
    OwnershipTaken,
    TopicPolicySet,
)
from postroom.domain.mailbox.replay import Remembered, ReplayWindow
from postroom.domain.mailbox.shard import Shard
from postroom.domain.message import (
    ARCHIVED,
    DEAD,
    IN_FLIGHT,
    MS,
    READY,
    Message,
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageReceived,
    MessageRedriven,
    MessageRequeued,
    MessageSent,
    MessageVisibilityExtended,
    Status,
)
from postroom.domain.message import evolve as evolve_message
from postroom.domain.policy import MailboxLimits, TopicPolicy

_WAITING = (READY, DEAD)

ALARMS_BETWEEN_TIDYING = 1_024


class Clock(msgspec.Struct, frozen=True, array_like=True):
    """Tie log time to a monotonic clock: at `uptime` µs after `boot`, it was `at` (svc-mailbox I-17)."""

    boot: str
    uptime: int
    at: int


class Topic:
    """One destination: its shards, its dead letters, its replay window."""

    __slots__ = ("dead", "name", "policy", "shards", "window")

    def __init__(self, name: str, policy: TopicPolicy, window: ReplayWindow | None = None) -> None:
        self.name = name
        self.policy = policy
        self.shards: dict[int, Shard] = {}
        self.dead: dict[bytes, Message] = {}
        self.window = window or ReplayWindow()

    def shard(self, number: int) -> Shard:
        """Return a shard of this topic, made when it is first named."""
        shard = self.shards.get(number)
        if shard is None:
            shard = self.shards[number] = Shard()
        return shard

    @property
    def is_empty(self) -> bool:
        """Tell whether the topic holds no message, so that its shard count may change."""
        return not self.dead and all(shard.size == 0 for shard in self.shards.values())


class Mailbox:
    """The queues of one mailbox, as a fold of its log.

    `position` is that of the last event folded; as positions have no gaps, counting is enough.
    """

    def __init__(
        self, name: str, limits: MailboxLimits | None = None, default_policy: TopicPolicy | None = None
    ) -> None:
        self.name = name
        self.limits = limits or MailboxLimits()
        self.default_policy = default_policy or TopicPolicy()
        self.mode: MailboxMode = "queue"
        self.position = 0
        self.version = 0
        self.epoch = 0
        self.owner = ""
        self.at = 0
        self.clock: Clock | None = None
        self.truncated_through = 0
        self.in_flight = 0
        self.archived = 0
        self.topics: dict[str, Topic] = {}
        self.messages: dict[bytes, Message] = {}
        self.policies: dict[str, TopicPolicy] = {}
        self.crowded: set[str] = set()
        self._until_tidy = ALARMS_BETWEEN_TIDYING
        self._deadlines = Alarms(_deadline_of)
        self._expiries = Alarms(_expiry_of)

    def policy(self, topic: str) -> TopicPolicy:
        """Return what a topic promises: what an operator set, else the default."""
        found = self.topics.get(topic)
        return found.policy if found is not None else self.policies.get(topic, self.default_policy)

    def topic(self, name: str) -> Topic:
        """Return a topic, made when it is first named."""
        found = self.topics.get(name)
        if found is None:
            found = self.topics[name] = Topic(name, self.policies.get(name, self.default_policy))
        return found

    def overdue(self, now: int, limit: int) -> list[Message]:
        """Return up to `limit` messages that have run out of time at `now` (µs), oldest first."""
        due = self._deadlines.due(now, limit)
        due += self._expiries.due(now, limit - len(due))
        return sorted(due, key=lambda message: message.position)

    def needs_sweep(self, now: int) -> bool:
        """Tell whether a `Sweep` at `now` (µs) would find something to end."""
        alarm = self.next_alarm()
        return bool(self.crowded) or (alarm is not None and alarm <= now)

    def next_alarm(self) -> int | None:
        """Return the µs at which the next message runs out of time, or None."""
        deadline, expiry = self._deadlines.next(), self._expiries.next()
        if deadline is None or expiry is None:
            return expiry if deadline is None else deadline
        return min(deadline, expiry)

    def set_alarm(self, message: Message) -> None:
        """Note when the message next runs out of time."""
        if message.status == IN_FLIGHT:
            self._deadlines.set(message.due, message)
        else:
            self._expiries.set(message.expires_at, message)
        self._until_tidy -= 1
        if self._until_tidy <= 0:
            self._tidy_alarms()

    def _tidy_alarms(self) -> None:
        """Forget stale alarms once they outnumber the live ones; until then looking would cost more."""
        live = len(self.messages)
        if len(self._deadlines) + len(self._expiries) > 2 * live:
            self._deadlines.rebuild(self.messages.values())
            self._expiries.rebuild(self.messages.values())
        self._until_tidy = max(ALARMS_BETWEEN_TIDYING, live)


def _deadline_of(message: Message) -> int | None:
    """Return when the message's delivery times out (svc-mailbox I-3)."""
    return message.due if message.status == IN_FLIGHT else None


def _expiry_of(message: Message) -> int | None:
    """Return when retention or TTL ends the message's wait, or the dead letter (svc-mailbox P-9)."""
    return message.expires_at if message.status in _WAITING else None


def evolve(mailbox: Mailbox, event: Event) -> Mailbox:
    """Fold one event into the mailbox, in place, and return it.

    The mailbox is the fold of up to millions of messages, so it is changed rather than copied; whoever can't
    keep a change (an append failed) drops the whole state and folds the log again.
    """
    mailbox.position += 1
    _EVOLVE[type(event)](mailbox, event)
    mailbox.at = event.at
    return mailbox


def _sent(mailbox: Mailbox, event: MessageSent) -> None:
    message = evolve_message(None, event, mailbox.position)
    if message.status == ARCHIVED:
        mailbox.archived += 1
        return
    topic = mailbox.topics.get(event.topic) or mailbox.topic(event.topic)
    if event.idem_key is not None:
        remembered = Remembered(event.stream, event.payload_hash, event.at)
        topic.window.remember(event.idem_key, remembered, topic.policy.replay_window_ms * MS)
    mailbox.messages[event.stream] = message
    topic.shard(event.shard).enqueue(message, event.at)
    mailbox.set_alarm(message)


def _received(mailbox: Mailbox, event: MessageReceived) -> None:
    message = mailbox.messages[event.stream]
    shard = mailbox.topics[message.topic].shards[message.shard]
    shard.dequeue(message)
    shard.in_flight += 1
    mailbox.in_flight += 1
    evolve_message(message, event, 0, mailbox.epoch)
    mailbox.set_alarm(message)


def _extended(mailbox: Mailbox, event: MessageVisibilityExtended) -> None:
    mailbox.set_alarm(evolve_message(mailbox.messages[event.stream], event))


def _requeued(mailbox: Mailbox, event: MessageRequeued) -> None:
    message = _leave(mailbox, event.stream)
    evolve_message(message, event)
    mailbox.topics[message.topic].shard(message.shard).enqueue(message, event.at)
    mailbox.set_alarm(message)


def _settled(mailbox: Mailbox, event: MessageAcked | MessageExpired) -> None:
    message = _leave(mailbox, event.stream)
    evolve_message(message, event)  # its alarms and stale references now see that it is over
    del mailbox.messages[event.stream]


def _dead_lettered(mailbox: Mailbox, event: MessageDeadLettered) -> None:
    message = _leave(mailbox, event.stream)
    evolve_message(message, event)
    topic = mailbox.topics[message.topic]
    topic.dead[event.stream] = message
    if len(topic.dead) > topic.policy.dead_capacity:
        mailbox.crowded.add(topic.name)
    mailbox.set_alarm(message)


def _redriven(mailbox: Mailbox, event: MessageRedriven) -> None:
    message = _leave(mailbox, event.stream)
    evolve_message(message, event)
    mailbox.topics[message.topic].shard(message.shard).enqueue(message, event.at)
    mailbox.set_alarm(message)


def _leave(mailbox: Mailbox, stream: bytes) -> Message:
    """Take a message out of wherever its status has it: its shard, those in flight, the dead letters."""
    message = mailbox.messages[stream]
    topic = mailbox.topics[message.topic]
    if message.status == IN_FLIGHT:
        topic.shards[message.shard].in_flight -= 1
        mailbox.in_flight -= 1
    elif message.status == READY:
        topic.shards[message.shard].dequeue(message)
    else:
        del topic.dead[stream]
        if len(topic.dead) <= topic.policy.dead_capacity:
            mailbox.crowded.discard(topic.name)
    return message


def _created(mailbox: Mailbox, event: MailboxCreated) -> None:
    mailbox.version = event.version
    mailbox.mode = event.mode


def _ownership_taken(mailbox: Mailbox, event: OwnershipTaken) -> None:
    mailbox.version = event.version
    mailbox.epoch = event.epoch
    mailbox.owner = event.owner
    mailbox.clock = Clock(event.boot, event.uptime, event.at)
    if not event.clock_continues:
        for message in mailbox.messages.values():
            if message.status == IN_FLIGHT:
                message.due = event.at + message.hidden
                mailbox.set_alarm(message)
        for topic in mailbox.topics.values():
            topic.window.forget(mailbox.at - topic.policy.replay_window_ms * MS)
            topic.window.restart(event.at)


def _policy_set(mailbox: Mailbox, event: TopicPolicySet) -> None:
    mailbox.version = event.version
    mailbox.policies[event.topic] = event.policy
    if event.topic in mailbox.topics:
        topic = mailbox.topics[event.topic]
        topic.window.forget(event.at - topic.policy.replay_window_ms * MS)  # a longer window revives no key
        topic.policy = event.policy
        if len(topic.dead) > event.policy.dead_capacity:
            mailbox.crowded.add(topic.name)
        else:
            mailbox.crowded.discard(topic.name)


def _truncated(mailbox: Mailbox, event: LogTruncated) -> None:
    mailbox.version = event.version
    mailbox.truncated_through = event.through


_EVOLVE: dict[type[Event], Callable[[Mailbox, Any], None]] = {
    MessageSent: _sent,
    MessageReceived: _received,
    MessageVisibilityExtended: _extended,
    MessageAcked: _settled,
    MessageRequeued: _requeued,
    MessageDeadLettered: _dead_lettered,
    MessageRedriven: _redriven,
    MessageExpired: _settled,
    MailboxCreated: _created,
    OwnershipTaken: _ownership_taken,
    TopicPolicySet: _policy_set,
    LogTruncated: _truncated,
}


class TopicCount(msgspec.Struct, frozen=True):
    """Count the messages of one shard by status, its dead letters included (svc-mailbox I-10)."""

    topic: str
    shard: int
    ready: int
    in_flight: int
    delayed: int
    dead: int
    oldest_at: int | None


def count(mailbox: Mailbox, now: int) -> list[TopicCount]:
    """Count unsettled messages by topic and shard at `now` (µs), with the oldest send time of each."""
    rows: dict[tuple[str, int], list[int]] = {}
    oldest: dict[tuple[str, int], int] = {}
    for message in mailbox.messages.values():
        key = (message.topic, message.shard)
        row = rows.setdefault(key, [0, 0, 0, 0])
        delayed = message.status == READY and message.due > now
        row[2 if delayed else int(message.status)] += 1
        if message.status != Status.DEAD:
            oldest[key] = min(oldest.get(key, message.sent_at), message.sent_at)
    return [
        TopicCount(topic, shard, ready, in_flight, delayed, dead, oldest.get((topic, shard)))
        for (topic, shard), (ready, in_flight, delayed, dead) in sorted(rows.items())
    ]
