"""Decisions about topics: settings, policies, and whether their messages are delivered."""

from collections.abc import Collection

import msgspec

from postroom.domain.errors import NotFound, Saturated
from postroom.domain.mailbox.commands import Pause, Resume, SetPolicy, SetSettings
from postroom.domain.mailbox.events import MailboxSettingsChanged, TopicPaused, TopicPolicySet, TopicResumed
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.mailbox.topic import Topic
from postroom.domain.names import describe_choices, mailbox_stream
from postroom.domain.policy import SATURATED_RETRY_MS
from postroom.domain.settings import MailboxSettings, change_settings, is_glob


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
    base = MailboxSettings() if command.replace else mailbox.settings
    settings = change_settings(base, command.changes)
    if settings == mailbox.settings:
        return []
    return [MailboxSettingsChanged(*_next_event(mailbox, now), settings)]


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
        topics: those that it has, as far as the caller may know.
    """
    return NotFound(f"Mailbox {mailbox} has no topic {name}; {describe_choices(name, {*topics} - {name})}")


def _next_event(mailbox: Mailbox, now: int) -> tuple[bytes, int, int]:
    """Return the fields that all events of the mailbox itself have."""
    return mailbox_stream(mailbox.name), mailbox.version + 1, now
