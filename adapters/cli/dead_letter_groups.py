"""`postroom dlq groups`: dead letters in groups, such as those with the same error."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, cast

from typer import Argument, Option

from postroom.adapters.cli.exit_codes import NOTHING
from postroom.adapters.cli.filters import From
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import parse_time
from postroom.application.pluralize import pluralize

if TYPE_CHECKING:
    from postroom.application.ports.dead_letters import DeadLetterGroupPage, GroupField, GroupOrder

US = 1_000


def group_dead_letters(
    session: Session,
    text: Annotated[str | None, Argument(help="Part of the last error.")] = None,
    topic: Annotated[list[str] | None, Option(help="Topic or glob; may be repeated.")] = None,
    reason: Annotated[str | None, Option(help="Only this reason, such as max_attempts.")] = None,
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
    cursor: Annotated[str | None, Option(help="Continue after the page that printed this cursor.")] = None,
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
    from postroom.adapters.cli.tables import Id, Time

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
