"""What every audit log promises: an adapter's test class inherits the suite and brings `open_log`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from postroom.application.access.audit import AuditEntry
from postroom.application.access.audit_log import AuditFilter, ReadAudit, StoredAuditLog, verify_audit
from postroom.application.ports.event_log import EventLog
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.support.clocks import ManualClock

OpenLog = Callable[[], EventLog]
"""Opens the event log of the audit log: each call for another process."""
DAY_MS = 86_400_000


def entry(number: int = 1, **fields: object) -> AuditEntry:
    """Return an entry whose target tells it from others."""
    values: dict[str, object] = {
        "at": 0,
        "principal": "ada",
        "capability": "00" * 16,
        "operation": "read-headers",
        "mailbox": "acme@one",
        "topics": ("orders",),
        "target": f"m-{number}",
        "matches": 1,
        "outcome": "allowed",
        "corr_id": "c",
        "criteria": ("match",),
    }
    return AuditEntry(**(values | fields))  # type: ignore[arg-type]


def targets(read: ReadAudit, filter_: AuditFilter | None = None, **options: Any) -> list[str]:
    """Return the targets of a page of entries."""
    return [each.target for each in read(filter_, **options).items]


class AuditLogConformance:
    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def log(self, open_log: OpenLog) -> EventLog:
        return open_log()

    @pytest.fixture
    async def audit(self, log: EventLog, clock: ManualClock) -> AsyncIterator[StoredAuditLog]:
        audit = StoredAuditLog(log, clock, retention_ms=90 * DAY_MS)
        yield audit
        await audit.close()

    @pytest.fixture
    def read(self, log: EventLog) -> ReadAudit:
        return ReadAudit(log)

    async def test_an_entry_is_read_as_it_was_recorded_with_the_time_of_the_record(
        self, audit: StoredAuditLog, read: ReadAudit, clock: ManualClock
    ) -> None:
        await audit.record([entry(1, topics=("a", "ü*"), matches=7)])
        (found,) = read().items
        assert found == entry(1, at=clock.wall(), topics=("a", "ü*"), matches=7)

    async def test_nothing_is_recorded_for_no_entries(self, audit: StoredAuditLog, log: EventLog) -> None:
        await audit.record([])
        assert log.head() is None
        assert ReadAudit(log)().items == ()

    async def test_entries_are_read_newest_first_and_page_by_page(
        self, audit: StoredAuditLog, read: ReadAudit
    ) -> None:
        await audit.record([entry(number) for number in range(1, 6)])
        first = read(limit=2)
        assert [each.target for each in first.items] == ["m-5", "m-4"]
        await audit.record([entry(6)])
        second = read(limit=2, cursor=first.next_cursor)
        assert [each.target for each in second.items] == ["m-3", "m-2"]
        third = read(limit=2, cursor=second.next_cursor)
        assert [each.target for each in third.items] == ["m-1"]
        assert third.next_cursor is None

    async def test_a_page_that_ends_at_the_last_entry_has_no_cursor(
        self, audit: StoredAuditLog, read: ReadAudit
    ) -> None:
        await audit.record([entry(1), entry(2)])
        assert read(limit=2).next_cursor is None

    async def test_a_page_ends_after_a_number_of_reads_and_the_next_goes_on(
        self, audit: StoredAuditLog, read: ReadAudit
    ) -> None:
        await audit.record([entry(number, principal="bob" if number == 2 else "ada") for number in range(6)])
        bob = AuditFilter(principal="bob")
        first = read(bob, reads=3)
        assert (first.items, first.next_cursor) == ((), "4")
        second = read(bob, reads=3, cursor=first.next_cursor)
        assert ([each.target for each in second.items], second.next_cursor) == (["m-2"], None)

    @pytest.mark.parametrize("limit", [0, 1_001])
    async def test_a_limit_out_of_bounds_is_refused(self, read: ReadAudit, limit: int) -> None:
        with pytest.raises(InvalidRequest, match="limit must be at"):
            read(limit=limit)

    async def test_each_criterion_narrows_the_entries(self, audit: StoredAuditLog, read: ReadAudit) -> None:
        await audit.record(
            [
                entry(1),
                entry(2, principal="bob", capability="ff" * 16),
                entry(3, operation="read-payload", topics=("payments.eu",)),
                entry(4, outcome="E_CAP_SCOPE", topics=("pay*",)),
                entry(5, topics=()),
            ]
        )
        assert targets(read, AuditFilter(principal="bob")) == ["m-2"]
        assert targets(read, AuditFilter(capability="ff" * 16)) == ["m-2"]
        assert targets(read, AuditFilter(operation="read-payload")) == ["m-3"]
        assert targets(read, AuditFilter(outcome="E_CAP_SCOPE")) == ["m-4"]
        assert targets(read, AuditFilter(target="m-5")) == ["m-5"]
        # An entry without topics concerns all of them, and one with a glob those that it matches.
        assert targets(read, AuditFilter(topic="payments.eu")) == ["m-5", "m-4", "m-3"]
        assert targets(read, AuditFilter(topic="*.eu")) == ["m-5", "m-3"]

    async def test_entries_are_found_by_their_time(
        self, audit: StoredAuditLog, read: ReadAudit, clock: ManualClock
    ) -> None:
        times = []
        for number in (1, 2, 3):
            times.append(clock.wall())
            await audit.record([entry(number)])
            clock.advance(1_000)
        assert targets(read, AuditFilter(since=times[1])) == ["m-3", "m-2"]
        assert targets(read, AuditFilter(until=times[1])) == ["m-1"]
        assert targets(read, AuditFilter(since=times[1], until=times[2])) == ["m-2"]

    async def test_log_time_does_not_go_back_with_the_clock(
        self, audit: StoredAuditLog, read: ReadAudit, clock: ManualClock
    ) -> None:
        await audit.record([entry(1)])
        before = clock.wall()
        clock.advance(-60_000)
        await audit.record([entry(2)])
        assert [each.at for each in read().items] == [before, before]

    async def test_concurrent_entries_are_all_recorded_in_one_chain(
        self, audit: StoredAuditLog, read: ReadAudit, log: EventLog
    ) -> None:
        await asyncio.gather(*(audit.record([entry(number)]) for number in range(200)))
        assert sorted(targets(read, limit=1_000)) == sorted(f"m-{number}" for number in range(200))
        assert verify_audit(log)().last == 200

    async def test_processes_append_to_one_chain(self, open_log: OpenLog, log: EventLog) -> None:
        audits = [StoredAuditLog(open_log(), ManualClock()) for _ in range(3)]
        await asyncio.gather(
            *(audit.record([entry(10 * n + i)]) for i in range(10) for n, audit in enumerate(audits))
        )
        for audit in audits:
            await audit.close()
        assert sorted(targets(ReadAudit(log))) == sorted(f"m-{number}" for number in range(30))
        assert verify_audit(log)().last == 30

    async def test_a_caller_that_is_cancelled_does_not_stop_the_others(
        self, audit: StoredAuditLog, read: ReadAudit
    ) -> None:
        first = asyncio.create_task(audit.record([entry(1)]))
        second = asyncio.create_task(audit.record([entry(2)]))
        await asyncio.sleep(0)
        first.cancel()
        await second
        assert "m-2" in targets(read)

    async def test_expired_entries_are_removed_and_the_chain_of_the_others_is_verified(
        self, audit: StoredAuditLog, read: ReadAudit, log: EventLog, clock: ManualClock
    ) -> None:
        await audit.record([entry(number) for number in range(5)])
        clock.advance(60 * DAY_MS)
        await audit.record([entry(5)])
        assert await audit.remove_expired() == 0
        clock.advance(40 * DAY_MS)
        assert await audit.remove_expired() == 5
        await audit.record([entry(6)])
        assert targets(read) == ["m-6", "m-5"]
        verification = verify_audit(log)()
        assert (verification.first, verification.last) == (6, 8)
        clock.advance(95 * DAY_MS)
        assert await audit.remove_expired() == 3
        assert targets(read) == []
        assert verify_audit(log)().first == 9

    async def test_a_closed_audit_log_refuses_entries(self, audit: StoredAuditLog) -> None:
        await audit.close()
        with pytest.raises(Unavailable, match="is closed, so the access is refused"):
            await audit.record([entry()])

    async def test_entries_that_wait_are_recorded_before_it_closes(
        self, audit: StoredAuditLog, open_log: OpenLog
    ) -> None:
        waiting = [asyncio.create_task(audit.record([entry(number)])) for number in range(3)]
        await asyncio.sleep(0)
        await audit.close()
        await asyncio.gather(*waiting)
        assert len(ReadAudit(open_log())().items) == 3
