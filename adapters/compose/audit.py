"""Wiring of the audit log of a store."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager

import msgspec

from postroom.adapters.compose.store import MEMORY, Store, open_store
from postroom.adapters.system.clock import SystemClock
from postroom.application.access.audit_log import RETENTION_MS, StoredAuditLog
from postroom.application.access.read_audit import ReadAudit, verify_audit
from postroom.application.anchors import Anchor
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.verify import Verification, VerifyLog
from postroom.application.threads import background_task
from postroom.domain.arguments import check_int
from postroom.domain.errors import NotFound
from postroom.domain.names import AUDIT_LOG, CAPABILITY_LOG

HOUR_MS = 3_600_000
MAX_RETENTION_MS = 10 * 366 * 24 * HOUR_MS
MEMORY_ENTRIES = 10_000
"""Maximum number of entries of an audit log in memory."""


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
        self.log = log
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


def verify_reserved_logs(store: str, anchors: Sequence[Anchor] = ()) -> list[Verification]:
    """Verify the logs of a store that are not those of mailboxes; those that do not exist are skipped.

    Arguments:
        anchors: as of `VerifyLog`.

    Raises: BrokenLog with the first position that fails, Unavailable when the store can't be read.
    """
    verifications = []
    for name, verify in ((AUDIT_LOG, verify_audit), (CAPABILITY_LOG, VerifyLog)):
        with _existing_log(store, name) as log:
            if log is not None:
                verifications.append(verify(log)(anchors=anchors))
    return verifications


@contextmanager
def read_audit_log(store: str) -> Iterator[AuditReader | None]:
    """Query the audit log of a store; yields None while nothing was audited.

    Raises: Unavailable when the store can't be read.
    """
    with _existing_log(store, AUDIT_LOG) as log:
        yield None if log is None else AuditReader(log)


@contextmanager
def _existing_log(store: str, name: str) -> Iterator[EventLogReader | None]:
    try:
        log = open_store(store).existing_log(name)
    except NotFound:
        yield None
        return
    with closing(log):
        yield log
