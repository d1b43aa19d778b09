"""`postroom topic`: list topics, pause and resume them, show and change their policies."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from postroom.adapters.cli.remote import use_mailbox
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import parse_fields
from postroom.adapters.cli.values import REFUSED, Yes, format_duration, parse_pairs
from postroom.domain.errors import Forbidden, InvalidRequest
from postroom.domain.names import describe_choices
from postroom.domain.policy import TopicPolicy
from postroom.domain.settings import SettingsChanges, explain_policy

if TYPE_CHECKING:
    from postroom.application.operations.mailbox import Mailbox
    from postroom.domain.mailbox.counts import TopicSummary

Topic = Annotated[str, Argument(help="Topic.")]


def list_topics(session: Session) -> None:
    """List the topics of a mailbox: messages by status, paused or not, and what their policies change."""
    with session.read(session.mailbox) as reader:
        topics, default = reader.list_topics(), reader.get_settings().default_policy
    if session.out.as_json:
        facts = {"mailbox": session.mailbox, "default_policy": default, "topics": topics}
        session.out.json(facts | {"dlq_profile": "durable"})
        return
    from postroom.adapters.cli.output import Time

    session.out.table(
        ("topic", "ready", "delayed", "in flight", "dead", "oldest", "paused", "policy"),
        [
            (
                each.topic,
                each.ready,
                each.delayed,
                each.in_flight,
                each.dead,
                None if each.oldest_at is None else Time(each.oldest_at),
                "paused" if each.paused else None,
                ", ".join(_changes(each.policy, default)) or "default",
            )
            for each in topics
        ],
    )


async def pause(session: Session, topic: Topic) -> None:
    """Stop the delivery of a topic's messages until it is resumed; sends and acks continue."""
    async with use_mailbox(session) as postroom:
        await postroom.pause_topic(topic)
    session.out.result({"topic": topic, "paused": True}, f"{topic} is paused")


async def resume(session: Session, topic: Topic) -> None:
    """Deliver the messages of a paused topic again."""
    async with use_mailbox(session) as postroom:
        await postroom.resume_topic(topic)
    session.out.result({"topic": topic, "paused": False}, f"{topic} is resumed")


async def policy(
    session: Session,
    topic: Topic,
    changes: Annotated[
        list[str] | None,
        Argument(metavar="[NAME=VALUE]...", help="Fields to change, such as visibility=30s max_attempts=3."),
    ] = None,
    yes: Yes = False,
) -> int | None:
    """Show the policy of a topic and the section that sets each field, or change some of the fields.

    The other fields go on following the globs of [topics] and [policy].
    """
    if changes and topic in session.settings.topics:
        raise InvalidRequest(
            f'The policy of {topic} is set in {session.settings.file}; change [topics."{topic}"] there, and '
            "run postroom apply."
        )
    pairs = parse_pairs(changes or (), "Change")
    if pairs:
        fields = parse_fields(TopicPolicy(), pairs, f"The policy of {topic}")
        async with use_mailbox(session, create=True) as postroom:
            from postroom.adapters.cli.mailbox import invalid_settings

            with invalid_settings():
                if not await _confirm(session, postroom, topic, fields, yes=yes):
                    return REFUSED
                await postroom.set_topic_policy(topic, fields)
            if session.is_remote:
                current = await postroom.get_topic_policy(topic)
                session.out.result({"topic": topic, "policy": current}, f"The policy of {topic} is changed")
                return None
    with session.read(session.mailbox) as reader:
        resolved = explain_policy(reader.get_settings(), topic)
        topics = reader.list_topics()
    if session.out.as_json:
        facts = {name: each.value for name, each in resolved.items()}
        sections = {name: each.section for name, each in resolved.items()}
        session.out.json({"topic": topic, "policy": facts, "sections": sections})
        return None
    if not pairs:
        note_unknown_topic(session, topic, topics)
    rows = [(_short(name), _shown(name, each.value), each.section) for name, each in resolved.items()]
    session.out.table(("field", "value", "section"), rows)
    waiting = next((each.shards_in_use for each in topics if each.topic == topic), None)
    if waiting is not None:
        session.out.note(f"{topic} uses {waiting} shards until its messages are settled.")
    return None


async def _confirm(
    session: Session, mailbox: "Mailbox", topic: str, fields: "dict[str, Any]", *, yes: bool
) -> bool:
    """Return whether fields of a policy may be set; ask if something would be lost.

    A server previews changes for those who may administer all its topics; others are not asked.
    """
    if yes:
        return True
    try:
        preview = await mailbox.preview_settings(SettingsChanges(topics={topic: fields}))
    except Forbidden:
        return True
    from postroom.adapters.cli.mailbox import confirm

    return confirm(session, preview, yes=yes)


def note_unknown_topic(session: Session, topic: str | None, topics: "Iterable[TopicSummary]") -> None:
    """Note for people that none of the mailboxes read has the topic that they named, and which exist."""
    names = {each.topic for each in topics}
    if topic is not None and topic not in names:
        session.out.note(f"There is no topic {topic}; {describe_choices(topic, names)}")


def _changes(policy: TopicPolicy | None, default: TopicPolicy) -> Iterator[str]:
    """Yield the fields in which a policy differs from the default."""
    for name in TopicPolicy.__struct_fields__ if policy is not None else ():
        value = getattr(policy, name)
        if value != getattr(default, name):
            yield f"{_short(name)}={_shown(name, value)}"


def _short(name: str) -> str:
    return name.removesuffix("_ms")


def _shown(name: str, value: int) -> str | int:
    """Return the value of a field as it may be set."""
    if isinstance(value, bool):
        return str(value).lower()
    return format_duration(value) if name.endswith("_ms") else value
