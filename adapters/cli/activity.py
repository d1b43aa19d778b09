"""`postroom activity`: event counts by hour or day, topic and type."""

from contextlib import closing
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.exit_codes import NOTHING
from postroom.adapters.cli.filters import From
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.time_arguments import parse_micros


def activity(
    session: Session,
    period: Annotated[str, Argument(metavar="hour|day", help="Period to count by, in UTC.")] = "day",
    topic: Annotated[
        list[str] | None, Option(metavar="GLOB", help="Only topics that match; may be repeated.")
    ] = None,
    since: Annotated[
        str | None, Option(metavar="TIME", help="First period: RFC 3339, or an age such as 7d.")
    ] = None,
    until: Annotated[str | None, Option(metavar="TIME", help="End (exclusive), in the same format.")] = None,
    limit: Annotated[int, Option(help="Rows per page, up to 1000.")] = 100,
    cursor: Annotated[str | None, Option(help="Continue after the page that printed this cursor.")] = None,
    source: From = None,
) -> int | None:
    """Count events by hour or day, topic and type, latest first, as of the read models.

    The topic is empty for events of the mailbox itself, such as a change of its owner.
    """
    from postroom.adapters.compose.queries import open_read_models
    from postroom.application.ports.read_models import ActivityFilter

    criteria = ActivityFilter(
        period=period,
        mailbox=session.settings.mailbox,
        topics=tuple(topic or ()),
        since=parse_micros("--since", since),
        until=parse_micros("--until", until),
        limit=limit,
        cursor=cursor,
    )
    with closing(open_read_models(session.existing_store(), source)) as models:
        page = models.activity(criteria)
    if session.out.as_json:
        session.out.json({"period": period, **msgspec.structs.asdict(page)})
    else:
        session.out.table(
            (period, "topic", "event", "events"),
            [(_start(each.starts_at, period), each.topic, each.event, each.events) for each in page.items],
        )
        if page.next_cursor is not None:
            session.out.note(f"There is more; continue with --cursor {page.next_cursor}.")
    return None if page.items else NOTHING


def _start(at: int, period: str) -> str:
    start = datetime.fromtimestamp(at // 1_000_000, UTC)
    return f"{start:%Y-%m-%d}" if period == "day" else f"{start:%Y-%m-%dT%H:%MZ}"
