"""`postroom dlq`: list, show, redrive and purge dead letters."""

import sys
from datetime import UTC, datetime
from typing import Annotated

import typer
from typer import Argument, Option

from postroom.adapters.cli.exit_codes import REFUSED
from postroom.adapters.cli.inspect import find_message, show_detail
from postroom.adapters.cli.remote import use_mailbox
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.time_arguments import Archive, At, parse_moment
from postroom.adapters.cli.topic import note_unknown_topic
from postroom.adapters.cli.values import WrongUsage
from postroom.domain.errors import NotFound

Topic = Annotated[str, Argument(help="Topic.")]


def list_dead_letters(
    session: Session,
    topic: Annotated[str | None, Argument(help="Only this topic.")] = None,
    reason: Annotated[str | None, Option(help="Only this reason, such as max_attempts.")] = None,
    limit: Annotated[int, Option(help="Dead letters per page, up to 1000.")] = 100,
    cursor: Annotated[int, Option(help="Continue after the page that printed this cursor.")] = 0,
    at: At = None,
    archive: Archive = None,
) -> None:
    """List the dead letters of a mailbox, oldest first, now or at an earlier time."""
    moment = None if at is None else parse_moment(at, datetime.now(UTC))
    with session.read(session.mailbox, archive) as reader:
        letters = reader.list_dead_letters(topic, reason=reason, limit=limit, cursor=cursor, at=moment)
        if topic is not None and not letters:
            note_unknown_topic(session, topic, reader.list_topics())
    next_cursor = letters[-1].position if len(letters) == limit else None
    if session.out.as_json:
        session.out.json({"dead_letters": letters, "next_cursor": next_cursor, "dlq_profile": "durable"})
        return
    from postroom.adapters.cli.tables import Id, Time

    session.out.table(
        ("message", "topic", "reason", "attempts", "last error", "age"),
        [
            (
                Id(each.message_id),
                each.topic,
                each.reason,
                each.attempt,
                each.last_error if session.out.wide else each.last_error or each.reason,
                Time(each.last_seen),
            )
            for each in letters
        ],
        only_wide=("reason", "attempts"),
    )
    if next_cursor is not None:
        session.out.note(f"There may be more; continue with --cursor {next_cursor}.")


def show_dead_letter(
    session: Session, message_id: Annotated[str, Argument(help="Message id, or the beginning of one.")]
) -> None:
    """Show a dead letter: headers, payload, history, and each time it was dead-lettered before."""
    from postroom.application.queries.lineage import lineage_of

    detail = find_message(session, message_id)
    if detail.status != "dead":
        raise NotFound(
            f"Message {detail.message_id} is not a dead letter but {detail.status}; see postroom show "
            f"{detail.message_id}."
        )
    show_detail(session, detail, lineage=lineage_of(detail))


async def redrive_dead_letters(
    session: Session,
    topic: Topic,
    limit: Annotated[int, Option(help="Maximum number of dead letters.")] = 100,
    reason: Annotated[str | None, Option(help="Only this reason, such as max_attempts.")] = None,
    id_: Annotated[list[str] | None, Option("--id", help="Only this message; may be repeated.")] = None,
) -> None:
    """Redrive dead letters to their topic, oldest first, with their attempts reset."""
    async with use_mailbox(session) as postroom:
        count = await postroom.redrive_dead_letters(topic, limit=limit, reason=reason, message_ids=id_)
    _report(session, "redriven", count, f"{count:,} redriven to {topic}")


async def purge_dead_letters(
    session: Session,
    topic: Topic,
    yes: Annotated[bool, Option("--yes", help="Do not ask for confirmation.")] = False,
) -> int | None:
    """Remove all dead letters of a topic; their history stays in the log."""
    if not yes:
        if session.out.as_json or not sys.stdin.isatty():
            raise WrongUsage(f"Purging the dead letters of {topic} can't be undone; add --yes to confirm.")
        if not typer.confirm(f"Remove all dead letters of {topic}?", err=True):
            return REFUSED
    async with use_mailbox(session) as postroom:
        count = await postroom.purge_topic(topic)
    _report(session, "purged", count, f"{count:,} purged from {topic}")
    return None


def _report(session: Session, name: str, count: int, text: str) -> None:
    session.out.result({name: count}, text)
