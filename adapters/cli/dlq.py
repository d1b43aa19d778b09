"""Commands for dead letters, and the lists and confirmations that all dead-letter commands share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, cast

from typer import Argument, Option

from postroom.adapters.cli.filters import Cursor, From
from postroom.adapters.cli.inspect import find_message, show_detail
from postroom.adapters.cli.output import Output, Time
from postroom.adapters.cli.remote import read_store, use_mailbox
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.topic import note_unknown_topic
from postroom.adapters.cli.values import (
    NOTHING,
    REFUSED,
    Archive,
    At,
    WrongUsage,
    Yes,
    parse_moment,
    parse_time,
)
from postroom.application.text import pluralize
from postroom.domain.errors import NotFound

if TYPE_CHECKING:
    from postroom.application.inbox.metrics import InboxBacklog
    from postroom.application.outbox.operate import OutboxBacklog
    from postroom.application.page import Page
    from postroom.application.ports.dead_letters import DeadLetter as StoredDeadLetter
    from postroom.application.ports.dead_letters import DeadLetterGroupPage, GroupField, GroupOrder
    from postroom.application.query_results import DeadLetter


DISCARDED = "discarded by an operator"
Cause = Annotated[str | None, Option("--reason", help="Only this reason, such as max_attempts.")]
Remark = Annotated[str, Option("--reason", help="Why; recorded in the history.")]
DryRun = Annotated[bool, Option("--dry-run", help="Only show what would be redriven.")]
Item = TypeVar("Item")


class Row(NamedTuple):
    """A dead letter in a list.

    Arguments:
        id: id that commands take.
        origin: its topic, subject or type.
        at: when it became a dead letter.
        more: other values, which `--wide` shows.
        shown: other values, which every list shows.
    """

    id: object
    origin: str
    reason: str | None
    attempts: int | None = None
    error: str | None = None
    at: object = None
    more: Mapping[str, object] = {}
    shown: Mapping[str, object] = {}


def show_dead_letters(
    session: Session,
    letters: Sequence[Item],
    row: Callable[[Item], Row],
    *,
    id_: str = "message",
    origin: str = "topic",
    as_json: Callable[[Item], object] = lambda item: item,
    **facts: Any,
) -> None:
    """Show dead letters as JSON, or as a table that shows the reason if the error is missing.

    Arguments:
        id_, origin: names of the columns.
        facts: other members of the JSON document.
    """
    if session.out.as_json:
        session.out.json({"dead_letters": [*map(as_json, letters)], **facts})
        return
    rows = [*map(row, letters)]
    more = tuple(rows[0].more) if rows else ()
    columns = (
        id_,
        origin,
        *(rows[0].shown if rows else ()),
        *more,
        "reason",
        "attempts",
        "last error",
        "age",
    )
    cells = [
        (
            each.id,
            each.origin,
            *each.shown.values(),
            *each.more.values(),
            each.reason,
            each.attempts,
            each.error if session.out.wide else each.error or each.reason,
            each.at,
        )
        for each in rows
    ]
    empty = [name for name, values in zip(columns, zip(*cells, strict=True), strict=False) if not any(values)]
    session.out.table(columns, cells, only_wide=(*more, "reason", "attempts", *empty))


def check_selection(ids: Iterable[str] | None, every: bool, what: str, command: str) -> None:
    """Raise WrongUsage unless the user either named ids or passed --all.

    Arguments:
        what: noun phrase for the message, such as `dead letters to discard`.
        command: command that lists them.
    """
    if bool(ids) == every:
        raise WrongUsage(f"Name the {what}, or pass --all; see postroom {command}.")


def report(session: Session, verb: str, count: int, more: str = "", noun: str = "dead letter") -> None:
    """Write how many dead letters were redriven, purged or discarded.

    Arguments:
        more: continues the sentence.
    """
    session.out.result({verb: count}, f"{pluralize(count, noun)} {verb}{more}")


def show_backlog(out: Output, backlog: "InboxBacklog | OutboxBacklog") -> None:
    """Show the number of waiting rows, and the age of the oldest."""
    if out.as_json:
        out.json(backlog)
        return
    oldest = None if backlog.oldest_at is None else Time(backlog.oldest_at)
    out.table(("context", "count", "oldest"), [(backlog.context, backlog.count, oldest)])


def show_cleanup(out: Output, removed: int | None, noun: str) -> None:
    """Show the number of rows that a cleanup removed; None if another one is running."""
    text = "another cleanup is running" if removed is None else f"{pluralize(removed, noun)} removed"
    out.result({"removed": removed}, text)


Topic = Annotated[str, Argument(help="Topic.")]


def list_dead_letters(
    session: Session,
    topic: Annotated[str | None, Argument(help="Only this topic.")] = None,
    reason: Cause = None,
    held_keys: Annotated[
        bool, Option("--held-keys", help="Only those that hold their ordered key; show the keys.")
    ] = False,
    limit: Annotated[int, Option(help="Dead letters per page, up to 1000.")] = 100,
    cursor: Cursor = None,
    at: At = None,
    archive: Archive = None,
    source: From = None,
) -> None:
    """List the dead letters of a mailbox, oldest first, now or at an earlier time.

    With --from, the read models answer, as of their last update, latest first.
    """
    if source is not None:
        if at is not None or archive is not None or held_keys:
            raise WrongUsage(
                "--from reads the current dead letters of read models; omit --at, --archive and --held-keys."
            )
        _list_stored(session, source, topic, reason, limit, cursor)
        return
    moment = None if at is None else parse_moment(at, datetime.now(UTC))
    arguments: dict[str, Any] = {"reason": reason, "held_keys": held_keys, "limit": limit, "cursor": cursor}
    if session.is_namespace:
        page = read_store(session, lambda mailbox: mailbox.list_dead_letters(topic, **arguments, at=moment))
        _show_page(session, page, _held_row if held_keys else _row, dlq_profile="durable")
        return
    with session.read(session.mailbox, archive) as reader:
        page = reader.list_dead_letters(topic, **arguments, at=moment)
        if topic is not None and not page.items:
            note_unknown_topic(session, topic, reader.list_topics())
    _show_page(session, page, _held_row if held_keys else _row, dlq_profile="durable")


def _list_stored(
    session: Session, source: str, topic: str | None, reason: str | None, limit: int, cursor: str | None
) -> None:
    from postroom.adapters.compose.queries import open_read_models
    from postroom.application.ports.dead_letters import DeadLetterFilter

    criteria = DeadLetterFilter(
        mailbox=session.mailbox,
        topics=() if topic is None else (topic,),
        reason=reason,
        limit=limit,
        cursor=cursor,
    )
    with closing(open_read_models(session.existing_store(), source)) as models:
        page = models.dead_letters(criteria)
    _show_page(session, page, _row)


def _show_page(
    session: Session,
    page: "Page[DeadLetter] | Page[StoredDeadLetter]",
    row: Callable[[Any], Row],
    **facts: Any,
) -> None:
    letters: Sequence[DeadLetter | StoredDeadLetter] = page.items
    show_dead_letters(session, letters, row, next_cursor=page.next_cursor, **facts)
    session.out.note_more(page.next_cursor)


def _row(letter: "DeadLetter | StoredDeadLetter") -> Row:
    from postroom.adapters.cli.output import Id, Time

    return Row(
        Id(letter.message_id),
        letter.topic,
        letter.reason,
        letter.attempt,
        letter.last_error,
        Time(letter.last_seen),
    )


def _held_row(letter: "DeadLetter") -> Row:
    return _row(letter)._replace(shown={"key": letter.held_key, "waiting": letter.waiting})


def show_dead_letter(
    session: Session, message_id: Annotated[str, Argument(help="Message id, or the beginning of one.")]
) -> None:
    """Show a dead letter: headers, payload, history, and each time it was dead-lettered before."""
    from postroom.application.queries.redrive_lineage import lineage_of

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
    reason: Cause = None,
    id_: Annotated[list[str] | None, Option("--id", help="Only this message; may be repeated.")] = None,
) -> None:
    """Redrive dead letters to their topic, oldest first, with their attempts reset."""
    async with use_mailbox(session) as postroom:
        count = await postroom.redrive_dead_letters(topic, limit=limit, reason=reason, message_ids=id_)
    report(session, "redriven", count, f" to {topic}")


async def purge_dead_letters(
    session: Session,
    topic: Topic,
    yes: Yes = False,
) -> int | None:
    """Remove all dead letters of a topic; their history stays in the log."""
    refusal = WrongUsage(f"Purging the dead letters of {topic} can't be undone; add --yes to confirm.")
    if not yes and not session.out.confirm(f"Remove all dead letters of {topic}?", refusal):
        return REFUSED
    async with use_mailbox(session) as postroom:
        count = await postroom.purge_topic(topic)
    report(session, "purged", count, f" from {topic}")
    return None


US = 1_000


def group_dead_letters(
    session: Session,
    text: Annotated[str | None, Argument(help="Part of the last error.")] = None,
    topic: Annotated[list[str] | None, Option(help="Topic or glob; may be repeated.")] = None,
    reason: Cause = None,
    fingerprint: Annotated[str | None, Option(help="Only this fingerprint of the error.")] = None,
    since: Annotated[
        str | None, Option(metavar="TIME", help="Dead-lettered at or after: RFC 3339, ms, or an age.")
    ] = None,
    until: Annotated[
        str | None, Option(metavar="TIME", help="Dead-lettered before, in the same format.")
    ] = None,
    by: Annotated[
        list[str] | None,
        Option(
            metavar="fingerprint|topic|reason",
            help="What the dead letters of a group have in common; may be repeated.",
        ),
    ] = None,
    order: Annotated[str, Option(metavar="latest|largest", help="Which groups come first.")] = "latest",
    bars: Annotated[int, Option(help="With --json: number of bars of the trends, up to 200.")] = 24,
    limit: Annotated[int, Option(help="Groups per page, up to 1000.")] = 100,
    cursor: Cursor = None,
    source: From = None,
) -> int | None:
    """Group dead letters, by default by fingerprint and topic, as of the read models.

    The fingerprint is the same for errors that differ only in numbers and ids.
    """
    from postroom.adapters.compose.queries import read_projections
    from postroom.application.ports.dead_letters import DEFAULT_GROUP, DeadLetterGroupFilter

    now = datetime.now(UTC)
    filter_ = DeadLetterGroupFilter(
        mailbox=session.settings.mailbox,
        topics=tuple(topic or ()),
        reason=reason,
        fingerprint=fingerprint,
        since=None if since is None else parse_time(since, now) * US,
        until=None if until is None else parse_time(until, now) * US,
        text=text,
        by=cast("tuple[GroupField, ...]", tuple(by)) if by else DEFAULT_GROUP,
        order=cast("GroupOrder", order),
        bars=bars if session.out.as_json else 0,
        limit=limit,
        cursor=cursor,
    )
    with read_projections(session.existing_store(), source) as projections:
        page = projections.group_dead_letters(filter_)
    if session.out.as_json:
        session.out.json(page)
    else:
        _show(session, page)
    return None if page.items else NOTHING


def _show(session: Session, page: "DeadLetterGroupPage") -> None:
    from postroom.adapters.cli.output import Id, Time

    session.out.table(
        ("fingerprint", "topic", "count", "last", "first", "reason", "sample", "last error"),
        [
            (
                None if each.fingerprint is None else Id(each.fingerprint),
                each.topic,
                each.count,
                Time(each.last_seen),
                Time(each.first_seen),
                each.reason,
                Id(each.sample.message_id),
                each.sample.last_error or each.sample.reason,
            )
            for each in page.items
        ],
        only_wide=("first", "reason", "sample"),
    )
    text = f"{pluralize(page.letters, 'dead letter')} in {pluralize(page.groups, 'group')}"
    if page.since is not None:
        text += f", counted since {Time(page.since)}"
    more = f"; continue with --cursor {page.next_cursor}" if page.next_cursor else ""
    session.out.note(text + more + ".")
