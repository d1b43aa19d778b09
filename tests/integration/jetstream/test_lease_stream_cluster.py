"""The stream of leases on three NATS servers, of which some are killed, paused and restarted."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle, islice, pairwise
from typing import NamedTuple
from uuid import UUID, uuid4

import pytest
from eventsourcing.persistence import IntegrityError, OperationalError, StoredEvent

from postroom.adapters.jetstream.recorder import JetStreamRecorder
from postroom.adapters.system.clock import SystemClock
from postroom.application.leases.leases import Leases
from postroom.domain.errors import InvalidRequest, LeaseHeld, LeaseLost, Unavailable
from postroom.domain.lease.lease import AcquireLease, Lease, RenewLease
from tests.integration.jetstream.conftest import OpenLeaseStore
from tests.support.logs import capture_logs
from tests.support.servers.nats_cluster import NatsCluster
from tests.support.servers.process import LOOPBACK, free_port
from tests.support.waiting import SECONDS, wait_until

MAILBOX = "orders@local"
WALL = SystemClock().wall


@pytest.fixture(autouse=True)
def _healed(nats_cluster: NatsCluster) -> Iterator[None]:
    yield
    nats_cluster.heal()


def acquire(runner: str) -> AcquireLease:
    return AcquireLease(MAILBOX, runner, "proxy-1", "localhost:8982", str(uuid4()), 0, 60_000, 10_000)


def test_of_fifty_racers_one_acquires_the_lease(
    nats_cluster: NatsCluster, open_store: OpenLeaseStore
) -> None:
    admins = [Leases(open_store(server.url).recorder, WALL) for server in nats_cluster.servers]
    start = threading.Barrier(50)

    def race(number: int, admin: Leases) -> Lease | LeaseHeld:
        start.wait(SECONDS)
        try:
            return admin.acquire(acquire(f"runner-{number}"))
        except LeaseHeld as error:
            return error

    with ThreadPoolExecutor(50) as executor:
        outcomes = list(executor.map(race, range(50), islice(cycle(admins), 50)))
    (lease,) = (each for each in outcomes if isinstance(each, Lease))
    assert lease.epoch == 1
    assert all(lease.runner in str(each) for each in outcomes if isinstance(each, LeaseHeld))
    assert len(admins[0].read_events(0)) == 1


def test_the_servers_of_a_cluster_are_verified_by_their_monitoring(
    nats_cluster: NatsCluster, open_store: OpenLeaseStore, stream: str
) -> None:
    addresses = tuple(server.monitoring_url for server in nats_cluster.servers)
    open_store(nats_cluster.url, assume_sync_always=False, monitoring=addresses)
    with pytest.raises(InvalidRequest, match="Nothing is known about how NATS server nats-3 syncs"):
        open_store(nats_cluster.url, assume_sync_always=False, monitoring=addresses[:2])
    leader = nats_cluster.leader(stream)
    next(server for server in nats_cluster.servers if server is not leader).kill()
    with capture_logs() as logs:
        open_store(nats_cluster.url, assume_sync_always=False, monitoring=addresses)
    assert [each["event"] for each in logs if "sync" in each["event"]] == ["leases.sync_not_verified"]
    gone = f"http://{LOOPBACK}:{free_port()}"
    with pytest.raises(Unavailable, match="monitoring of a NATS server"):
        open_store(nats_cluster.url, assume_sync_always=False, monitoring=(leader.monitoring_url, gone, gone))


def test_a_stream_with_one_replica_is_refused_in_a_cluster(
    nats_cluster: NatsCluster, open_store: OpenLeaseStore
) -> None:
    open_store(nats_cluster.url, replicas=1)
    with pytest.raises(InvalidRequest, match="num_replicas must be at least 3"):
        open_store(nats_cluster.url)


def test_a_lease_that_moved_while_the_leader_was_paused_stays_moved(
    nats_cluster: NatsCluster, open_store: OpenLeaseStore, stream: str
) -> None:
    open_store(nats_cluster.url).close()
    leader = nats_cluster.leader(stream)
    others = ",".join(each.url for each in nats_cluster.servers if each is not leader)
    near = Leases(open_store(leader.url).recorder, WALL)
    far = Leases(open_store(others).recorder, WALL, is_expired=lambda lease: lease.runner == "runner-1")
    first = near.acquire(acquire("runner-1"))
    leader.pause()
    second = until_available(lambda: far.acquire(acquire("runner-2")))
    leader.resume()
    with pytest.raises(LeaseLost, match="owned by runner-2"):
        until_available(lambda: near.renew(RenewLease(MAILBOX, "runner-1", first.epoch)))
    assert second.epoch == first.epoch + 1
    assert until_available(lambda: far.renew(RenewLease(MAILBOX, "runner-2", second.epoch))).epoch == 2


class Acknowledged(NamedTuple):
    position: int
    event: StoredEvent


@pytest.mark.extended
def test_nothing_acknowledged_is_lost_or_stored_twice_when_servers_are_killed_and_paused(
    nats_cluster: NatsCluster, open_store: OpenLeaseStore, stream: str
) -> None:
    recorders = [
        open_store(f"{server.url},{nats_cluster.url}", events_per_aggregate=100_000).recorder
        for server in nats_cluster.servers
    ]
    own, shared = [uuid4() for _ in recorders], uuid4()
    with writers(recorders, own, shared) as acknowledged:
        wait_for_more(acknowledged)
        nats_cluster.leader(stream).kill()
        wait_for_more(acknowledged)
        nats_cluster.heal()
        paused = nats_cluster.leader(stream)
        paused.pause()
        wait_for_more(acknowledged)
        paused.resume()
        wait_for_more(acknowledged)
        for server in nats_cluster.servers:
            server.kill()
        nats_cluster.heal()
        wait_for_more(acknowledged)
    reader = open_store(nats_cluster.url).recorder
    log = {each.id: each for each in reader.select_notifications(None, 1_000_000)}
    for position, event in acknowledged:
        entry = log[position]
        assert (entry.originator_id, entry.originator_version) == (
            event.originator_id,
            event.originator_version,
        )
        assert entry.state == event.state
    assert len({(each.originator_id, each.originator_version) for each in log.values()}) == len(log)
    for aggregate in (*own, shared):
        versions = [each.originator_version for each in reader.select_events(aggregate)]
        assert versions == list(range(1, len(versions) + 1))
        ids = [each.id for each in log.values() if each.originator_id == aggregate]
        assert all(one < other for one, other in pairwise(ids))
    assert len({each.state for each in log.values()}) == len(log)


@contextmanager
def writers(
    recorders: list[JetStreamRecorder], own: list[UUID], shared: UUID
) -> Iterator[list[Acknowledged]]:
    """Write to an aggregate of each recorder's own, and to one that all share."""
    acknowledged: list[Acknowledged] = []
    ended = threading.Event()

    def write(recorder: JetStreamRecorder, aggregate: UUID) -> None:
        version = 0
        while not ended.wait(0.02):
            events = [
                StoredEvent(aggregate, version + number, "LeaseRenewed", uuid4().bytes)
                for number in (1, 2)[: 1 + version % 2]
            ]
            try:
                positions = recorder.insert_events(events)
                acknowledged.extend(map(Acknowledged, positions, events))
                version = events[-1].originator_version
            except (IntegrityError, OperationalError):
                version = last_version(recorder, aggregate, version)

    threads = [
        threading.Thread(target=write, args=(recorder, aggregate))
        for recorder, aggregate in [
            *zip(recorders, own, strict=True),
            *((each, shared) for each in recorders),
        ]
    ]
    for thread in threads:
        thread.start()
    try:
        yield acknowledged
    finally:
        ended.set()
        for thread in threads:
            thread.join(SECONDS)


def last_version(recorder: JetStreamRecorder, aggregate: UUID, default: int) -> int:
    try:
        events = recorder.select_events(aggregate, desc=True, limit=1)
    except OperationalError:
        return default
    return events[0].originator_version if events else 0


def wait_for_more(acknowledged: list[Acknowledged]) -> None:
    count = len(acknowledged)
    wait_until(lambda: len(acknowledged) >= count + 30)


def until_available(call):
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return call()
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
