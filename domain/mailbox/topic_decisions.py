"""Decisions about topics: their policies, and whether their messages are delivered."""

from collections.abc import Collection

from postroom.domain.errors import InvalidRequest, NotFound, Saturated
from postroom.domain.mailbox.commands import Pause, Resume, SetPolicy
from postroom.domain.mailbox.events import TopicPaused, TopicPolicySet, TopicResumed
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.mailbox.topic import Topic
from postroom.domain.names import describe_choices, mailbox_stream
from postroom.domain.policy import SATURATED_RETRY_MS


def find_topic(name: str, mailbox: Mailbox) -> Topic:
    """Return a topic that the mailbox holds.

    Raises: NotFound naming the topics that exist.
    """
    topic = mailbox.topics.get(name)
    if topic is None:
        raise unknown_topic(name, mailbox.name, mailbox.topic_names())
    return topic


def set_policy(command: SetPolicy, mailbox: Mailbox, now: int) -> list[TopicPolicySet]:
    """Set the policy of a topic, which need not exist yet."""
    policy = command.policy.validate()
    topic = mailbox.topics.get(command.topic)
    if topic is not None and policy.shards != topic.policy.shards and not topic.is_empty:
        raise InvalidRequest(
            f"Topic {command.topic} has {topic.policy.shards} shards and holds messages; "
            "its shard count can change only while it is empty."
        )
    if policy == mailbox.policies.get(command.topic):
        return []
    if command.topic not in mailbox.policies and len(mailbox.policies) >= mailbox.limits.topics:
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
