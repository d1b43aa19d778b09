"""The `eventsourcing` library's own recorder test cases, run against our event logs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event
from eventsourcing.persistence import IntegrityError, ProgrammingError, StoredEvent
from eventsourcing.tests.persistence import (
    ApplicationRecorderTestCase,
    NonInterleavingNotificationIDsBaseCase,
)

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.jetstream.store import JetStreamStore
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.postgres.event_log import PostgresEventLog
from postroom.adapters.recorder import LogRecorder
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.adapters.system.clock import SystemClock
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.messages import NewMessage
from postroom.application.ports.event_log import EventLog
from postroom.domain.commit import GENESIS, verify_chain

CLOCK = SystemClock()
LEASES = "leases@local"


class MemoryRecorder:
    def create_recorder(self) -> LogRecorder:
        return LogRecorder(MemoryEventLog(LEASES), CLOCK.wall)


class SqliteRecorder:
    @pytest.fixture(autouse=True)
    def _store(self, tmp_path: Path) -> Iterator[None]:
        self.log = SqliteEventLog(tmp_path / "store.db", LEASES, durability="relaxed")
        yield
        self.log.close()

    def create_recorder(self) -> LogRecorder:
        return LogRecorder(self.log, CLOCK.wall)


class PostgresRecorder:
    @pytest.fixture(autouse=True)
    def _store(self, postgres_store: str) -> Iterator[None]:
        self.log = PostgresEventLog(postgres_store, LEASES, durability="relaxed")
        yield
        self.log.close()

    def create_recorder(self) -> LogRecorder:
        return LogRecorder(self.log, CLOCK.wall)


class JetStreamRecorder:
    @pytest.fixture(autouse=True)
    def _store(self, jetstream_store: str) -> Iterator[None]:
        self.log = JetStreamStore(jetstream_store).event_log(LEASES)
        yield
        self.log.close()

    def create_recorder(self) -> LogRecorder:
        return LogRecorder(self.log, CLOCK.wall)


class RecorderCases(ApplicationRecorderTestCase[LogRecorder]):
    def test_insert_subscribe(self) -> None:
        self.optional_test_insert_subscribe()


class TestRecorderOverMemory(MemoryRecorder, RecorderCases):
    pass


class TestRecorderOverSqlite(SqliteRecorder, RecorderCases):
    pass


class TestRecorderOverPostgres(PostgresRecorder, RecorderCases):
    pass


class TestRecorderOverJetStream(JetStreamRecorder, RecorderCases):
    pass


class TestNonInterleavingOverMemory(MemoryRecorder, NonInterleavingNotificationIDsBaseCase):
    pass


class TestNonInterleavingOverSqlite(SqliteRecorder, NonInterleavingNotificationIDsBaseCase):
    pass


class TestNonInterleavingOverPostgres(PostgresRecorder, NonInterleavingNotificationIDsBaseCase):
    pass


class TestNonInterleavingOverJetStream(JetStreamRecorder, NonInterleavingNotificationIDsBaseCase):
    pass


# The library's base classes are test cases themselves, but can't be made: only ours run.
del RecorderCases, ApplicationRecorderTestCase, NonInterleavingNotificationIDsBaseCase


@pytest.fixture(params=["memory", "sqlite", "postgres", "jetstream"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EventLog]:
    logs: dict[str, Callable[[], EventLog]] = {
        "memory": lambda: MemoryEventLog(LEASES),
        "sqlite": lambda: SqliteEventLog(tmp_path / "store.db", LEASES),
        "postgres": lambda: PostgresEventLog(request.getfixturevalue("postgres_store"), LEASES),
        "jetstream": lambda: JetStreamStore(request.getfixturevalue("jetstream_store")).event_log(LEASES),
    }
    made = logs[request.param]()
    yield made
    made.close()


def stored(originator: UUID, version: int, state: bytes = b"{}") -> StoredEvent:
    return StoredEvent(originator, version, "LeaseRenewed.1", state)


def test_what_the_library_writes_is_chained_like_every_log(log: EventLog) -> None:
    recorder = LogRecorder(log, CLOCK.wall)
    recorder.insert_events([stored(uuid4(), 1, b"\x00\xff"), stored(uuid4(), 1)])
    recorder.insert_events([stored(uuid4(), 0)])
    head = log.head()
    assert head is not None
    assert verify_chain(log.commits(), GENESIS, 1) == (3, head.chain)


def test_log_time_never_decreases_though_the_wall_clock_does(log: EventLog) -> None:
    wall = iter([5_000, 3_000, 7_000])
    recorder = LogRecorder(log, lambda: next(wall))
    for _ in range(3):
        recorder.insert_events([stored(uuid4(), 1)])
    assert [record.at for record in log.read()] == [5_000, 5_000, 7_000]


def test_two_recorders_on_one_log_take_turns(log: EventLog) -> None:
    one, two = LogRecorder(log, CLOCK.wall), LogRecorder(log, CLOCK.wall)
    aggregate = uuid4()
    assert one.insert_events([stored(aggregate, 1)]) == [1]
    assert two.insert_events([stored(aggregate, 2)]) == [2]
    with pytest.raises(IntegrityError, match=f"Aggregate {aggregate} already has an event of version 2"):
        one.insert_events([stored(aggregate, 2)])
    assert one.max_notification_id() == 2


def test_an_originator_id_that_is_no_uuid_is_refused(log: EventLog) -> None:
    with pytest.raises(ProgrammingError, match="must be UUIDs, not 'lease-1'"):
        LogRecorder(log, CLOCK.wall).insert_events([StoredEvent("lease-1", 1, "LeaseRenewed.1", b"")])
    assert log.head() is None


async def test_the_library_reads_what_a_mailbox_wrote_but_never_writes_there(log: EventLog) -> None:
    engine = MailboxEngine(log, CLOCK)
    await engine.open("test")
    mailbox = OwnedMailbox(engine, CLOCK)
    await mailbox.send_message(NewMessage(topic="orders", payload=b"1", message_id="order-1"))
    (delivery,) = await mailbox.receive_messages("orders")
    await mailbox.ack_messages([delivery.receipt])
    await engine.close()

    recorder = LogRecorder(log, CLOCK.wall)
    types = ["MessageSent", "MessageReceived", "MessageAcked"]
    assert [event.topic for event in recorder.select_events("order-1")] == types
    last = recorder.select_events(UUID(bytes=delivery.receipt.message), desc=True, limit=1)
    assert [(event.originator_version, event.topic) for event in last] == [(3, "MessageAcked")]
    acked = recorder.select_notifications(1, 10, topics=["MessageAcked"])
    assert [notification.id for notification in acked] == [recorder.max_notification_id()]
    with pytest.raises(ProgrammingError, match="can only be written by the mailbox's owner"):
        recorder.insert_events([stored(uuid4(), 1)])


class Lease(Aggregate):
    @event("Acquired")
    def __init__(self, runner: str) -> None:
        self.runner = runner

    @event("PassedOn")
    def pass_on(self, runner: str) -> None:
        self.runner = runner


class Leases(Application[UUID]):
    pass


def test_an_application_of_the_library_keeps_its_aggregates_in_our_log(tmp_path: Path) -> None:
    def application(log: EventLog) -> Leases:
        leases = Leases()
        leases.recorder = leases.events.recorder = LogRecorder(log, CLOCK.wall)
        return leases

    log = SqliteEventLog(tmp_path / "store.db", LEASES)
    lease = Lease("runner-1")
    lease.pass_on("runner-2")
    application(log).save(lease)
    log.close()

    log = SqliteEventLog(tmp_path / "store.db", LEASES)
    found: Any = application(log).repository.get(lease.id)
    log.close()
    assert (found.runner, found.version) == ("runner-2", 2)
