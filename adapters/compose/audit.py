"""Wiring of the audit log of a store."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager

import msgspec

from postroom.adapters.compose.store import MEMORY, Store, open_store
from postroom.adapters.system.clock import SystemClock
from postroom.application.access.audit_log import RETENTION_MS, StoredAuditLog
from postroom.application.access.read_audit import ReadAudit, verify_audit
from postroom.application.background import background_task
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.verify import VerifyLog
from postroom.domain.arguments import check_int
from postroom.domain.errors import NotFound
from postroom.domain.names import AUDIT_LOG

HOUR_MS = 3_600_000
MAX_RETENTION_MS = 10 * 366 * 24 * HOUR_MS
MEMORY_ENTRIES = 10_000
"""Entries that an audit log in memory holds."""


class AuditSettings(msgspec.Struct, frozen=True):
    """Settings of `[audit]`.

    Arguments:
        retention_ms: age after which audit entries are removed, an hour to 10 years.
    """

    retention_ms: int = RETENTION_MS

    def validate(self) -> "AuditSettings":
        """Return the settings, or raise InvalidRequest."""
        check_int("The audit log's retention_ms", self.retention_ms, HOUR_MS, MAX_RETENTION_MS)
        return self


class AuditReader:
    """The queries on the audit log of a store; any number of readers is allowed."""

    def __init__(self, log: EventLogReader) -> None:
        self.read: ReadAudit = ReadAudit(log)
        self.verify: VerifyLog = verify_audit(log)


@asynccontextmanager
async def open_audit_log(
    store: Store, settings: AuditSettings | None = None
) -> AsyncIterator[StoredAuditLog]:
    """Open the audit log of a store for writing, and remove expired entries, while the context lasts.

    Raises: InvalidRequest for settings out of bounds, Unavailable when the store can't be used.
    """
    retention_ms = (settings or AuditSettings()).validate().retention_ms
    max_entries = MEMORY_ENTRIES if store.identity == MEMORY else None
    log = await asyncio.to_thread(store.event_log, AUDIT_LOG)
    audit = StoredAuditLog(log, SystemClock(), retention_ms=retention_ms, max_entries=max_entries)
    try:
        async with background_task(audit.run()):
            yield audit
    finally:
        await audit.close()


@contextmanager
def read_audit_log(store: str) -> Iterator[AuditReader | None]:
    """Query the audit log of a store; yields None while nothing was audited.

    Raises: Unavailable when the store can't be read.
    """
    with ExitStack() as opened:
        try:
            log = opened.enter_context(closing(open_store(store).existing_log(AUDIT_LOG)))
        except NotFound:
            yield None
        else:
            yield AuditReader(log)
