"""`postroom audit`: who searched and who read payloads, and whether that log is intact."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typer import Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import parse_time
from postroom.adapters.cli.verification import Expect, parse_expectation, show_verifications

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postroom.application.access.audit import AuditEntry

TARGET_CHARS = 36
"""Width of the column of message ids and topics: that of a UUID."""


def audit(
    session: Session,
    since: Annotated[
        str | None,
        Option(metavar="TIME", help="At or after: RFC 3339, ms since 1970, or an age such as 2h."),
    ] = None,
    until: Annotated[str | None, Option(metavar="TIME", help="Before, in the same format.")] = None,
    principal: Annotated[str | None, Option(help="Only of this principal.")] = None,
    capability: Annotated[
        str | None, Option(metavar="NONCE", help="Only by tokens of this capability.")
    ] = None,
    operation: Annotated[str | None, Option(help="Only this operation, such as read-payload.")] = None,
    outcome: Annotated[
        str | None,
        Option(help="Only this outcome: allowed, cancelled, or an error code such as E_CAP_SCOPE."),
    ] = None,
    topic: Annotated[
        str | None, Option(help="Only accesses to this topic, or to topics of a glob such as orders.*.")
    ] = None,
    id_: Annotated[str | None, Option("--id", help="Only accesses to this message.")] = None,
    limit: Annotated[int, Option(help="Entries per page, up to 1000.")] = 100,
    cursor: Annotated[int | None, Option(help="Continue after the page that printed this cursor.")] = None,
) -> None:
    """List searches and payload reads over network surfaces, newest first, with principal and outcome."""
    from postroom.adapters.compose.audit import read_audit_log
    from postroom.application.access.read_audit import AuditFilter, AuditPage

    now = datetime.now(UTC)
    criteria = AuditFilter(
        since=None if since is None else parse_time(since, now) * 1_000,
        until=None if until is None else parse_time(until, now) * 1_000,
        principal=principal,
        capability=capability,
        operation=operation,
        outcome=outcome,
        topic=topic,
        target=id_,
    )
    with read_audit_log(session.existing_store()) as log:
        page = AuditPage(()) if log is None else log.read(criteria, limit=limit, cursor=cursor)
    if session.out.as_json:
        session.out.json({"entries": [*map(_as_json, page.entries)], "next_cursor": page.next_cursor})
        return
    _show_table(session, page.entries)
    if page.next_cursor is not None:
        session.out.note(f"There are more; continue with --cursor {page.next_cursor}.")


def verify(session: Session, expect: Expect = None) -> None:
    """Recompute the hashes of the audit log, and report the range that is intact."""
    from postroom.adapters.compose.audit import read_audit_log

    expected_last, expected_chain = parse_expectation(expect)
    with read_audit_log(session.existing_store()) as log, session.out.progress("Verifying") as advance:
        verification = (
            None
            if log is None
            else log.verify(
                expected_last=expected_last,
                expected_chain=expected_chain,
                progress=lambda position: advance(position, f"position {position:,}"),
            )
        )
    if session.out.as_json:
        session.out.json({"log": verification})
    elif verification is None:
        session.out.line("Nothing was audited yet.")
    else:
        show_verifications(session, [verification])


def _show_table(session: Session, entries: "Sequence[AuditEntry]") -> None:
    from postroom.adapters.cli.tables import Id, Time

    session.out.table(
        ("age", "principal", "operation", "of", "matches", "outcome", "mailbox", "criteria", "capability"),
        [
            (
                Time(each.at),
                each.principal,
                Id(each.operation),
                Id(_target(each, full=session.out.wide)),
                each.matches,
                Id(each.outcome),
                each.mailbox,
                ", ".join(each.criteria),
                each.capability,
            )
            for each in entries
        ],
        only_wide=("matches", "mailbox", "criteria", "capability"),
    )


def _target(entry: "AuditEntry", *, full: bool) -> str:
    text = entry.target or ", ".join(entry.topics) or "all topics"
    return text if full or len(text) <= TARGET_CHARS else f"{text[: TARGET_CHARS - 1]}…"


def _as_json(entry: "AuditEntry") -> dict[str, Any]:
    from postroom.adapters.cli.tables import Time

    facts: dict[str, Any] = msgspec.to_builtins(entry)
    return facts | {"at": str(Time(entry.at))}
