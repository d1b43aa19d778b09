"""`Leases` and `LeaseTable` over the memory store."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import pytest
from eventsourcing.persistence import IntegrityError, OperationalError, StoredEvent
from msgspec.structs import replace

from postroom.adapters.memory.lease_store import MemoryLeaseRecorder
from postroom.application.leases.lease_table import LeaseTable, RouteRemoval
from postroom.application.leases.leases import Leases
from postroom.domain.errors import BrokenLog, InvalidRequest, LeaseHeld, LeaseLost, Unavailable
from postroom.domain.lease.lease import AcquireLease, ExpireLease, ReleaseLease, RenewLease
from postroom.domain.lease.partitions import partition_of
from postroom.domain.lease.routing import AssignPartitions, ExpireProxy, LeaveProxy, RegisterProxy, Route
from postroom.domain.names import lease_stream
from tests.support.clocks import ManualClock

MAILBOX = "orders@proxy-1"
UUID_1, UUID_2 = "018f0000-0000-7000-8000-000000000001", "018f0000-0000-7000-8000-000000000002"
ACQUIRE = AcquireLease(MAILBOX, "runner-1", "proxy-1", "10.0.0.1:7070", UUID_1, 0, 10_000, 1_000)
OTHER = replace(ACQUIRE, runner="runner-2", acquisition=UUID_2, log_epoch=1)


class Admin:
    """An admin's view of a store, with a clock of its own."""

    def __init__(self, recorder: MemoryLeaseRecorder) -> None:
        self.clock = ManualClock()
        self.table = LeaseTable(self.clock.uptime)
        self.leases = Leases(recorder, self.clock.wall, self.table.is_expired)

    def follow(self) -> list[Route | RouteRemoval]:
        return self.table.apply(self.leases.read_events(self.table.position))


class FaultyRecorder(MemoryLeaseRecorder):
    """A recorder whose inserts fail as told: `lost` before, `unknown` after they took effect."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.interlude: Callable[[], object] | None = None

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int]:
        interlude, self.interlude = self.interlude, None
        if interlude is not None:
            interlude()
        fault = self.faults.pop() if self.faults else ""
        if fault == "lost":
            raise OperationalError("the connection was lost")
        positions = super().insert_events(stored_events)
        if fault == "unknown":
            raise OperationalError("the connection was lost")
        return positions


@pytest.fixture
def recorder() -> FaultyRecorder:
    return FaultyRecorder()


@pytest.fixture
def leases(recorder: FaultyRecorder) -> Leases:
    return Leases(recorder, lambda: 1_000)


def types(recorder: MemoryLeaseRecorder) -> list[str]:
    return [each.topic for each in recorder.select_notifications(None, 1_000)]


def test_a_lease_is_acquired_renewed_and_released(leases: Leases) -> None:
    assert leases.lease(MAILBOX) is None
    lease = leases.acquire(ACQUIRE)
    assert (lease.runner, lease.epoch, lease.is_held, lease.version) == ("runner-1", 1, True, 1)
    assert leases.renew(RenewLease(MAILBOX, "runner-1", 1)).version == 2
    assert not leases.release(ReleaseLease(MAILBOX, "runner-1", 1)).is_held
    assert leases.acquire(OTHER).epoch == 2
    with pytest.raises(LeaseHeld, match="runner-2"):
        leases.acquire(replace(ACQUIRE, acquisition="018f0000-0000-7000-8000-000000000003"))
    with pytest.raises(LeaseLost, match="owned by runner-2"):
        leases.renew(RenewLease(MAILBOX, "runner-1", 1))


def test_of_many_runners_that_acquire_a_mailbox_at_once_one_wins(
    recorder: MemoryLeaseRecorder, leases: Leases
) -> None:
    def acquire(number: int) -> str:
        try:
            command = replace(
                ACQUIRE, runner=f"r{number}", acquisition=f"018f0000-0000-7000-8000-{number:012}"
            )
            return leases.acquire(command).runner
        except LeaseHeld as refusal:
            return refusal.runner

    with ThreadPoolExecutor(16) as pool:
        owners = {*pool.map(acquire, range(50))}
    assert len(owners) == 1
    assert types(recorder) == ["LeaseAcquired.1"]


@pytest.mark.parametrize("faults", [["unknown"], ["lost"], ["unknown", "lost"]], ids=" ".join)
def test_an_unknown_outcome_is_read_back_before_it_is_believed(
    recorder: FaultyRecorder, leases: Leases, faults: list[str]
) -> None:
    recorder.faults = [*faults]
    lease = leases.acquire(ACQUIRE)
    assert (lease.epoch, lease.is_held) == (1, True)
    assert leases.lease(MAILBOX) == lease
    recorder.faults = [*faults]
    assert not leases.release(ReleaseLease(MAILBOX, "runner-1", 1)).is_held
    assert types(recorder).count("LeaseAcquired.1") == types(recorder).count("LeaseReleased.1") == 1


def test_a_store_that_stays_down_is_reported_as_unavailable(recorder: FaultyRecorder, leases: Leases) -> None:
    recorder.faults = ["lost"] * 100
    with pytest.raises(Unavailable, match="The log of leases can't be used: the connection was lost"):
        leases.acquire(ACQUIRE)
    assert types(recorder) == []


def test_a_command_is_decided_again_after_another_process_won(
    recorder: FaultyRecorder, leases: Leases
) -> None:
    recorder.interlude = lambda: leases.acquire(OTHER)
    with pytest.raises(LeaseHeld, match="runner-2"):
        leases.acquire(ACQUIRE)
    lease = leases.lease(MAILBOX)
    assert lease is not None
    recorder.interlude = lambda: leases.renew(RenewLease(MAILBOX, "runner-2"))
    leases.expire(ExpireLease(MAILBOX, lease.version))
    assert types(recorder) == ["LeaseAcquired.1", "LeaseRenewed.1"]


def test_a_store_that_always_conflicts_ends_the_attempts(recorder: FaultyRecorder, leases: Leases) -> None:
    def insert(stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int]:
        raise IntegrityError("conflict")

    recorder.insert_events = insert  # type: ignore[method-assign] # a store that is broken in this way
    with pytest.raises(Unavailable, match="conflict"):
        leases.acquire(ACQUIRE)


def test_malformed_arguments_change_nothing(recorder: MemoryLeaseRecorder, leases: Leases) -> None:
    with pytest.raises(InvalidRequest):
        leases.acquire(replace(ACQUIRE, mailbox="orders"))
    with pytest.raises(InvalidRequest):
        leases.lease("orders")
    with pytest.raises(InvalidRequest):
        leases.leave_proxy(LeaveProxy("a b"))
    assert types(recorder) == []


@pytest.mark.parametrize(
    ("topic", "state"),
    [
        ("LeaseAcquired.99", b"{}"),
        ("LeaseRenewed.1", b"{}"),
        ("LeaseRenewed.1", b"\xff"),
        ("ProxyLeft.1", b'{"at": "now"}'),
        ("PartitionsAssigned.1", b"[]"),
        ("PartitionsAssigned.1", b'{"at": 1, "owners": ["a"], "position": 1}'),
        ("LeaseRenewed.1", b'{"at": 1e400}'),
    ],
)
def test_an_event_that_cannot_be_read_is_named(
    recorder: MemoryLeaseRecorder, leases: Leases, topic: str, state: bytes
) -> None:
    id_ = UUID(bytes=lease_stream(MAILBOX))
    recorder.insert_events([StoredEvent(id_, 7, topic, state)])
    with pytest.raises(BrokenLog, match=f"Aggregate {id_} .*{topic}.* at version 7"):
        leases.read_events(0)
    with pytest.raises(BrokenLog):
        leases.acquire(ACQUIRE)


def test_an_event_of_another_aggregate_or_partition_is_refused(
    recorder: MemoryLeaseRecorder, leases: Leases
) -> None:
    leases.acquire(ACQUIRE)
    (event,) = recorder.select_notifications(None, 1)
    partition = f'"partition":{partition_of(MAILBOX)}'.encode()
    assert partition in event.state
    for id_, state in (
        (uuid4(), event.state),
        (event.originator_id, event.state.replace(partition, b'"partition":999')),
        (event.originator_id, event.state.replace(b'"epoch":1', b'"epoch":0')),
        (event.originator_id, event.state.replace(b"10.0.0.1:7070", b"nowhere")),
    ):
        broken = MemoryLeaseRecorder()
        broken.insert_events([StoredEvent(id_, 1, "LeaseAcquired.1", state)])
        with pytest.raises(BrokenLog, match="can't be read"):
            Leases(broken, lambda: 0).read_events(0)


def test_a_log_that_was_replaced_by_an_older_one_is_not_followed(leases: Leases) -> None:
    leases.acquire(ACQUIRE)
    assert leases.read_events(1) == []
    with pytest.raises(Unavailable, match="ends at position 1, though this process has read it up to 2"):
        leases.read_events(2)


# -- the table ---


def test_admins_that_follow_one_log_have_the_same_table(recorder: MemoryLeaseRecorder) -> None:
    one, two = Admin(recorder), Admin(recorder)
    one.leases.acquire(ACQUIRE)
    route = Route(MAILBOX, "proxy-1", "runner-1", "10.0.0.1:7070", 175, 1, 1)
    (changed,) = one.follow()
    assert changed == replace(route, partition=one.table.leases()[0].partition)
    one.leases.renew(RenewLease(MAILBOX, "runner-1", 1))
    assert one.follow() == []
    two.leases.release(ReleaseLease(MAILBOX, "runner-1", 1))
    assert one.follow() == [RouteRemoval(MAILBOX, 3)]
    assert two.follow() == [changed, RouteRemoval(MAILBOX, 3)]
    assert one.table.routes.position == two.table.routes.position == 3
    two.leases.acquire(OTHER)
    assert one.follow() == two.follow()
    assert one.table.leases() == two.table.leases()
    assert one.table.routes.routes() == two.table.routes.routes() != []
    assert one.table.routes.position == two.table.routes.position == one.table.position == 4


def test_an_admin_that_starts_after_old_events_were_removed_has_the_same_table(
    recorder: MemoryLeaseRecorder,
) -> None:
    one = Admin(recorder)
    one.leases.acquire(ACQUIRE)
    one.leases.register_proxy(RegisterProxy("proxy-1", "h:1", 5_000))
    one.leases.assign_partitions(AssignPartitions(("proxy-1",), 2))
    for _ in range(5):
        one.leases.renew(RenewLease(MAILBOX, "runner-1", 1))
        one.leases.register_proxy(RegisterProxy("proxy-1", "h:1", 5_000))
    one.follow()
    assert recorder.remove_old_events() == 8
    two = Admin(recorder)
    two.follow()
    assert two.table.leases() == one.table.leases()
    assert two.table.routes.routes() == one.table.routes.routes()
    assert two.table.proxies() == one.table.proxies()
    assert two.table.partitions == one.table.partitions
    assert two.table.position == one.table.position == 13
    assert two.leases.renew(RenewLease(MAILBOX, "runner-1", 1)).version == 7


def test_a_lease_expires_when_an_admin_saw_no_renewal_for_its_ttl_and_grace_period(
    recorder: MemoryLeaseRecorder,
) -> None:
    one, two = Admin(recorder), Admin(recorder)
    two.clock.uptime_us = 5
    one.leases.acquire(ACQUIRE)
    for admin in (one, two):
        admin.follow()
        admin.clock.advance(10_999)
        assert admin.table.expired_leases() == []
        assert admin.table.remaining_ms(admin.table.leases()[0]) == -999
        admin.clock.advance(1)
    (lease,) = one.table.expired_leases()
    with pytest.raises(LeaseLost, match="beyond its grace period"):
        one.leases.renew(RenewLease(MAILBOX, "runner-1", 1))
    # An admin that only starts now knows nothing of the time before.
    assert Admin(recorder).leases.renew(RenewLease(MAILBOX, "runner-1", 1)).is_held
    unexpired = one.leases.expire(ExpireLease(MAILBOX, lease.version))
    assert unexpired is not None
    assert unexpired.is_held
    assert two.leases.renew(RenewLease(MAILBOX, "runner-1", 1)).version == 3


def test_an_admin_that_was_paused_expires_nothing_that_was_renewed_meanwhile(
    recorder: MemoryLeaseRecorder,
) -> None:
    one, paused = Admin(recorder), Admin(recorder)
    one.leases.acquire(ACQUIRE)
    paused.follow()
    one.leases.renew(RenewLease(MAILBOX, "runner-1", 1))
    paused.clock.advance(60_000)
    (lease,) = paused.table.expired_leases()
    paused.leases.expire(ExpireLease(MAILBOX, lease.version))
    with pytest.raises(LeaseHeld):
        paused.leases.acquire(OTHER)
    paused.follow()
    assert paused.table.expired_leases() == []


def test_an_expired_lease_is_acquired_by_another_runner(recorder: MemoryLeaseRecorder) -> None:
    admin = Admin(recorder)
    admin.leases.acquire(ACQUIRE)
    admin.follow()
    admin.clock.advance(11_000)
    assert admin.leases.acquire(OTHER).epoch == 2
    assert types(recorder) == ["LeaseAcquired.1", "LeaseExpired.1", "LeaseAcquired.1"]
    changes = admin.follow()
    assert [type(each) for each in changes] == [RouteRemoval, Route]
    assert admin.table.expired_leases() == []


def test_proxies_join_leave_and_expire_and_their_partitions_follow(recorder: MemoryLeaseRecorder) -> None:
    admin, other = Admin(recorder), Admin(recorder)
    assert admin.table.assignment() is None
    for name in ("b", "a"):
        admin.leases.register_proxy(RegisterProxy(name, f"{name}:1", 5_000))
    admin.follow()
    command = admin.table.assignment()
    assert command == AssignPartitions(("a", "b"), 2)
    admin.leases.assign_partitions(command)
    other.leases.assign_partitions(command)
    admin.follow()
    assert admin.table.assignment() is None
    assert admin.table.partitions.ranges("b") == [(128, 255)]
    admin.clock.advance(4_999)
    admin.leases.register_proxy(RegisterProxy("a", "a:1", 5_000))
    admin.follow()
    admin.clock.advance(1)
    (expired,) = admin.table.expired_proxies()
    assert expired.proxy == "b"
    admin.leases.expire_proxy(ExpireProxy("b", expired.version))
    admin.follow()
    assert [each.proxy for each in admin.table.proxies()] == ["a"]
    command = admin.table.assignment()
    assert command is not None
    admin.leases.assign_partitions(command)
    assert admin.leases.leave_proxy(LeaveProxy("a")) is not None
    assert admin.leases.leave_proxy(LeaveProxy("nobody")) is None
    admin.follow()
    other.follow()
    assert admin.table.partitions.proxies == ["a"]
    assert admin.table.assignment() == other.table.assignment() == AssignPartitions((), 7)
    assert other.table.partitions == admin.table.partitions


def test_events_that_were_applied_are_skipped(recorder: MemoryLeaseRecorder) -> None:
    admin = Admin(recorder)
    admin.leases.acquire(ACQUIRE)
    admin.leases.release(ReleaseLease(MAILBOX, "runner-1", 1))
    events = admin.leases.read_events(0)
    assert len(admin.table.apply(events)) == 2
    assert admin.table.apply(events[:1]) == []
    assert not admin.table.leases()[0].is_held
