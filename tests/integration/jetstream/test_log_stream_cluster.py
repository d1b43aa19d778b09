"""The log of a mailbox on three NATS servers, of which some are killed, paused and restarted."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import ParamSpec, TypeVar
from uuid import uuid4

import pytest

from postroom.adapters.jetstream import durability
from postroom.adapters.jetstream.event_log import JetStreamEventLog
from postroom.adapters.jetstream.store import JetStreamStore
from postroom.domain.commit import GENESIS, verify_chain
from postroom.domain.errors import Fenced, InvalidRequest, Unavailable
from tests.conformance.log_store import ONE
from tests.conformance.records import after, append, sent, stream
from tests.support.servers.nats_cluster import NatsCluster
from tests.support.waiting import wait_until

P = ParamSpec("P")
T = TypeVar("T")


@pytest.fixture(autouse=True)
def _healed(nats_cluster: NatsCluster) -> Iterator[None]:
    yield
    nats_cluster.heal()


@pytest.fixture
def name() -> str:
    return f"STORE_{uuid4().hex[:12]}"


def open_store(
    cluster: NatsCluster, name: str, *, first: str = "", options: str = "sync=always"
) -> JetStreamStore:
    hosts = ",".join(filter(None, [first, cluster.url])).replace("nats://", "")
    return JetStreamStore(f"nats://{hosts}/{name}?{options}")


def test_servers_are_checked_by_their_monitoring(nats_cluster: NatsCluster, name: str) -> None:
    options = f"monitoring={nats_cluster.monitoring}"
    with closing(open_store(nats_cluster, name, options=options).event_log(ONE)) as log:
        assert log.durability == "power-cut"
    first = nats_cluster.monitoring.partition(",")[0]
    with pytest.raises(InvalidRequest, match="Nothing is known about how NATS server"):
        open_store(nats_cluster, name, options=f"monitoring={first}").event_log(ONE)


def test_a_server_to_which_the_owner_is_not_connected_is_checked_while_it_runs(
    nats_cluster: NatsCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "CHECK_SECONDS", 0.1)
    first, *_, other = nats_cluster.servers
    options = f"monitoring={nats_cluster.monitoring}"
    with closing(open_store(nats_cluster, name, first=first.url, options=options).event_log(ONE)) as log:
        for always, promise in ((False, "process-crash"), (True, "power-cut")):
            other.stop()
            other.set_sync(always=always)
            other.start()
            wait_until(lambda promise=promise: log.durability == promise)  # type: ignore[misc]


def test_a_former_owner_of_a_paused_leader_appends_nothing(nats_cluster: NatsCluster, name: str) -> None:
    with closing(open_store(nats_cluster, name).event_log(ONE)) as log:
        append(log, [sent(1)], epoch=1)
    leader = nats_cluster.leader(name)
    others = ",".join(each.url for each in nats_cluster.servers if each is not leader)
    with closing(open_store(nats_cluster, name, first=leader.url).event_log(ONE)) as old:
        stale = after(old, [sent(2)], epoch=1)
        leader.pause()
        with closing(until_available(JetStreamStore(f"{others}/{name}?sync=always").event_log, ONE)) as new:
            until_available(append, new, [sent(3)], epoch=2)
            leader.resume()
            with pytest.raises(Fenced):
                until_available(old.append, stale)
            assert [record.stream for record in new.read()] == [stream(1), stream(3)]


class Appender:
    """A thread that appends events one by one, and notes those that were acknowledged."""

    def __init__(self, log: JetStreamEventLog) -> None:
        self.acknowledged: list[int] = []
        self._log = log
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Appender":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def wait_for_more(self) -> None:
        count = len(self.acknowledged)
        wait_until(lambda: len(self.acknowledged) >= count + 20)

    def _run(self) -> None:
        number = 0
        while not self._end.is_set():
            number += 1
            try:
                append(self._log, [sent(number)])
                self.acknowledged.append(number)
            except Unavailable:  # the outcome is unknown: another event is appended next
                continue


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_nothing_acknowledged_is_lost_or_stored_twice_when_the_leader_fails(
    nats_cluster: NatsCluster, name: str, fault: str
) -> None:
    with closing(open_store(nats_cluster, name).event_log(ONE)) as log, Appender(log) as appender:
        appender.wait_for_more()
        for _ in range(2):
            getattr(nats_cluster.leader(name), fault)()
            appender.wait_for_more()
            nats_cluster.heal()
            appender.wait_for_more()
    with closing(open_store(nats_cluster, name).existing_log(ONE)) as reader:
        streams = [record.stream for record in reader.read()]
        assert len(set(streams)) == len(streams)
        assert {stream(number) for number in appender.acknowledged} <= set(streams)
        assert verify_chain(reader.commits(), GENESIS, 1)[0] == len(streams)


def until_available(work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call until the servers have a leader again; return what the call returns."""
    answers: list[T] = []

    def is_done() -> bool:
        try:
            answers.append(work(*arguments, **options))
        except Unavailable as error:
            if isinstance(error, Fenced):
                raise
        return bool(answers)

    wait_until(is_done)
    return answers[0]
