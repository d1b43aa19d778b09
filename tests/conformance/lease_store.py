"""What every lease store promises: an adapter's test class inherits the suite and brings `open_store`.

Positions need not be contiguous, as a store may count other things, and events may be removed at any time as
long as those remain that `LeaseStore.remove_old_events` names.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from uuid import UUID, uuid4

import pytest
from eventsourcing.persistence import IntegrityError, Notification, StoredEvent
from msgspec.structs import replace

from postroom.application.leases.lease_table import LeaseTable
from postroom.application.leases.leases import Leases
from postroom.application.ports.lease_store import LeaseStore
from postroom.domain.errors import LeaseHeld
from postroom.domain.lease.lease import AcquireLease, ReleaseLease, RenewLease
from postroom.domain.lease.routing import AssignPartitions, RegisterProxy

PATIENT_MS = 60_000
OpenStore = Callable[[], LeaseStore]
ACQUIRE = AcquireLease("orders@p", "runner-1", "p", "10.0.0.1:7070", str(uuid4()), 0, 10_000, 1_000)


def stored(id_: UUID, version: int, topic: str = "LeaseAcquired.1") -> StoredEvent:
    """Return an event whose state is as large as that of a lease, and no text."""
    return StoredEvent(id_, version, topic, f"{version}".encode() + b"\x00\xff" * 200)


def keys(events: list[Notification]) -> list[tuple[UUID | str, int]]:
    return [(event.originator_id, event.originator_version) for event in events]


def everything(store: LeaseStore, after: int = 0) -> list[Notification]:
    """Return all events after a position, page by page."""
    events: list[Notification] = []
    while page := store.recorder.select_notifications(after, 7, inclusive_of_start=False):
        events += page
        after = page[-1].id
    return events


class LeaseStoreConformance:
    @pytest.fixture
    def stores(self, open_store: OpenStore) -> Iterator[OpenStore]:
        """Open the store any number of times, as several admins do; all are closed after the test."""
        with ExitStack() as stack:
            yield lambda: stack.enter_context(closing(open_store()))

    @pytest.fixture
    def store(self, stores: OpenStore) -> LeaseStore:
        return stores()

    def test_an_empty_store_has_no_position(self, store: LeaseStore) -> None:
        assert store.recorder.max_notification_id() is None
        assert everything(store) == []
        assert store.recorder.select_events(uuid4()) == []
        assert store.recorder.insert_events([]) in ([], None)
        assert store.remove_old_events() == 0

    def test_all_admins_see_events_in_the_order_of_their_positions(self, stores: OpenStore) -> None:
        one, two = stores(), stores()
        a, b = uuid4(), uuid4()
        positions = [
            *(one.recorder.insert_events([stored(a, 1), stored(a, 2)]) or ()),
            *(two.recorder.insert_events([stored(b, 1)]) or ()),
            *(one.recorder.insert_events([stored(a, 3)]) or ()),
        ]
        assert positions == sorted({*positions})
        for store in (one, two):
            events = everything(store)
            assert [event.id for event in events] == positions
            assert keys(events) == [(a, 1), (a, 2), (b, 1), (a, 3)]
            assert keys(everything(store, positions[1])) == [(b, 1), (a, 3)]
            assert store.recorder.max_notification_id() == positions[-1]
            assert store.recorder.select_events(a) == [stored(a, 1), stored(a, 2), stored(a, 3)]
            assert store.recorder.select_events(a, desc=True, limit=1) == [stored(a, 3)]
            assert store.recorder.select_events(a, gt=1, lte=2) == [stored(a, 2)]

    def test_of_two_events_of_one_version_the_first_is_stored_and_the_second_refused_with_all_beside_it(
        self, stores: OpenStore
    ) -> None:
        one, two = stores(), stores()
        a = uuid4()
        one.recorder.insert_events([stored(a, 1)])
        with pytest.raises(IntegrityError, match=str(a)):
            two.recorder.insert_events([stored(a, 1, "LeaseExpired.1"), stored(a, 2)])
        assert keys(everything(one)) == [(a, 1)]
        two.recorder.insert_events([stored(a, 2)])
        with pytest.raises(IntegrityError):
            one.recorder.insert_events([stored(a, 2)])

    def test_of_many_writers_that_race_for_a_version_one_wins(self, stores: OpenStore) -> None:
        writers = [stores() for _ in range(4)]
        a = uuid4()

        def insert(number: int) -> int:
            wins = 0
            for version in range(1, 6):
                try:
                    writers[number % 4].recorder.insert_events([stored(a, version, f"Writer{number}")])
                    wins += 1
                except IntegrityError:
                    pass
            return wins

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(insert, range(8))) == len(everything(writers[0]))
        versions = [event.originator_version for event in everything(writers[0])]
        assert versions == sorted({*versions})

    def test_a_reader_that_follows_misses_nothing_while_others_write(self, stores: OpenStore) -> None:
        reader, writers = stores(), [stores() for _ in range(3)]
        ids = [uuid4() for _ in writers]
        done = threading.Event()
        events: list[Notification] = []

        def follow() -> None:
            after = 0
            while True:
                is_last = done.is_set()
                page = reader.recorder.select_notifications(after, 5, inclusive_of_start=False)
                events.extend(page)
                after = page[-1].id if page else after
                if is_last and not page:
                    return

        def write(number: int) -> None:
            for version in range(1, 21):
                writers[number].recorder.insert_events([stored(ids[number], version)])

        with ThreadPoolExecutor(4) as pool:
            following = pool.submit(follow)
            for each in [pool.submit(write, number) for number in range(3)]:
                each.result()
            done.set()
            following.result(PATIENT_MS / 1_000)
        positions = [event.id for event in events]
        assert positions == sorted({*positions})
        assert sorted(keys(events)) == sorted((id_, version) for id_ in ids for version in range(1, 21))

    def test_waiting_ends_at_an_event_of_another_admin_or_at_the_timeout(self, stores: OpenStore) -> None:
        one, two = stores(), stores()
        one.wait(0, 1)
        (first,) = one.recorder.insert_events([stored(uuid4(), 1)]) or ()
        two.wait(first - 1, PATIENT_MS)
        writer = threading.Timer(0.05, lambda: one.recorder.insert_events([stored(uuid4(), 1)]))
        writer.start()
        deadline = time.monotonic() + PATIENT_MS / 1_000
        while two.recorder.max_notification_id() == first and time.monotonic() < deadline:
            two.wait(first, PATIENT_MS)
        writer.join()
        assert (two.recorder.max_notification_id() or 0) > first

    def test_removing_old_events_leaves_what_folds_need_and_refuses_old_versions_still(
        self, stores: OpenStore
    ) -> None:
        one, two = stores(), stores()
        a, b, c = uuid4(), uuid4(), uuid4()
        one.recorder.insert_events([stored(a, 1), stored(b, 1)])
        one.recorder.insert_events([stored(a, n, "LeaseRenewed.1") for n in range(2, 9)])
        one.recorder.insert_events([stored(b, 2, "LeaseReleased.1"), stored(c, 1, "ProxyRenewed.1")])
        last = one.recorder.max_notification_id()
        one.remove_old_events()
        remaining = keys(everything(two))
        assert {(a, 8), (b, 2), (c, 1)} <= {*remaining}
        assert len(remaining) <= 8
        assert one.recorder.select_events(a, desc=True, limit=1) == [stored(a, 8, "LeaseRenewed.1")]
        assert one.recorder.max_notification_id() == last
        with pytest.raises(IntegrityError):
            two.recorder.insert_events([stored(a, 4)])
        two.remove_old_events()
        assert keys(everything(one)) == remaining
        (position,) = two.recorder.insert_events([stored(a, 9)]) or ()
        assert position > (last or 0)

    def test_what_was_stored_is_there_after_the_store_was_closed(
        self, open_store: OpenStore, is_durable: bool
    ) -> None:
        if not is_durable:
            pytest.skip("a store in memory ends with its process")
        a = uuid4()
        with closing(open_store()) as store:
            store.recorder.insert_events([stored(a, 1)])
            before = everything(store)
            store.close()
        with closing(open_store()) as store:
            assert everything(store) == before
            with pytest.raises(IntegrityError):
                store.recorder.insert_events([stored(a, 1)])

    @pytest.fixture
    def is_durable(self) -> bool:
        return True

    # -- leases over it ---

    def test_one_of_many_racing_runners_gets_the_lease(self, stores: OpenStore) -> None:
        admins = [Leases(stores().recorder, lambda: 1_000) for _ in range(3)]

        def acquire(number: int) -> tuple[str, int]:
            command = replace(ACQUIRE, runner=f"r{number}", acquisition=str(uuid4()))
            try:
                lease = admins[number % 3].acquire(command)
            except LeaseHeld as refusal:
                return refusal.runner, 0
            return lease.runner, lease.epoch

        with ThreadPoolExecutor(12) as pool:
            results = [*pool.map(acquire, range(12))]
        assert len({runner for runner, _ in results}) == 1
        assert sorted(epoch for _, epoch in results) == [0] * 11 + [1]

    def test_admins_fold_the_same_table(self, stores: OpenStore) -> None:
        admins = [Leases(stores().recorder, lambda: 1_000) for _ in range(2)]
        admins[0].acquire(ACQUIRE)
        admins[1].register_proxy(RegisterProxy("p", "h:1", 5_000))
        admins[0].assign_partitions(AssignPartitions(("p",), 2))
        for _ in range(4):
            admins[1].renew(RenewLease("orders@p", "runner-1", 1))
        admins[0].acquire(replace(ACQUIRE, mailbox="other@p", acquisition=str(uuid4())))
        admins[1].release(ReleaseLease("other@p", "runner-1", 1))
        tables = [LeaseTable(lambda: 0) for _ in admins]
        for table, admin in zip(tables, admins, strict=True):
            table.apply(admin.read_events(0))
        assert tables[0].leases() == tables[1].leases()
        assert [lease.is_held for lease in tables[0].leases()] == [True, False]
        assert tables[0].routes.routes() == tables[1].routes.routes()
        assert tables[0].partitions == tables[1].partitions
        assert tables[0].partitions.proxies == ["p"]
        assert tables[0].position == tables[1].position

    def test_an_admin_that_starts_after_old_events_were_removed_knows_what_the_others_know(
        self, stores: OpenStore
    ) -> None:
        store = stores()
        leases = Leases(store.recorder, lambda: 1_000)
        leases.acquire(ACQUIRE)
        leases.register_proxy(RegisterProxy("p", "h:1", 5_000))
        leases.assign_partitions(AssignPartitions(("p",), 2))
        for _ in range(10):
            leases.renew(RenewLease("orders@p", "runner-1", 1))
        before, after = LeaseTable(lambda: 0), LeaseTable(lambda: 0)
        before.apply(leases.read_events(0))
        store.remove_old_events()
        after.apply(Leases(stores().recorder, lambda: 1_000).read_events(0))
        assert after.leases() == before.leases()
        assert after.proxies() == before.proxies()
        assert (after.partitions, after.position) == (before.partitions, before.position)
        assert [route.address for route in after.routes.routes()] == ["10.0.0.1:7070"]
        assert leases.release(ReleaseLease("orders@p", "runner-1", 1)).version == 12
