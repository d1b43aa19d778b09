"""The stream of leases on one NATS server: what is written, read back and refused."""

import asyncio
import base64
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import nats
import pytest
from eventsourcing.persistence import (
    DataError,
    IntegrityError,
    OperationalError,
    ProgrammingError,
    StoredEvent,
)
from eventsourcing.tests.persistence import (
    ApplicationRecorderTestCase,
    NonInterleavingNotificationIDsBaseCase,
)

from postroom.adapters.jetstream.lease_store import JetStreamLeaseStore
from postroom.adapters.jetstream.recorder import JetStreamRecorder
from postroom.adapters.jetstream.settings import LeaseStreamSettings
from postroom.adapters.nats.settings import NatsSettings
from postroom.domain.errors import BrokenLog, InvalidRequest, Unavailable
from tests.integration.jetstream.conftest import OpenLeaseStore
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres_proxy import Proxy
from tests.support.servers.process import LOOPBACK, free_port
from tests.support.system_calls import STRACE
from tests.support.waiting import SECONDS, wait_until


def stored(aggregate: UUID, version: int, state: bytes = b"{}") -> StoredEvent:
    return StoredEvent(aggregate, version, "LeaseRenewed", state)


def append_to(results: list[Any], recorder: JetStreamRecorder, events: list[StoredEvent]) -> None:
    results.append(recorder.insert_events(events))


def is_last(recorder: JetStreamRecorder, position: int) -> bool:
    return recorder.max_notification_id() == position


def request(url: str, subject: str, payload: object = b"") -> dict[str, Any]:
    """Return the answer of a NATS server to a client that knows nothing of Postroom."""

    async def ask() -> dict[str, Any]:
        client = await nats.connect(url)
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        answer: dict[str, Any] = json.loads((await client.request(subject, body, timeout=10)).data)
        await client.close()
        return answer

    return asyncio.run(ask())


class Recorders:
    @pytest.fixture(autouse=True)
    def _stores(self, nats_server: NatsServer) -> Iterator[None]:
        with ExitStack() as self.opened:
            self.url = nats_server.url
            yield

    def create_recorder(self) -> JetStreamRecorder:
        store = JetStreamLeaseStore(
            LeaseStreamSettings(
                nats=NatsSettings(self.url),
                stream=f"LEASES_{uuid4().hex}",
                assume_sync_always=True,
                events_per_aggregate=10_000,
                timeout_ms=60_000,
            )
        )
        self.opened.callback(store.close)
        return store.recorder


class RecorderCases(ApplicationRecorderTestCase[JetStreamRecorder]):
    def test_insert_subscribe(self) -> None:
        self.optional_test_insert_subscribe()


class TestRecorderOverJetStream(Recorders, RecorderCases):
    pass


class TestNonInterleavingOverJetStream(Recorders, NonInterleavingNotificationIDsBaseCase):
    pass


# The library's base classes are test cases themselves, but can't be made: only ours run.
del RecorderCases, ApplicationRecorderTestCase, NonInterleavingNotificationIDsBaseCase


def test_the_stream_removes_the_oldest_events_of_an_aggregate_itself(
    nats_server: NatsServer, open_store: OpenLeaseStore
) -> None:
    store = open_store(nats_server.url, events_per_aggregate=4)
    often, once = uuid4(), uuid4()
    store.recorder.insert_events([stored(once, 1)])
    for version in range(1, 11):
        store.recorder.insert_events([stored(often, version)])
    assert store.remove_old_events() == 0
    other = open_store(nats_server.url).recorder
    assert [each.originator_version for each in other.select_events(often)] == [7, 8, 9, 10]
    assert [each.id for each in other.select_notifications(None, 100)] == [1, 8, 9, 10, 11]
    assert [each.id for each in other.select_notifications(9, 100, stop=10)] == [9, 10]
    other.insert_events([stored(often, 11)])
    assert [each.originator_version for each in store.recorder.select_events(often)] == [8, 9, 10, 11]


def test_events_that_skip_a_version_are_refused(nats_server: NatsServer, open_store: OpenLeaseStore) -> None:
    recorder = open_store(nats_server.url).recorder
    aggregate = uuid4()
    recorder.insert_events([stored(aggregate, 1)])
    for events in ([stored(aggregate, 3)], [stored(aggregate, 2), stored(aggregate, 4)]):
        with pytest.raises(IntegrityError, match=f"{aggregate} has no event of version"):
            recorder.insert_events(events)
    assert recorder.max_notification_id() == 1


def test_a_save_of_several_aggregates_is_stored_whole_or_not_at_all(
    nats_server: NatsServer, open_store: OpenLeaseStore
) -> None:
    one, two = (open_store(nats_server.url).recorder for _ in range(2))
    first, second = uuid4(), uuid4()
    assert one.insert_events([stored(first, 1), stored(second, 1), stored(first, 2)]) == [1, 2, 3]
    two.insert_events([stored(second, 2)])
    with pytest.raises(IntegrityError, match=f"{first} already has an event of version 3|{second}"):
        one.insert_events([stored(first, 3), stored(second, 2)])
    assert two.max_notification_id() == 4
    assert [each.originator_version for each in one.select_events(first)] == [1, 2]


def test_what_nats_can_not_take_is_refused_before_it_is_sent(
    nats_server: NatsServer, open_store: OpenLeaseStore
) -> None:
    recorder = open_store(nats_server.url).recorder
    with pytest.raises(DataError, match="at most 1,000"):
        recorder.insert_events([stored(uuid4(), 1) for _ in range(1_001)])
    with pytest.raises(DataError, match="raise max_payload"):
        recorder.insert_events([stored(uuid4(), 1, bytes(1 << 20))])
    with pytest.raises(ProgrammingError, match="must be UUIDs, not 'lease-1'"):
        recorder.insert_events([StoredEvent("lease-1", 1, "LeaseRenewed", b"")])
    assert recorder.max_notification_id() is None


def test_another_process_is_told_of_an_event_at_once(
    nats_server: NatsServer, open_store: OpenLeaseStore
) -> None:
    writer, reader = (open_store(nats_server.url) for _ in range(2))
    told = threading.Thread(target=reader.wait, args=(0, 240_000))
    told.start()
    writer.recorder.insert_events([stored(uuid4(), 1)])
    told.join(120)
    assert not told.is_alive()
    reader.wait(1, 1)  # returns though nothing follows


def test_a_message_that_another_program_published_is_an_error_that_names_it(
    nats_server: NatsServer, open_store: OpenLeaseStore, stream: str
) -> None:
    recorder = open_store(nats_server.url).recorder
    aggregate = uuid4()
    recorder.insert_events([stored(aggregate, 1)])
    message = request(nats_server.url, f"$JS.API.STREAM.MSG.GET.{stream}", {"seq": 1})["message"]
    own = base64.b64decode(message["data"])
    other = uuid4()
    request(nats_server.url, f"{stream}.{other.hex}", own)  # of another aggregate
    with pytest.raises(BrokenLog, match=r"Message 2 of the lease stream, .* does not match its digest"):
        recorder.select_events(other)
    for payload in (b"", b"junk", bytes(40), own[:-1] + b"!"):
        request(nats_server.url, f"{stream}.{aggregate.hex}", payload)
    for read in (
        lambda: recorder.select_events(aggregate),
        lambda: recorder.select_notifications(2, 10),
        recorder.max_notification_id,
        lambda: recorder.insert_events([stored(uuid4(), 1), stored(aggregate, 3)]),
    ):
        with pytest.raises(BrokenLog, match=r"Message \d+ of the lease stream, at subject"):
            read()


LOSING_STREAMS: dict[str, dict[str, Any]] = {
    "storage must be file": {"storage": "memory"},
    "max_age": {"max_age": 3_600 * 10**9},
    "max_bytes must be unlimited": {"max_bytes": 1 << 20},
    "deny_delete must be on": {"deny_delete": False},
    "deny_purge must be on": {"deny_purge": False},
    "allow_atomic must be on": {"allow_atomic": False},
    "max_msgs_per_subject must be at least 2": {"max_msgs_per_subject": 1},
    "retention must be limits": {"retention": "interest"},
    "subjects must be": {"subjects": ["elsewhere.>"]},
}


@pytest.mark.parametrize(("reason", "changes"), LOSING_STREAMS.items(), ids=list(LOSING_STREAMS))
def test_a_stream_that_could_lose_leases_is_refused(
    nats_server: NatsServer, open_store: OpenLeaseStore, reason: str, changes: dict[str, Any]
) -> None:
    name = f"OTHER_{uuid4().hex}"
    config = {
        "name": name,
        "subjects": [f"{name}.*"],
        "storage": "file",
        "deny_delete": True,
        "deny_purge": True,
        "allow_direct": True,
        "allow_atomic": True,
        "max_msgs_per_subject": 4,
    }
    created = request(nats_server.url, f"$JS.API.STREAM.CREATE.{name}", config | changes)
    assert "error" not in created
    with pytest.raises(InvalidRequest, match=f"can't hold leases: .*{reason}"):
        open_store(nats_server.url, stream=name)
    request(nats_server.url, f"$JS.API.STREAM.DELETE.{name}")


def test_three_replicas_need_a_cluster(nats_server: NatsServer, open_store: OpenLeaseStore) -> None:
    with pytest.raises((InvalidRequest, Unavailable), match="replicas"):
        open_store(nats_server.url, replicas=3, timeout_ms=500)


def test_servers_that_do_not_sync_every_write_are_refused(tmp_path: Path, open_store: OpenLeaseStore) -> None:
    port = free_port()
    monitoring = (f"http://{LOOPBACK}:{port}",)
    with NatsServer(tmp_path, http=f"{LOOPBACK}:{port}") as server:
        with pytest.raises(InvalidRequest, match="set sync_interval: always"):
            open_store(server.url, monitoring=monitoring)
        with pytest.raises(InvalidRequest, match="can't be verified that the NATS servers sync"):
            open_store(server.url, assume_sync_always=False)
        with pytest.raises(Unavailable, match=r"monitoring of a NATS server .* can't be read"):
            open_store(server.url, monitoring=(f"http://{LOOPBACK}:{free_port()}",))


def test_a_write_whose_answer_is_lost_is_read_back_and_stored_once(
    nats_server: NatsServer, open_store: OpenLeaseStore
) -> None:
    with Proxy(nats_server.url) as network:
        near, far = open_store(nats_server.url).recorder, open_store(network.url, timeout_ms=60_000).recorder
        first, second = uuid4(), uuid4()
        far.insert_events([stored(first, 1), stored(second, 1)])
        for events, positions in (
            ([stored(first, 2)], [3]),
            ([stored(first, 3), stored(second, 2)], [4, 5]),
        ):
            network.hold_answers()
            results: list[Any] = []
            writer = threading.Thread(target=append_to, args=(results, far, events))
            writer.start()
            wait_until(partial(is_last, near, positions[-1]))
            network.cut()
            writer.join(240)
            assert results == [positions]
        assert near.max_notification_id() == 5


def test_a_write_that_never_reached_the_server_loses_to_another_of_the_same_version(
    nats_server: NatsServer, open_store: OpenLeaseStore
) -> None:
    with Proxy(nats_server.url) as network:
        near, far = open_store(nats_server.url).recorder, open_store(network.url, timeout_ms=60_000).recorder
        aggregate = uuid4()
        far.insert_events([stored(aggregate, 1)])
        network.hold_requests()
        outcome: list[Exception] = []

        def write() -> None:
            try:
                far.insert_events([stored(aggregate, 2, b"far")])
            except Exception as error:
                outcome.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        time.sleep(0.2)  # the request is on its way
        near.insert_events([stored(aggregate, 2, b"near")])
        network.release()
        writer.join(240)
        assert [type(each) for each in outcome] == [IntegrityError]
        assert [each.state for each in far.select_events(aggregate)] == [b"{}", b"near"]


def test_a_client_whose_answers_stay_away_fails_in_time_and_works_again_afterwards(
    nats_server: NatsServer, open_store: OpenLeaseStore
) -> None:
    with Proxy(nats_server.url) as network:
        far = open_store(network.url, timeout_ms=1_000).recorder
        aggregate = uuid4()
        far.insert_events([stored(aggregate, 1)])
        network.hold_answers()
        for call in (
            lambda: far.insert_events([stored(aggregate, 2)]),
            lambda: far.select_events(aggregate),
            lambda: far.select_notifications(None, 10),
            far.max_notification_id,
        ):
            with pytest.raises(OperationalError):
                call()
        network.cut()

        def is_stored() -> bool:
            try:
                return [each.originator_version for each in far.select_events(aggregate)] == [1, 2]
            except OperationalError:
                return False

        wait_until(is_stored)
        with pytest.raises(IntegrityError):
            far.insert_events([stored(aggregate, 2)])


def test_a_closed_store_says_so(nats_server: NatsServer, open_store: OpenLeaseStore) -> None:
    store = open_store(nats_server.url)
    store.close()
    store.close()
    store.wait(0, 240_000)
    with pytest.raises(OperationalError, match="closed"):
        store.recorder.max_notification_id()


def test_settings_of_a_lease_stream_are_checked() -> None:
    nats_settings = NatsSettings("nats://localhost")
    wrong: list[dict[str, Any]] = [
        {"stream": "a.b"},
        {"stream": ""},
        {"stream": 1},
        {"replicas": 0},
        {"replicas": True},
        {"monitoring": ("ftp://host",)},
        {"monitoring": ("http://[",)},
        {"monitoring": "http://host"},
        {"assume_sync_always": 1},
        {"events_per_aggregate": 1},
        {"timeout_ms": 0},
        {"nats": "nats://localhost"},
    ]
    for each in wrong:
        with pytest.raises(InvalidRequest):
            LeaseStreamSettings(**({"nats": nats_settings} | each))


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
def test_each_write_is_synced_by_a_server_that_syncs_always(
    nats_server: NatsServer, open_store: OpenLeaseStore, tmp_path: Path
) -> None:
    recorder = open_store(nats_server.url).recorder
    trace = tmp_path / "trace"
    command = ["-f", "-q", "-e", "trace=fsync,fdatasync", "-p", str(nats_server.pid), "-o", str(trace)]
    tracer = subprocess.Popen([str(STRACE), *command])

    def count_syncs() -> int:
        if tracer.poll() is not None:
            pytest.skip("this process may not trace another")
        recorder.insert_events([stored(uuid4(), 1)])
        return trace.read_text().count("sync(") if trace.exists() else 0

    try:
        wait_until(count_syncs)  # it is attached
        before = count_syncs()
        for _ in range(10):
            recorder.insert_events([stored(uuid4(), 1)])
        wait_until(lambda: trace.read_text().count("sync(") >= before + 10)
    finally:
        tracer.terminate()
        tracer.wait(SECONDS)


def test_leases_outlive_the_kill_of_the_server(tmp_path: Path, open_store: OpenLeaseStore) -> None:
    with NatsServer(tmp_path, sync_always=True) as server:
        store = open_store(server.url, timeout_ms=30_000)
        aggregate = uuid4()
        for version in range(1, 6):
            store.recorder.insert_events([stored(aggregate, version)])
        server.kill()
        server.start()
        store.recorder.insert_events([stored(aggregate, 6)])
        versions = [each.originator_version for each in store.recorder.select_events(aggregate)]
        assert versions == [5, 6]
