"""Target: events of the log of leases, which other clients of its database or stream may have written.

The first byte of an input chooses the type and the aggregate; the rest is the state.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from eventsourcing.persistence import StoredEvent

from postroom.adapters.memory.lease_store import MemoryLeaseStore
from postroom.application.leases.lease_events import LeaseMapper
from postroom.application.leases.lease_table import LeaseTable
from postroom.application.leases.leases import Leases, LoggedEvent, fold
from postroom.domain.errors import BrokenLog
from postroom.domain.lease.lease import AcquireLease, ExpireLease, ReleaseLease, RenewLease
from postroom.domain.lease.routing import AssignPartitions, ExpireProxy, LeaveProxy, RegisterProxy
from tests.fuzz.target import Check


def _history() -> list[StoredEvent]:
    store = MemoryLeaseStore()
    leases = Leases(store.recorder, lambda: 1_700_000_000_000_000)
    acquire = AcquireLease("ö@p", "r", "p", "h:1", "018f0000-0000-7000-8000-000000000001", 0, 1_000, 50)
    leases.acquire(acquire)
    leases.renew(RenewLease("ö@p", "r", 1))
    leases.release(ReleaseLease("ö@p", "r", 1))
    leases.acquire(AcquireLease("ö@p", "s", "p", "unix:/s", "018f0000-0000-7000-8000-000000000002", 7, 9, 9))
    leases.expire(ExpireLease("ö@p", 4))
    for command in (RegisterProxy("p", "h:1", 9), RegisterProxy("p", "h:1", 9)):
        leases.register_proxy(command)
    leases.leave_proxy(LeaveProxy("p"))
    leases.register_proxy(RegisterProxy("p", "h:1", 9))
    leases.expire_proxy(ExpireProxy("p", 4))
    leases.assign_partitions(AssignPartitions(("p", "q"), 9))
    return [
        StoredEvent(each.originator_id, each.originator_version, each.topic, each.state)
        for each in store.recorder.select_notifications(None, 100)
    ]


_HISTORY = _history()
SEEDS = [bytes([index]) + event.state for index, event in enumerate(_HISTORY)] + [
    b"\x00" + _HISTORY[0].state.replace(b'"ttl_ms":1000', b'"ttl_ms":1e99'),
    b"\x00" + _HISTORY[0].state.replace(b'"epoch":1', b'"epoch":-1'),
    b"\x0a{}",
]
BOMBS = [
    bytes([index]) + bomb
    for index in (0, 10)
    for bomb in (b"[" * 100_000, b'{"a":' * 100_000, b'{"at":' + b"9" * 100_000 + b"}")
]


@contextmanager
def opened() -> Iterator[Check]:
    """Yield the check."""
    yield check


def check(data: bytes) -> None:
    """Check that an event is read as it was written, and folded, or refused as damage of the log."""
    if not data:
        return
    template = _HISTORY[data[0] % len(_HISTORY)]
    mapper = LeaseMapper()
    stored = StoredEvent(template.originator_id, template.originator_version, template.topic, data[1:])
    try:
        change = mapper.to_domain_event(stored)
    except BrokenLog:
        return
    assert mapper.to_domain_event(mapper.to_stored_event(change)).event == change.event
    logged = [LoggedEvent(1, change.event)]
    LeaseTable(lambda: 0).apply(logged)
    fold(logged)
    assert isinstance(change.originator_id, UUID)
