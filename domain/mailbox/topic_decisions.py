"""Decisions about settings: of the mailbox, of topics, whether these are delivered, and saved searches."""

from collections.abc import Collection, Iterator
from typing import Literal

import msgspec

from postroom.domain.errors import IdempotencyConflict, NotFound, Saturated
from postroom.domain.mailbox.commands import DeleteSearch, Pause, Resume, SaveSearch, SetPolicy, SetSettings
from postroom.domain.mailbox.events import MailboxSettingsChanged, TopicPaused, TopicPolicySet, TopicResumed
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.mailbox.topic import Topic
from postroom.domain.message import DEAD, MS, Headers
from postroom.domain.names import describe_choices, is_glob, mailbox_stream
from postroom.domain.policy import SATURATED_RETRY_MS, TopicPolicy
from postroom.domain.saved_search import MAX_SEARCHES, SavedSearch, Searches, search_id
from postroom.domain.settings import MailboxSettings, change_settings, resolve_policy
from postroom.domain.subject import find_policy, is_encrypted


def find_topic(name: str, mailbox: Mailbox) -> Topic:
    """Return a topic that the mailbox holds.

    Raises: NotFound naming the topics that exist.
    """
    topic = mailbox.topics.get(name)
    if topic is None:
        raise unknown_topic(name, mailbox.name, mailbox.topic_names())
    return topic


def set_settings(command: SetSettings, mailbox: Mailbox, now: int) -> list[MailboxSettingsChanged]:
    """Change the settings of the mailbox; no event if that changes nothing."""
    base = base_of(mailbox.settings, replace=command.replace)
    settings = change_settings(base, command.changes)
    if settings == mailbox.settings:
        return []
    return [MailboxSettingsChanged(*_next_event(mailbox, now), settings)]


def base_of(settings: MailboxSettings, *, replace: bool) -> MailboxSettings:
    """Return the settings to be changed; a replacement keeps searches, labels, and sections with labels."""
    if not replace:
        return settings
    topics = {name: settings.topics[name] for name in settings.labels if name in settings.topics}
    return MailboxSettings(topics=topics, labels=settings.labels, searches=settings.searches)


def save_search(command: SaveSearch, mailbox: Mailbox, now: int) -> list[MailboxSettingsChanged]:
    """Save a search; no event if it is saved with this query."""
    id_, searches = search_id(command.name, command.query), mailbox.settings.saved_searches
    former = searches.get(id_)
    if former is not None and former.query == command.query:
        return []
    if former is not None and not command.replace:
        raise IdempotencyConflict(
            f"There is a search {command.name!r} with another query; replace it, or use another name."
        )
    if former is None and len(searches) >= MAX_SEARCHES:
        raise Saturated(
            f"Mailbox {mailbox.name} has its limit of {MAX_SEARCHES} saved searches; delete one of them.",
            SATURATED_RETRY_MS,
        )
    saved = SavedSearch(command.name, command.query, command.principal, now)
    return [_searches_changed(mailbox, now, {**searches, id_: saved})]


def delete_search(command: DeleteSearch, mailbox: Mailbox, now: int) -> list[MailboxSettingsChanged]:
    """Delete a saved search."""
    searches = dict(mailbox.settings.saved_searches)
    if searches.pop(command.search_id, None) is None:
        raise NotFound(f"Mailbox {mailbox.name} has no saved search {command.search_id}.")
    return [_searches_changed(mailbox, now, searches)]


def _searches_changed(mailbox: Mailbox, now: int, searches: Searches) -> MailboxSettingsChanged:
    return MailboxSettingsChanged(*_next_event(mailbox, now), mailbox.settings.with_searches(searches))


def set_policy(command: SetPolicy, mailbox: Mailbox, now: int) -> list[TopicPolicySet]:
    """Set the policy of a topic, which need not exist yet."""
    policy, sections = command.policy.validate(), mailbox.settings.topics
    if sections.get(command.topic) == msgspec.structs.asdict(policy):
        return []
    count = len(sections) - sum(map(is_glob, sections))
    if command.topic not in sections and count >= mailbox.limits.topics:
        raise Saturated(
            f"Mailbox {mailbox.name} has policies for its limit of {mailbox.limits.topics} topics; change "
            "one of them, or raise the limit.",
            SATURATED_RETRY_MS,
        )
    return [TopicPolicySet(*_next_event(mailbox, now), command.topic, policy)]


def pause(command: Pause, mailbox: Mailbox, now: int) -> list[TopicPaused]:
    """Pause a topic; no event if it is paused."""
    if command.topic in mailbox.paused_topics:
        return []
    _check_exists(command.topic, mailbox)
    if len(mailbox.paused_topics) >= mailbox.limits.topics:
        raise Saturated(
            f"Mailbox {mailbox.name} has paused its limit of {mailbox.limits.topics} topics; resume one of "
            "them, or raise the limit.",
            SATURATED_RETRY_MS,
        )
    return [TopicPaused(*_next_event(mailbox, now), command.topic)]


def resume(command: Resume, mailbox: Mailbox, now: int) -> list[TopicResumed]:
    """Resume a topic; no event if it is not paused."""
    _check_exists(command.topic, mailbox)
    if command.topic not in mailbox.paused_topics:
        return []
    return [TopicResumed(*_next_event(mailbox, now), command.topic)]


def _check_exists(name: str, mailbox: Mailbox) -> None:
    if name not in mailbox.topic_names():
        raise unknown_topic(name, mailbox.name, mailbox.topic_names())


def unknown_topic(name: str, mailbox: str, topics: Collection[str]) -> NotFound:
    """Return the error for a topic that a mailbox does not have.

    Arguments:
        topics: topics of the mailbox that the caller may know of.
    """
    return NotFound(f"Mailbox {mailbox} has no topic {name}; {describe_choices(name, {*topics} - {name})}")


def _next_event(mailbox: Mailbox, now: int) -> tuple[bytes, int, int]:
    """Return the fields that all events of the mailbox itself have."""
    return mailbox_stream(mailbox.name), mailbox.version + 1, now


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
        yield "shards_wait", topic.size


def _attempts_used(mailbox: Mailbox, policies: dict[str, TopicPolicy]) -> Iterator[SettingsEffect]:
    counts = dict.fromkeys(policies, 0)
    for message in mailbox.messages.values():
        policy = policies.get(message.topic)
        if policy is not None and message.status != DEAD:
            counts[message.topic] += (
                policy.max_attempts <= message.attempt < mailbox.policy(message.topic).max_attempts
            )
    return (SettingsEffect(name, "attempts_used", count) for name, count in counts.items() if count)


def is_in_the_clear(topic: str, headers: Headers, mailbox: Mailbox) -> bool:
    """Return whether a message is not encrypted although its topic requires it (ADR 0089)."""
    return not is_encrypted(headers) and find_policy(mailbox.settings.subject_policies, topic) is not None
