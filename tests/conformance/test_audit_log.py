"""The audit log conformance suite in every kind of store, and what only some of them can promise."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from postroom.adapters.memory.amnesia_log import AmnesiaEventLog
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.postgres.event_log import PostgresEventLog
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.access.audit_log import ReadAudit, StoredAuditLog, verify_audit
from postroom.application.mailbox.codec import compress, decompress
from postroom.application.ports.event_log import EventLog
from postroom.domain.errors import BrokenLog, Unavailable
from postroom.domain.names import AUDIT_LOG
from tests.conformance.audit_log import AuditLogConformance, OpenLog, entry
from tests.support.clocks import ManualClock


class TestMemory(AuditLogConformance):
    @pytest.fixture
    def open_log(self) -> OpenLog:
        log = MemoryEventLog(AUDIT_LOG)
        return lambda: log

    async def test_the_number_of_entries_is_bounded(self, open_log: OpenLog) -> None:
        log = open_log()
        audit = StoredAuditLog(log, ManualClock(), max_entries=100)
        for number in range(300):
            await audit.record([entry(number)])
        entries = ReadAudit(log)(limit=1_000).items
        assert 100 <= len(entries) <= 110
        assert entries[0].target == "m-299"
        assert verify_audit(log)().last >= 300
        await audit.close()


class TestAmnesia(AuditLogConformance):
    @pytest.fixture
    def open_log(self) -> OpenLog:
        log = AmnesiaEventLog(AUDIT_LOG)
        return lambda: log


class TestSqlite(AuditLogConformance):
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "store.db"

    @pytest.fixture
    def open_log(self, path: Path) -> Iterator[OpenLog]:
        with ExitStack() as opened:
            yield lambda: opened.enter_context(closing(SqliteEventLog(path, AUDIT_LOG)))

    async def test_an_access_is_refused_when_it_can_not_be_recorded(
        self, audit: StoredAuditLog, path: Path
    ) -> None:
        await audit.record([entry(1)])
        await asyncio.to_thread(path.rename, path.with_name("moved.db"))
        with pytest.raises(Unavailable, match="can't be audited, so it is refused"):
            await audit.record([entry(2)])

    async def test_an_altered_entry_is_detected(
        self, audit: StoredAuditLog, log: EventLog, path: Path
    ) -> None:
        for number in (1, 2, 3):
            await audit.record([entry(number)])
        with closing(sqlite3.connect(path)) as connection, connection:
            (events,) = connection.execute("SELECT events FROM log WHERE place & 255 = 2").fetchone()
            altered = compress(decompress(events, 2).replace(b"ada", b"eve"))
            connection.execute("UPDATE log SET events = ? WHERE place & 255 = 2", (altered,))
        with pytest.raises(BrokenLog, match="positions 2 to 2 does not match its hash"):
            verify_audit(log)()

    async def test_a_log_whose_end_was_cut_off_is_detected(
        self, audit: StoredAuditLog, open_log: OpenLog, path: Path
    ) -> None:
        for number in (1, 2, 3):
            await audit.record([entry(number)])
        await audit.close()
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DELETE FROM log WHERE place & 255 = 3")
        with pytest.raises(BrokenLog, match="reached position 3"):
            verify_audit(open_log())()


class TestPostgres(AuditLogConformance):
    @pytest.fixture
    def open_log(self, postgres_store: str) -> Iterator[OpenLog]:
        with ExitStack() as opened:
            yield lambda: opened.enter_context(closing(PostgresEventLog(postgres_store, AUDIT_LOG)))
