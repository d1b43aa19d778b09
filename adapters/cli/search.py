"""`postroom search` and `stats`: queries on the read models."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typer import Option

from postroom.adapters.cli.exit_codes import NOTHING
from postroom.adapters.cli.filters import From, takes_filter
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage
from postroom.application.pluralize import pluralize

if TYPE_CHECKING:
    from postroom.adapters.compose.queries import Projections
    from postroom.domain.search import EventFilter, FoundMessage


@takes_filter
def search(
    session: Session,
    criteria: "EventFilter",
    order: Annotated[str, Option(metavar="newest|oldest", help="Which messages come first.")] = "newest",
    limit: Annotated[int, Option(help="Messages per page, up to 1000.")] = 100,
    cursor: Annotated[str | None, Option(help="Continue after the page that printed this cursor.")] = None,
    every: Annotated[bool, Option("--all", help="Print all pages.")] = False,
    envelope: Annotated[bool, Option("--envelope", help="With --json, add the envelope in base64.")] = False,
    source: From = None,
) -> int | None:
    """Search all messages by their headers and words, as of the last `postroom project rebuild` or `follow`.

    With --json it prints one JSON object a line.
    """
    from postroom.adapters.compose.queries import read_projections
    from postroom.domain.search import Order

    if order not in list(Order):
        raise WrongUsage(f"Unknown --order {order!r}; expected {' or '.join(Order)}.")
    criteria = msgspec.structs.replace(criteria, order=Order(order), limit=limit, cursor=cursor)
    erasure = session.erasure_settings()
    with read_projections(session.existing_store(), source, erasure=erasure) as projections:
        count = _show_pages(session, projections, criteria, every, envelope)
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
    from postroom.adapters.cli.tables import Time

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
    from postroom.adapters.cli.tables import Id, Time

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
            "or topics under [search], and run postroom project rebuild."
        )


def _note_lag(session: Session, projections: "Projections") -> None:
    lags = projections.get_projection_status().lags
    if any(not each.is_same_log for each in lags):
        session.out.note(
            "The read models are of a log that was replaced or cut since; run postroom project rebuild."
        )
    lag = sum(each.lag for each in lags)
    if lag:
        session.out.note(
            f"The read models are {pluralize(lag, 'log record')} behind; run postroom project follow --once."
        )
