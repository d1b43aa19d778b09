"""`postroom search`, `stats`, `activity` and `export`: queries on the read models."""

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.filters import Cursor, From, takes_filter
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import NOTHING, WrongUsage, parse_micros
from postroom.application.text import pluralize

if TYPE_CHECKING:
    from postroom.adapters.compose.export import Format
    from postroom.adapters.compose.queries import Projections
    from postroom.domain.search import EventFilter, FoundMessage


@takes_filter
def search(
    session: Session,
    criteria: "EventFilter",
    order: Annotated[str, Option(metavar="newest|oldest", help="Which messages come first.")] = "newest",
    limit: Annotated[int, Option(help="Messages per page, up to 1000.")] = 100,
    cursor: Cursor = None,
    every: Annotated[bool, Option("--all", help="Print all pages.")] = False,
    envelope: Annotated[bool, Option("--envelope", help="With --json, add the envelope in base64.")] = False,
    source: From = None,
) -> int | None:
    """Search all messages by their headers and words, as of the last `postroom views rebuild` or `follow`.

    With --json it prints one JSON object a line.
    """
    from postroom.domain.search import Order

    if order not in list(Order):
        raise WrongUsage(f"Unknown --order {order!r}; expected {' or '.join(Order)}.")
    criteria = msgspec.structs.replace(
        criteria, order=Order(order), limit=limit, cursor=cursor, envelopes=envelope
    )
    return show_results(session, criteria, source, every=every)


def show_results(
    session: Session, criteria: "EventFilter", source: str | None, *, every: bool = False
) -> int | None:
    """Print the messages that match, and how current they are; return the status of the command.

    Arguments:
        source: where the read models were built into.
        every: print all pages.
    """
    from postroom.adapters.compose.queries import read_projections

    erasure = session.erasure_settings()
    with read_projections(session.existing_store(), source, erasure=erasure) as projections:
        count = _show_pages(session, projections, criteria, every, criteria.envelopes)
        if not session.out.as_json:
            _note_lag(session, projections)
            if criteria.match is not None:
                _note_bodies(session, projections)
    return None if count else NOTHING


def stats(session: Session, source: From = None) -> None:
    """Show the number of messages, their size, and the first and last publish time, as of the read models."""
    from postroom.adapters.compose.queries import read_projections

    with read_projections(session.existing_store(), source) as projections:
        totals = projections.get_table_stats()
    if session.out.as_json:
        session.out.json(totals)
        return
    from postroom.adapters.cli.output import Time

    oldest, newest = totals.oldest_event, totals.newest_event
    session.out.facts(
        [
            ("messages", totals.total_events),
            ("bytes on disk", totals.total_size_bytes),
            ("oldest", None if oldest is None else Time(oldest * 1_000)),
            ("newest", None if newest is None else Time(newest * 1_000)),
        ]
    )


def as_json(message: "FoundMessage", envelope: bool) -> dict[str, Any]:
    """Return a search result as JSON.

    Arguments:
        envelope: include its envelope in base64, without the auth token.
    """
    facts: dict[str, Any] = msgspec.structs.asdict(message)
    blob = facts.pop("envelope_blob")
    facts["status"] = message.status.name.lower()
    if envelope:
        from postroom.domain.envelope.build import without_auth_token

        facts["envelope_b64"] = without_auth_token(blob)
    return facts


def _show_pages(
    session: Session, projections: "Projections", criteria: "EventFilter", every: bool, envelope: bool
) -> int:
    count = 0
    while True:
        page = projections.search_messages(criteria)
        count += len(page.items)
        if session.out.as_json:
            for item in page.items:
                session.out.json(as_json(item, envelope))
        elif page.items:
            _show_table(session, page.items)
        if page.next_cursor is None or not every:
            break
        criteria = msgspec.structs.replace(criteria, cursor=page.next_cursor, offset=0)
    if page.next_cursor is not None and session.out.as_json:
        sys.stderr.write(msgspec.json.encode({"next_cursor": page.next_cursor}).decode() + "\n")
    more = f"; continue with --cursor {page.next_cursor}" if page.next_cursor else ""
    session.out.note(f"{count:,} found{more}")
    return count


def _show_table(session: Session, messages: "Sequence[FoundMessage]") -> None:
    from postroom.adapters.cli.output import Id, Time

    session.out.table(
        ("message", "topic", "principal", "status", "attempts", "age"),
        [
            (
                Id(each.message_id),
                each.topic,
                each.principal,
                each.status.name.lower(),
                each.attempts,
                Time(each.timestamp * 1_000),
            )
            for each in messages
        ],
        only_wide=("attempts",),
    )


def _note_bodies(session: Session, projections: "Projections") -> None:
    """Say which bodies were searched for words, and how to search others."""
    active = projections.get_projection_status().active
    if active is not None and not active.bodies.topics:
        session.out.note(
            'Only headers were searched: bodies are not indexed. To index them, set bodies = ["*"] '
            "or topics under [search], and run postroom views rebuild."
        )


def _note_lag(session: Session, projections: "Projections") -> None:
    lags = projections.get_projection_status().lags
    if any(not each.is_same_log for each in lags):
        session.out.note(
            "The read models are of a log that was replaced or cut since; run postroom views rebuild."
        )
    lag = sum(each.lag for each in lags)
    if lag:
        session.out.note(
            f"The read models are {pluralize(lag, 'log record')} behind; run postroom views follow --once."
        )


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
    cursor: Cursor = None,
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
        session.out.note_more(page.next_cursor)
    return None if page.items else NOTHING


def _start(at: int, period: str) -> str:
    start = datetime.fromtimestamp(at // 1_000_000, UTC)
    return f"{start:%Y-%m-%d}" if period == "day" else f"{start:%Y-%m-%dT%H:%MZ}"


@takes_filter
def export(
    session: Session,
    criteria: "EventFilter",
    format_: Annotated[str, Argument(metavar="parquet|csv|json", help="File format.")],
    file: Annotated[str, Argument(metavar="FILE", help="Target file; its folder is created if missing.")],
    envelope: Annotated[bool, Option("--envelope/--no-envelope", help="Include the envelopes.")] = True,
    payload: Annotated[bool, Option("--payload", help="Include payloads that are not encrypted.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an export of the same format.")] = False,
) -> int | None:
    """Export the messages that a search finds, as of the read models.

    The file appears only when it is complete; a failure leaves it as it was.
    """
    from postroom.adapters.compose.export import Format, export_messages

    if format_ not in get_args(Format):
        raise WrongUsage(f"Unknown format {format_!r}; expected one of {', '.join(get_args(Format))}.")
    start = time.monotonic()

    def rate(messages: int) -> float:
        return messages / max(time.monotonic() - start, 0.001)

    with session.out.progress(f"Exporting to {file}") as advance:
        source, size = export_messages(
            session.existing_store(),
            criteria,
            cast("Format", format_),
            file,
            envelope=envelope,
            payload=payload,
            overwrite=overwrite,
            progress=lambda done: advance(done, f"{done:,} messages, {rate(done):,.0f}/s"),
        )
    if session.out.as_json:
        facts = {
            "file": file,
            "format": format_,
            "messages": source.messages,
            "bytes": size,
            "version": source.version,
            "positions": source.positions,
            "filter": source.filter,
            "seconds": round(time.monotonic() - start, 3),
        }
        session.out.json(facts)
    else:
        session.out.line(
            f"{pluralize(source.messages, 'message')} ({pluralize(size, 'byte')}) in {file}, "
            f"of version {source.version} of the read models; {rate(source.messages):,.0f} messages/s"
        )
    return None if source.messages else NOTHING
