"""What a change of settings does at once to what a mailbox holds."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from postroom.domain.mailbox.state import Mailbox
from postroom.domain.mailbox.topic import Topic
from postroom.domain.message import DEAD, MS
from postroom.domain.policy import TopicPolicy
from postroom.domain.settings import MailboxSettings, resolve_policy

Effect = Literal["dead_letters_expired", "keys_forgotten", "attempts_used", "shards_wait", "records_removed"]
LOSSES: tuple[Effect, ...] = ("dead_letters_expired", "keys_forgotten", "attempts_used", "records_removed")
"""Effects that can't be undone."""


class SettingsEffect(msgspec.Struct, frozen=True):
    """An effect of a change of settings.

    Arguments:
        topic: None for one on the mailbox as a whole.
        effect: `dead_letters_expired` above `dead_capacity`; `keys_forgotten`: idempotency keys older than
            the replay window; `attempts_used`: messages that are dead-lettered when a delivery fails, as
            they have had `max_attempts`; `records_removed` by `history_retention_ms` or `max_store_bytes`;
            `shards_wait`: messages that must settle before another number of shards is used.
        count: number of dead letters, keys, messages or records.
    """

    topic: str | None
    effect: Effect
    count: int


class SettingsPreview(msgspec.Struct, frozen=True):
    """The settings before and after a change, and its effects; all that can't be undone are in `LOSSES`."""

    before: MailboxSettings
    after: MailboxSettings
    effects: list[SettingsEffect] = []

    @property
    def losses(self) -> list[SettingsEffect]:
        """Return the effects that can't be undone."""
        return [each for each in self.effects if each.effect in LOSSES]


def effects_on_topics(mailbox: Mailbox, settings: MailboxSettings, now: int) -> list[SettingsEffect]:
    """Return what `settings` would do to the topics of a mailbox at log time `now` (µs), sorted by topic."""
    effects: list[SettingsEffect] = []
    fewer_attempts: dict[str, TopicPolicy] = {}
    for name, topic in sorted(mailbox.topics.items()):
        policy = resolve_policy(settings, name)
        if policy == topic.policy:
            continue
        effects += [
            SettingsEffect(name, effect, count) for effect, count in _effects(topic, policy, now) if count
        ]
        if policy.max_attempts < topic.policy.max_attempts:
            fewer_attempts[name] = policy
    if fewer_attempts:
        effects += _attempts_used(mailbox, fewer_attempts)
    return sorted(effects, key=lambda each: each.topic or "")


def _effects(topic: Topic, policy: TopicPolicy, now: int) -> Iterator[tuple[Effect, int]]:
    yield "dead_letters_expired", max(0, len(topic.dead) - policy.dead_capacity)
    remembered = now - topic.policy.replay_window_ms * MS
    yield "keys_forgotten", topic.window.count_between(remembered, now - policy.replay_window_ms * MS)
    if topic.shards_in_use != policy.shards:
        yield "shards_wait", sum(shard.size for shard in topic.shards.values()) + len(topic.dead)


def _attempts_used(mailbox: Mailbox, policies: dict[str, TopicPolicy]) -> Iterator[SettingsEffect]:
    counts = dict.fromkeys(policies, 0)
    for message in mailbox.messages.values():
        policy = policies.get(message.topic)
        if policy is not None and message.status != DEAD:
            counts[message.topic] += (
                policy.max_attempts <= message.attempt < mailbox.policy(message.topic).max_attempts
            )
    return (SettingsEffect(name, "attempts_used", count) for name, count in counts.items() if count)
