"""`postroom search`, `stats` and `project`: the read models that Spark builds from the logs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typer import Option

from postroom.adapters.cli.failures import NOTHING
from postroom.adapters.cli.filters import takes_filter
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings
from postroom.adapters.cli.values import WrongUsage

if TYPE_CHECKING:
    from postroom.adapters.compose import Projections
    from postroom.application.ports.read_models import Version
    from postroom.domain.search import BodyRules, EventFilter, FoundMessage


class SearchSettings(msgspec.Struct, frozen=True):
    """Say whose bodies are searched for words: topics, or globs such as `github.*`; nobody's by default."""

    bodies: tuple[str, ...] = ()


MAX_PARKED = 10_000
"""Parked records that are listed at most."""
SHOWN_PARKED = 5


@takes_filter
def search(
    session: Session,
    wanted: "EventFilter",
    order: Annotated[str, Option(metavar="newest|oldest", help="Which end to start from.")] = "newest",
    limit: Annotated[int, Option(help="Messages a page, up to 1000.")] = 100,
    cursor: Annotated[str | None, Option(help="Go on after the page that printed this.")] = None,
    every: Annotated[bool, Option("--all", help="All pages, not only one.")] = False,
    envelope: Annotated[bool, Option("--envelope", help="With --json, add the envelope in base64.")] = False,
) -> int | None:
    """Search all messages there ever were, as of the last `postroom project rebuild`.

    By their headers and, with --match, by the words of the bodies that the settings opted in.
    With --json it prints a JSON object a line.
    """
    from postroom.domain.search import Order

    if order not in list(Order):
        raise WrongUsage(f"--order {order!r} must be one of {', '.join(Order)}.")
    wanted = msgspec.structs.replace(wanted, order=Order(order), limit=limit, cursor=cursor)
    with _projections(session) as projections:
        found = _show_pages(session, projections, wanted, every, envelope)
        if not session.out.as_json:
            _note_lag(session, projections)
    return None if found else NOTHING


def stats(session: Session) -> None:
    """Sum up the archive as of the last rebuild: messages, bytes, first and last publish time."""
    with _projections(session) as projections:
        totals = projections.get_table_stats()
    if session.out.as_json:
        session.out.json(totals)
        return
    session.out.facts(
        [
            ("messages", totals.total_events),
            ("bytes on disk", totals.total_size_bytes),
            ("oldest", _time(totals.oldest_event)),
            ("newest", _time(totals.newest_event)),
        ]
    )


def project_status(
    session: Session,
    parked: Annotated[
        bool, Option("--parked", help="List all log records that could not be folded, not only the first.")
    ] = False,
) -> None:
    """Show which version of the read models is served, how far behind it is, and what had to be left out."""
    with _projections(session) as projections:
        status = projections.get_projection_status(MAX_PARKED if parked else SHOWN_PARKED)
    if session.out.as_json:
        session.out.json(status)
        return
    session.out.table(
        ("mailbox", "read up to", "log ends at", "behind", "for"),
        [
            (lag.mailbox, lag.position, lag.head, lag.lag, f"{lag.seconds:.1f} s" if lag.lag else None)
            for lag in status.lags
        ],
    )
    if status.active is not None:
        session.out.line("followed: " + ("yes" if status.is_following else "no"))
    if status.parked:
        session.out.line(f"parked: {status.parked:,} log records could not be folded and were left out")
        session.out.table(
            ("mailbox", "position", "event", "error"),
            [(each.mailbox, each.position, each.type, each.error) for each in status.parked_records],
        )
    session.out.table(
        ("version", "status", "built", "messages", "seconds", "error"),
        [
            (
                each.version,
                each.status,
                _finished(each),
                each.counts.get("mailbox"),
                round(sum(each.seconds.values()), 1),
                each.error,
            )
            for each in status.versions
        ],
    )
    if status.active is None:
        session.out.note("Nothing was built yet; run: postroom project rebuild")


def body_rules(session: Session) -> "BodyRules":
    """Return whose bodies the settings opt in; raise InvalidSettings for what is no topic or glob."""
    from postroom.domain.search import BodyRules

    topics = session.settings.section("search", SearchSettings).bodies
    if "" in topics:
        raise InvalidSettings(f"[search] in {session.settings.file}: one of the bodies is an empty topic.")
    return BodyRules(topics)


@contextmanager
def _projections(session: Session) -> Iterator["Projections"]:
    from postroom.adapters.compose import read_projections

    with read_projections(session.existing_store()) as projections:
        yield projections


def _show_pages(
    session: Session, projections: "Projections", wanted: "EventFilter", every: bool, envelope: bool
) -> int:
    found = 0
    while True:
        page = projections.search_messages(wanted)
        found += len(page.items)
        if session.out.as_json:
            for item in page.items:
                session.out.json(as_json(item, envelope))
        elif page.items:
            session.out.table(
                ("published", "topic", "principal", "status", "attempts", "message"),
                [
                    (
                        _time(m.timestamp),
                        m.topic,
                        m.principal,
                        m.status.name.lower(),
                        m.attempts,
                        m.message_id,
                    )
                    for m in page.items
                ],
            )
        if page.next_cursor is None or not every:
            break
        wanted = msgspec.structs.replace(wanted, cursor=page.next_cursor, offset=0)
    _tell_end(session, found, page.next_cursor)
    return found


def _tell_end(session: Session, found: int, next_cursor: str | None) -> None:
    if next_cursor is not None and session.out.as_json:
        sys.stderr.write(msgspec.json.encode({"next_cursor": next_cursor}).decode() + "\n")
    session.out.note(f"{found:,} found" + (f"; more with --cursor {next_cursor}" if next_cursor else ""))


def _note_lag(session: Session, projections: "Projections") -> None:
    behind = sum(lag.lag for lag in projections.get_projection_status().lags)
    if behind:
        session.out.note(
            f"The read models are {behind:,} log records behind; postroom project follow catches up."
        )


def as_json(found: "FoundMessage", envelope: bool) -> dict[str, Any]:
    """Return a found message as JSON; its envelope, without the auth token, only where asked for."""
    facts: dict[str, Any] = msgspec.structs.asdict(found)
    blob = facts.pop("envelope_blob")
    facts["status"] = found.status.name.lower()
    if envelope:
        from postroom.domain.envelope.build import without_auth_token

        facts["envelope_b64"] = without_auth_token(blob)
    return facts


def _time(ms: int | None) -> str | None:
    if ms is None:
        return None
    return datetime.fromtimestamp(ms / 1_000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _finished(version: "Version") -> str | None:
    return None if version.finished_at is None else _time(version.finished_at // 1_000)
