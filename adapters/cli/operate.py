"""`postroom dlq` and `postroom topic`: what operators do."""

import sys
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import typer
from typer import Argument, Option

from postroom.adapters.cli.failures import REFUSED
from postroom.adapters.cli.moments import Archive, At, parse_moment
from postroom.adapters.cli.queues import find_message, show_detail
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import make_policy
from postroom.adapters.cli.values import WrongUsage, format_duration, parse_pairs
from postroom.domain.errors import InvalidRequest, NotFound

Topic = Annotated[str, Argument(help="Topic.")]


def list_dead_letters(
    session: Session,
    topic: Annotated[str | None, Argument(help="Only this topic.")] = None,
    reason: Annotated[str | None, Option(help="Only those that died of this, such as max_attempts.")] = None,
    limit: Annotated[int, Option(help="Dead letters at most, up to 1000.")] = 100,
    after: Annotated[int, Option(metavar="POSITION", help="Start after this position: the next page.")] = 0,
    at: At = None,
    archive: Archive = None,
) -> None:
    """List the dead letters of a mailbox, oldest first, with what they died of, now or at a moment before."""
    moment = None if at is None else parse_moment(at, datetime.now(UTC))
    with session.read(session.mailbox, archive) as reader:
        letters = reader.list_dead_letters(topic, reason=reason, limit=limit, after=after, at=moment)
    if session.out.as_json:
        session.out.json({"dead_letters": letters})
        return
    session.out.table(
        ("message", "topic", "reason", "attempts", "last error", "last seen"),
        [
            (each.message_id, each.topic, each.reason, each.attempt, each.last_error, each.last_seen)
            for each in letters
        ],
    )
    if len(letters) == limit:
        session.out.note(f"There may be more: add --after {letters[-1].position}.")


def show_dead_letter(
    session: Session, message_id: Annotated[str, Argument(help="Id of the message.")]
) -> None:
    """Show one dead letter: headers, payload, how it came to die, and of what it died before."""
    from postroom.application.queries.lineage import lineage_of

    detail = find_message(session, message_id)
    if detail.status != "dead":
        raise NotFound(
            f"Message {message_id} is no dead letter, it is {detail.status}; see it with postroom show."
        )
    show_detail(session, detail, lineage=lineage_of(detail))


async def reprocess_dead_letters(
    session: Session,
    topic: Topic,
    limit: Annotated[int, Option(help="Dead letters at most.")] = 100,
    reason: Annotated[str | None, Option(help="Only those that died of this.")] = None,
    id_: Annotated[list[str] | None, Option("--id", help="Only this message; may be repeated.")] = None,
) -> None:
    """Put dead letters back into their queues, oldest first, with fresh attempts."""
    async with session.own() as postroom:
        count = await postroom.reprocess_dead_letters(topic, limit=limit, reason=reason, message_ids=id_)
    _report(session, "reprocessed", count, f"{count:,} dead letters of {topic} are ready again")


async def purge_dead_letters(
    session: Session, topic: Topic, yes: Annotated[bool, Option("--yes", help="Don't ask.")] = False
) -> int | None:
    """Remove the dead letters of a topic for good; their history stays in the log."""
    if not yes:
        if session.out.as_json or not sys.stdin.isatty():
            raise WrongUsage(f"Purging the dead letters of {topic} can't be undone; add --yes to do it.")
        if not typer.confirm(f"Remove all dead letters of {topic}?", err=True):
            return REFUSED
    async with session.own() as postroom:
        count = await postroom.purge_topic(topic)
    _report(session, "purged", count, f"{count:,} dead letters of {topic} removed")
    return None


async def policy(
    session: Session,
    topic: Topic,
    changes: Annotated[
        list[str] | None,
        Argument(metavar="[NAME=VALUE]...", help="What to change, such as visibility=30s max_attempts=3."),
    ] = None,
) -> None:
    """Show what a topic promises, or change it from now on."""
    if changes and topic in session.settings.topics:
        raise InvalidRequest(
            f'The policy of {topic} is set in {session.settings.file}; change [topics."{topic}"] there.'
        )
    pairs = parse_pairs(changes or (), "Change")
    if not pairs:
        with session.read(session.mailbox) as reader:
            current = reader.get_topic_policy(topic) or session.settings.policy
    else:
        async with session.own(create=True) as postroom:
            base = postroom.get_topic_policy(topic) or session.settings.policy
            current = make_policy(base, pairs, f"The policy of {topic}")
            await postroom.set_topic_policy(topic, current)
    facts = msgspec.to_builtins(current)
    if session.out.as_json:
        session.out.json({"topic": topic, "policy": facts})
    else:
        session.out.facts(
            (name.removesuffix("_ms"), format_duration(value) if name.endswith("_ms") else value)
            for name, value in facts.items()
        )


def _report(session: Session, name: str, count: int, text: str) -> None:
    if session.out.as_json:
        session.out.json({name: count})
    else:
        session.out.line(text)
