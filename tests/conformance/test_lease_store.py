"""The lease store conformance suite on every adapter, and the library's own test cases of recorders."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from eventsourcing.persistence import ApplicationRecorder, OperationalError, ProgrammingError, StoredEvent
from eventsourcing.tests.persistence import (
    ApplicationRecorderTestCase,
    NonInterleavingNotificationIDsBaseCase,
)

from postroom.adapters.compose.control_plane import open_lease_store, open_lease_tables
from postroom.adapters.memory.lease_store import MemoryLeaseStore
from postroom.adapters.postgres.lease_store import PostgresLeaseStore
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.adapters.sqlite.lease_store import SqliteLeaseStore
from postroom.application.leases.leases import Leases
from postroom.application.ports.lease_store import LeaseStore
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.conformance.lease_store import (
    ACQUIRE,
    PATIENT_MS,
    LeaseStoreConformance,
    OpenStore,
    everything,
    keys,
    stored,
)
from tests.support.servers.postgres_proxy import Proxy
from tests.support.waiting import wait_until


class TestMemoryLeaseStore(LeaseStoreConformance):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        store = MemoryLeaseStore()
        return lambda: store

    @pytest.fixture
    def is_durable(self) -> bool:
        return False


class TestSqliteLeaseStore(LeaseStoreConformance):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda: SqliteLeaseStore(tmp_path / "leases.db", durability="relaxed")

    @pytest.mark.skipif(sys.platform != "linux", reason="only there the kernel tells of changes")
    def test_a_wait_looks_into_a_file_that_does_not_change_no_more_than_twice(
        self, stores: OpenStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, positions = stores(), list[int | None]()
        look = store.recorder.max_notification_id

        def count() -> int | None:
            positions.append(look())
            return positions[-1]

        monkeypatch.setattr(store.recorder, "max_notification_id", count)
        store.wait(0, 500)
        assert 1 <= len(positions) <= 2


class TestPostgresLeaseStore(LeaseStoreConformance):
    @pytest.fixture
    def open_store(self, lease_database: str) -> OpenStore:
        return lambda: PostgresLeaseStore(lease_database)


class TestRemovalByTopic:
    """What adapters that choose the events to be removed keep besides the last ones."""

    @pytest.fixture
    def store(self, address: str) -> Iterator[LeaseStore]:
        with closing(open_lease_store(address)) as store:
            yield store

    def test_the_last_event_that_is_no_renewal_remains(self, store: LeaseStore) -> None:
        a, b = uuid4(), uuid4()
        topics = ["LeaseAcquired.1", "LeaseReleased.1", "LeaseAcquired.1", *["LeaseRenewed.1"] * 5]
        store.recorder.insert_events([stored(a, n, topic) for n, topic in enumerate(topics, 1)])
        store.recorder.insert_events([stored(b, n, topic) for n, topic in enumerate(topics[:3], 1)])
        assert store.remove_old_events() == 8
        assert keys(everything(store)) == [(a, 3), (a, 8), (b, 3)]
        assert store.remove_old_events() == 0


class MemoryRecorder:
    def create_recorder(self) -> ApplicationRecorder:
        return MemoryLeaseStore().recorder


class SqliteRecorder:
    @pytest.fixture(autouse=True)
    def _store(self, tmp_path: Path) -> Iterator[None]:
        self.store = SqliteLeaseStore(tmp_path / "leases.db", durability="relaxed")
        yield
        self.store.close()

    def create_recorder(self) -> ApplicationRecorder:
        return self.store.recorder


class PostgresRecorder:
    @pytest.fixture(autouse=True)
    def _store(self, lease_database: str) -> Iterator[None]:
        self.store = PostgresLeaseStore(lease_database)
        yield
        self.store.close()

    def create_recorder(self) -> ApplicationRecorder:
        return self.store.recorder


class RecorderCases(ApplicationRecorderTestCase[ApplicationRecorder]):
    def test_insert_subscribe(self) -> None:
        self.optional_test_insert_subscribe()


class TestRecorderInMemory(MemoryRecorder, RecorderCases):
    pass


class TestRecorderInSqlite(SqliteRecorder, RecorderCases):
    pass


class TestRecorderInPostgres(PostgresRecorder, RecorderCases):
    pass


class TestNonInterleavingInMemory(MemoryRecorder, NonInterleavingNotificationIDsBaseCase):
    pass


class TestNonInterleavingInSqlite(SqliteRecorder, NonInterleavingNotificationIDsBaseCase):
    pass


class TestNonInterleavingInPostgres(PostgresRecorder, NonInterleavingNotificationIDsBaseCase):
    pass


# The library's base classes are test cases themselves, but can't be made: only ours run.
del RecorderCases, ApplicationRecorderTestCase, NonInterleavingNotificationIDsBaseCase


# -- stores by address ---


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    addresses: dict[str, Callable[[], Any]] = {
        "memory": lambda: "memory:",
        "sqlite": lambda: str(tmp_path / "leases.db"),
        "postgres": lambda: request.getfixturevalue("lease_database"),
    }
    return str(addresses[request.param]())


def test_a_store_is_opened_by_its_address(address: str) -> None:
    store: LeaseStore = open_lease_store(address)
    assert store.recorder.max_notification_id() is None
    with pytest.raises(ProgrammingError, match="must be UUIDs, not 'lease-1'"):
        store.recorder.insert_events([StoredEvent("lease-1", 1, "LeaseAcquired.1", b"")])
    store.close()
    store.close()
    tables = open_lease_tables(address)
    assert (tables is None) == (address == "memory:")
    if tables is not None:
        assert tables.position() == 0
        tables.close()
        tables.close()


@pytest.mark.parametrize("address", ["redis://localhost", "", "a\x00b", 7, None])
def test_an_address_of_no_lease_store_is_refused(address: Any) -> None:
    with pytest.raises(InvalidRequest):
        open_lease_store(address)
    with pytest.raises(InvalidRequest):
        open_lease_tables(address)


def test_a_store_of_mailboxes_is_no_lease_store(tmp_path: Path) -> None:
    SqliteEventLog(tmp_path / "orders.db", "orders@p").close()
    with pytest.raises(InvalidRequest, match="is a store of mailboxes; name another file"):
        open_lease_store(str(tmp_path / "orders.db"))


def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but some notes " * 100)
    path.chmod(0o600)
    with pytest.raises(Unavailable, match=r"notes\.txt can't be opened: file is not a database"):
        open_lease_store(str(path))
    assert path.read_text().startswith("not a database")
    with pytest.raises(Unavailable, match="can't be opened: No such file or directory"):
        open_lease_store(str(tmp_path / "missing" / "leases.db"))


def test_a_lease_file_that_was_replaced_takes_no_events(tmp_path: Path) -> None:
    path = tmp_path / "leases.db"
    store = SqliteLeaseStore(path)
    path.rename(tmp_path / "moved.db")
    with pytest.raises(OperationalError, match="was removed or replaced"):
        store.recorder.insert_events([StoredEvent(uuid4(), 1, "LeaseAcquired.1", b"{}")])
    store.close()


def test_a_database_without_the_tables_names_the_command_that_creates_them(empty_database: str) -> None:
    with pytest.raises(Unavailable, match="run `postroom migrate --leases URL`"):
        open_lease_store(empty_database)


# -- faults of connections ---


def test_an_acquisition_whose_answer_is_lost_is_read_back(
    lease_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Proxy(lease_database) as proxy,
        closing(PostgresLeaseStore(proxy.url)) as store,
        closing(PostgresLeaseStore(lease_database)) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        store.recorder.insert_events([stored(uuid4(), 1)])
        insert = store.recorder.insert_events

        def insert_unheard(events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int]:
            monkeypatch.undo()
            proxy.hold_answers()
            return insert(events)

        monkeypatch.setattr(store.recorder, "insert_events", insert_unheard)
        acquiring = pool.submit(Leases(store.recorder, lambda: 1_000).acquire, ACQUIRE)
        wait_until(lambda: len(everything(other)) == 2)
        # A client that hears nothing, like one that is paused, keeps no lock.
        other.recorder.insert_events([stored(uuid4(), 1)])
        proxy.cut()
        assert acquiring.result(PATIENT_MS / 1_000).epoch == 1
        topics = [event.topic for event in everything(other)]
        assert topics == ["LeaseAcquired.1"] * 3 + ["LeaseRenewed.1"]


def test_a_store_goes_on_after_its_connections_were_lost(lease_database: str) -> None:
    with Proxy(lease_database) as proxy, closing(PostgresLeaseStore(proxy.url)) as store:
        leases = Leases(store.recorder, lambda: 1_000)
        leases.acquire(ACQUIRE)
        proxy.cut()
        assert leases.acquire(ACQUIRE).epoch == 1
        assert [event.topic for event in everything(store)] == ["LeaseAcquired.1", "LeaseRenewed.1"]
