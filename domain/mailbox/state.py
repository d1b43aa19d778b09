"""State of a mailbox, which `evolve` changes by its events."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache

from blake3 import blake3
from msgspec.structs import replace

from postroom.domain.mailbox.events import Clock, MailboxMode, StoredSettings
from postroom.domain.mailbox.key_ring import SharedLimits
from postroom.domain.mailbox.queues import Timers
from postroom.domain.mailbox.replay import ReplayWindow
from postroom.domain.mailbox.topic import Topic
from postroom.domain.message import DEAD, IN_FLIGHT, MS, READY, Message
from postroom.domain.names import is_glob
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.job import RedriveJob
from postroom.domain.schedule import Schedule
from postroom.domain.settings import resolve_policy, sections_of, shared_limits_of
from postroom.domain.subscription import Subscription

_EXPIRING = (READY, DEAD)

TIMERS_BETWEEN_SWEEPS = 256
"""Timers that are set between two steps of a sweep, if there is one."""
SWEEP_STEP = 4 * TIMERS_BETWEEN_SWEEPS
"""Timers that a step looks at; a few tenths of a millisecond's work."""
MAX_RESOLVED = 1_024
"""Maximum number of cached policies of topics without messages, and of cached subscriptions by topic."""

ALL_TOPICS = ""
"""Entry of `changed_topics` that stands for all topics."""


@lru_cache(65_536)
def shard_of(key: str, shards: int) -> int:
    """Return the shard of a sticky key, by a hash that never changes (svc-mailbox P-6)."""
    return int.from_bytes(blake3(key.encode()).digest(8), "big") % shards


class Changes:
    """Messages that changed since they were collected.

    Messages sent after `through` are not tracked one by one: they are the last ones of the mailbox. So a
    message that settles soon after it was sent costs a comparison.

    Arguments:
        through: position up to which messages that are sent have been collected.
        changed: streams of messages that changed since, and are unsettled.
        settled: streams of messages that settled since.
    """

    __slots__ = ("changed", "settled", "through")

    def __init__(self, through: int = 0) -> None:
        self.through = through
        self.changed: set[bytes] = set()
        self.settled: set[bytes] = set()

    def settle(self, stream: bytes) -> None:
        """Note that one of the messages up to `through` is settled."""
        self.changed.discard(stream)
        self.settled.add(stream)

    def take(self, through: int) -> tuple[list[bytes], list[bytes]]:
        """Return the streams in `changed` and in `settled`, and restart at position `through`."""
        taken = list(self.changed), list(self.settled)
        self.through = through
        self.changed.clear()
        self.settled.clear()
        return taken


class Mailbox:
    """State of a mailbox: its queues, derived from its log.

    Arguments:
        position: of the last event applied; counted, as positions have no gaps.
        changes: what changed since it was last collected for a snapshot.
        over_capacity: names of the topics with more dead letters than their `dead_capacity`.
        paused_topics: names of the topics that operators paused.
        stopped_topics: names of the topics whose messages are not delivered: paused topics, and topics of
            subscriptions that a rewind empties.
        redrives: redrive jobs by id.
        subscriptions: by name, which is also that of the topic to which their messages are copied.
        schedules: by name.
        stored_settings: its `settings`, of which `limits` are a part, and whether the log has them.
        changed_topics: names of the topics whose messages changed since their receivers were last considered;
            also `ALL_TOPICS` when a limit or a setting changed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stored_settings = StoredSettings()
        self.settings = self.stored_settings.settings
        self.limits = self.settings.limits
        self.mode: MailboxMode = "queue"
        self.position = 0
        self.version = 0
        self.epoch = 0
        self.owner = ""
        self.at = 0
        self.clock: Clock | None = None
        self.truncated_through = 0
        self.expiry_resumes_at = 0
        self.in_flight = 0
        self.archived = 0
        self.topics: dict[str, Topic] = {}
        self.messages: dict[bytes, Message] = {}
        self._policies: dict[str, TopicPolicy] = {}
        self._shared_limits: dict[str, SharedLimits] = {}
        self.over_capacity: set[str] = set()
        self.paused_topics: set[str] = set()
        self.stopped_topics: set[str] = set()
        self.redrives: dict[bytes, RedriveJob] = {}
        self.subscriptions: dict[str, Subscription] = {}
        self._subscriptions_of: dict[str, tuple[Subscription, ...]] = {}
        self.schedules: dict[str, Schedule] = {}
        self._is_replaying = False
        self.changed_topics = {ALL_TOPICS}
        self.changes = Changes()
        self._until_sweep = TIMERS_BETWEEN_SWEEPS
        self._deadlines = Timers(_deadline_of)
        self._expiries = Timers(_expiry_of)

    def policy(self, topic: str) -> TopicPolicy:
        """Return the policy of a topic, which need not exist; see `resolve_policy`."""
        current = self.topics.get(topic)
        if current is not None:
            return current.policy
        policy = self._policies.get(topic)
        if policy is None:
            if len(self._policies) >= MAX_RESOLVED:
                self._policies.clear()
            policy = self._policies[topic] = resolve_policy(self.settings, topic)
        return policy

    def own_policy(self, topic: str) -> TopicPolicy | None:
        """Return the policy of a topic if a section matches it, or None if it has the default policy."""
        return self.policy(topic) if sections_of(self.settings, topic) else None

    def subscriptions_of(self, topic: str) -> tuple[Subscription, ...]:
        """Return the subscriptions whose filters match a topic; none for the topic of a subscription."""
        if not self.subscriptions:
            return ()
        matches = self._subscriptions_of.get(topic)
        if matches is None:
            if len(self._subscriptions_of) >= MAX_RESOLVED:
                self._subscriptions_of.clear()
            others = () if topic in self.subscriptions else self.subscriptions.values()
            matches = tuple(each for each in others if each.filter.covers_topic(topic))
            self._subscriptions_of[topic] = matches
        return matches

    @property
    def copied_through(self) -> int:
        """Return the position through which all subscriptions have their copies."""
        behind = (each.position for each in self.subscriptions.values() if not each.is_live)
        return min(behind, default=self.position)

    def set_subscriptions(self, subscriptions: dict[str, Subscription]) -> None:
        """Replace the subscriptions."""
        self.subscriptions = subscriptions
        self._subscriptions_of.clear()
        self.stop_topics()

    def stop_topics(self) -> None:
        """Derive the topics that are stopped."""
        clearing = {each.name for each in self.subscriptions.values() if each.status == "clearing"}
        self.stopped_topics = self.paused_topics | clearing
        self.changed_topics.add(ALL_TOPICS)

    def shard_count(self, topic: str) -> int:
        """Return the number of shards among which the next message of a topic is placed."""
        current = self.topics.get(topic)
        return self.policy(topic).shards if current is None else current.shard_count

    def topic(self, name: str) -> Topic:
        """Return a topic, creating it on first use."""
        topic = self.topics.get(name)
        if topic is None:
            window = ReplayWindow(dropped_until=self.at - 1)
            topic = self.topics[name] = Topic(name, self.policy(name), window)
            if topic.policy.shared_limits:
                self._share_limits(topic, self.at)
        return topic

    def topic_names(self) -> set[str]:
        """Return the names of topics that it holds, have a section or are paused, and of subscriptions."""
        sections = (name for name in self.settings.topics if not is_glob(name))
        return {*self.topics, *sections, *self.paused_topics, *self.subscriptions}

    def configure(self, stored: StoredSettings, at: int) -> None:
        """Apply settings from log time `at` (µs) on."""
        before, self.stored_settings = self.stored_settings, stored
        self.settings, self.limits = stored.settings, stored.settings.limits
        searches = self.settings.searches
        if searches != before.settings.searches and stored == before._replace(
            settings=replace(before.settings, searches=searches)
        ):
            return  # topics do not depend on searches
        self._policies.clear()
        for topic in self.topics.values():
            topic.share(None, at)
        by_topic = cache(self._messages_by_topic)
        for topic in self.topics.values():
            self._change_policy(topic, resolve_policy(stored.settings, topic.name), by_topic, at)
            is_known = before.is_stored or "shards" in before.settings.topics.get(topic.name, ())
            if stored.is_stored and not is_known and not topic.is_empty:
                # The former owner's number is unknown, but is not below those that it used.
                topic.shards_in_use = max(topic.policy.shards, topic.highest_shard + 1)
        if self.topics:
            self.share_limits(at)
            self.changed_topics.add(ALL_TOPICS)

    def share_limits(self, at: int) -> None:
        """Let topics share limits, from log time `at` (µs) on, as their policies say."""
        self._shared_limits = {}
        for topic in self.topics.values():
            if topic.policy.shared_limits:
                self._share_limits(topic, at)

    def _share_limits(self, topic: Topic, at: int) -> None:
        policy = topic.policy
        limits = (policy.max_in_flight, policy.rate, policy.rate_period_ms, policy.rate_burst)
        name = " ".join((shared_limits_of(self.settings, topic.name), *map(str, limits)))
        topic.share(self._shared_limits.setdefault(name, SharedLimits()), at)

    def _messages_by_topic(self) -> dict[str, list[Message]]:
        by_topic: dict[str, list[Message]] = {name: [] for name in self.topics}
        for message in self.messages.values():
            by_topic[message.topic].append(message)
        return by_topic

    def _change_policy(
        self, topic: Topic, policy: TopicPolicy, by_topic: Callable[[], dict[str, list[Message]]], at: int
    ) -> None:
        # Before the new policy applies: a longer window must not revive expired keys.
        topic.window.drop_until(at - topic.policy.replay_window_ms * MS)
        topic.change_policy(policy, by_topic, at)
        if len(topic.dead) > policy.dead_capacity:
            self.over_capacity.add(topic.name)
        else:
            self.over_capacity.discard(topic.name)

    def count_deliverable(self, topic: str, now: int, limit: int) -> int:
        """Return how many messages of a topic could be delivered at `now` (µs), counted up to `limit`."""
        if topic in self.stopped_topics or topic not in self.topics:
            return 0
        return self.topics[topic].count_deliverable(now, limit)

    def next_due(self, topic: str, now: int) -> int | None:
        """Return when a delay or a limit of a topic may let a message be delivered (µs), or None.

        Arguments:
            now: log time (µs).
        """
        if topic in self.stopped_topics or topic not in self.topics:
            return None
        return self.topics[topic].next_due(now)

    def has_room(self, now: int) -> bool:
        """Return whether a new topic is allowed at `now` (µs); idle topics do not count."""
        return len(self.topics) < self.limits.topics or any(
            topic.is_idle(now) for topic in self.topics.values()
        )

    def drop_idle_topics(self, now: int) -> None:
        """Drop the topics that are idle at `now` (µs)."""
        for topic in [*self.topics.values()]:
            if topic.is_idle(now):
                topic.share(None, now)
                del self.topics[topic.name]

    def in_flight_messages(self) -> Iterable[Message]:
        """Return the messages in flight, some more than once."""
        return self._deadlines

    def overdue(self, now: int, limit: int) -> list[Message]:
        """Return up to `limit` messages that have timed out or expired at `now` (µs), oldest first."""
        due = self._deadlines.due(now, limit)
        if now >= self.expiry_resumes_at:
            due += self._expiries.due(now, limit - len(due))
        return sorted(due, key=lambda message: message.position)

    def needs_sweep(self, now: int) -> bool:
        """Return whether a `Sweep` at `now` (µs) would cause events."""
        timer = self.next_timer()
        return bool(self.over_capacity) or (timer is not None and timer <= now)

    def next_timer(self) -> int | None:
        """Return when the next message times out or expires (µs), or None."""
        deadline, expiry = self._deadlines.next(), self._expiries.next()
        if expiry is None:
            return deadline
        expiry = max(expiry, self.expiry_resumes_at)
        return expiry if deadline is None else min(deadline, expiry)

    def set_timer(self, message: Message) -> None:
        """Set the timer of a message's visibility timeout or expiry; each change resets it."""
        if message.position <= self.changes.through:
            self.changes.changed.add(message.stream)
        if self._is_replaying:
            return
        if message.status == IN_FLIGHT:
            self._deadlines.set(message.due, message)
        else:
            self._expiries.set(message.expires_at, message)
        self._until_sweep -= 1
        if self._until_sweep <= 0:
            self._sweep_timers()

    def set_timers(self, messages: Sequence[Message]) -> None:
        """Do the same as `set_timer` for messages of one status."""
        changes = self.changes
        changes.changed.update([m.stream for m in messages if m.position <= changes.through])
        if self._is_replaying:
            return
        if messages[0].status == IN_FLIGHT:
            self._deadlines.set_all([m.due for m in messages], messages)
        else:
            self._expiries.set_all([m.expires_at for m in messages], messages)
        self._until_sweep -= len(messages)
        if self._until_sweep <= 0:
            self._sweep_timers()

    def restore_timers(self) -> None:
        """Set the timers of all messages; none may have one."""
        if self.in_flight:
            self._deadlines.rebuild(self.messages.values())
        self._expiries.rebuild(self.messages.values())

    def _sweep_timers(self) -> None:
        """Do a step of a sweep if stale timers outnumber the live ones."""
        sets = TIMERS_BETWEEN_SWEEPS - self._until_sweep
        self._until_sweep = TIMERS_BETWEEN_SWEEPS
        if len(self._deadlines) + len(self._expiries) > 2 * len(self.messages) + SWEEP_STEP:
            larger = max(self._deadlines, self._expiries, key=len)
            larger.sweep(SWEEP_STEP * sets // TIMERS_BETWEEN_SWEEPS)

    def _rebuild_timers(self) -> None:
        self._deadlines.rebuild(self.messages.values())
        self._expiries.rebuild(self.messages.values())

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Set no timers within the context, and all of them at its end; for evolving by many events."""
        self._is_replaying = True
        try:
            yield
        finally:
            self._is_replaying = False
            self._rebuild_timers()


def _deadline_of(message: Message) -> int | None:
    """Return when the message's delivery times out (svc-mailbox I-3)."""
    return message.due if message.status == IN_FLIGHT else None


def _expiry_of(message: Message) -> int | None:
    """Return when the ready message or dead letter expires (svc-mailbox P-9)."""
    return message.expires_at if message.status in _EXPIRING else None
