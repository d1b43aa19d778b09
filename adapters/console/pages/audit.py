"""The audit log: searches, reads of payloads and redrive jobs, with their callers."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from postroom.adapters.console.page import NavEntry, Page, route
from postroom.adapters.console.pages.log import RANGE, verify_part
from postroom.adapters.console.values import read_time
from postroom.application.access.audit import AuditEntry
from postroom.application.access.audit_log import AuditFilter, removals
from postroom.application.page import Page as ResultPage
from postroom.application.queries.verify import VerifyRange
from postroom.domain.capability.rights import Right
from postroom.domain.errors import NotFound

ROWS = 100
READS = 10_000
"""Number of entries that are read for one page."""
FIELDS = ("principal", "capability", "operation", "outcome", "topic", "target", "since", "until")


async def show_audit(page: Page) -> Response:
    """Show the entries that match, newest first."""
    fields = {name: page.query.get(name, "").strip() for name in FIELDS}
    criteria = read_filter(fields, datetime.now(UTC))
    cursor = page.query.get("cursor", "").strip() or None
    audit = page.data.audit

    async def read() -> ResultPage[AuditEntry]:
        page.require_all(Right.ADMIN)
        if audit is None:
            return ResultPage(())
        return await page.blocking(audit, criteria, limit=ROWS, cursor=cursor, reads=READS)

    answer = await page.session.audit(
        Right.ADMIN, read, lambda _: 0, criteria=[name for name, value in fields.items() if value]
    )
    return await page.render(
        "audit/entries",
        entries=answer.items,
        older=answer.next_cursor and page.url("/audit", **fields, cursor=answer.next_cursor),
        fields=fields,
        is_empty=audit is None,
        operations=[("", "any"), *((str(each), str(each)) for each in Right)],
    )


async def show_verification(page: Page) -> Response:
    """Verify a part of the audit log, and link to the next."""
    log = page.data.audit_log
    if log is None:
        page.require_all(Right.ADMIN)
        raise NotFound(
            "The store has no audit log yet; it is created by the first search or read of a payload."
        )
    facts = await verify_part(page, log, Right.ADMIN, verify=lambda each: VerifyRange(each, removals))
    template = "log/verify_part" if page.is_fragment else "audit/verify"
    return await page.render(template, failure_url=None, **facts)


def read_filter(fields: Mapping[str, str], now: datetime) -> AuditFilter:
    """Return the filter of the form; raise InvalidRequest for a malformed time."""
    values: dict[str, Any] = {name: value or None for name, value in fields.items()}
    for name in ("since", "until"):
        if values[name] is not None:
            values[name] = read_time(name.capitalize(), values[name], now)
    return AuditFilter(**values)


ROUTES = [
    route("/audit", show_audit, query=(*FIELDS, "cursor")),
    route("/audit/verify", show_verification, query=RANGE),
]
NAV = NavEntry("Audit", "/audit", 80, Right.ADMIN, group="History", key="a", all_topics=True)
