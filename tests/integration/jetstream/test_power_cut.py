"""All servers of a store lose their power at once, and with it what they had written but not synced.

One machine can't lose its power in a test. The system calls of the servers say what they had synced when they
were killed; their files are cut to that before they start again. So what is missing here is a disk that says
that it has synced, and has not.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from postroom.adapters.jetstream.event_log import JetStreamEventLog
from postroom.adapters.jetstream.store import JetStreamStore
from postroom.domain.errors import DuplicateRecord, NotFound, PostroomError
from tests.conformance.log_store import ONE
from tests.conformance.records import append, sent, stream
from tests.integration.jetstream.power_cut import PowerCut, traced
from tests.support.servers.nats import NatsServer
from tests.support.servers.nats_cluster import NatsCluster
from tests.support.servers.server import LoopbackServer
from tests.support.system_calls import STRACE
from tests.support.waiting import SECONDS, wait_until

APPENDS = 50
RAFT_BYTES = 15 << 20
"""So many that replicas remove the beginning of their Raft log, and need what they made of it."""

pytestmark = pytest.mark.skipif(STRACE is None, reason="strace is not installed")


class Appending:
    """A thread that appends to a log, and notes what was acknowledged.

    Arguments:
        size: of the envelopes, bytes.
    """

    def __init__(self, log: JetStreamEventLog, size: int = 0) -> None:
        self.acknowledged: list[int] = []
        self._log = log
        self._size = size
        self._stopping = Event()
        self._thread = Thread(target=self._run, daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            self._thread.join(SECONDS)

    def wait(self) -> None:
        """Return when more was acknowledged."""
        count = len(self.acknowledged) + APPENDS
        wait_until(lambda: len(self.acknowledged) >= count)

    def _run(self) -> None:
        number = 1
        while not self._stopping.is_set():
            try:
                append(self._log, [sent(number, envelope=b"\x0a\x00" + os.urandom(self._size))])
                self.acknowledged.append(number)
            except DuplicateRecord:  # an attempt whose outcome was unknown
                pass
            except PostroomError:
                self._stopping.wait(0.01)
                continue
            number += 1


@contextmanager
def running(
    folder: Path, count: int, *, sync_always: bool
) -> Iterator[tuple[str, list[LoopbackServer], list[Path]]]:
    """Run servers; yield the address of a store, the servers, and the folders where they store."""
    with ExitStack() as opened:
        if count == 1:
            server = opened.enter_context(NatsServer(folder, sync_always=sync_always))
            yield f"{server.url}/LOGS", [server], [folder / "jetstream"]
            return
        cluster = opened.enter_context(NatsCluster(folder, sync_always=sync_always))
        servers: list[LoopbackServer] = [*cluster.servers]
        yield (
            cluster.store("LOGS").partition("?")[0],
            servers,
            [folder / each.name for each in cluster.servers],
        )


def cut_power(servers: list[LoopbackServer], cuts: list[PowerCut]) -> int:
    """Cut the power of all servers, and start them again; return how many bytes they lost."""
    for server in servers:
        server.kill()
    lost = sum(cut.lose_what_is_not_synced() for cut in cuts)
    for server in servers:
        server.start()
    return lost


def stored_in(store: JetStreamStore) -> list[bytes]:
    """Return the streams of a log's events in their order."""
    try:
        with closing(store.existing_log(ONE)) as log:
            return [record.stream for record in log.read()]
    except NotFound:
        return []


@pytest.mark.parametrize(
    ("count", "size"),
    [(1, 0), pytest.param(3, RAFT_BYTES // APPENDS, marks=pytest.mark.extended)],
    ids=["alone", "cluster"],
)
def test_nothing_acknowledged_is_missing_after_a_power_cut_of_all_servers_that_sync(
    count: int, size: int, tmp_path: Path
) -> None:
    with running(tmp_path, count, sync_always=True) as (url, servers, folders):
        cuts = [PowerCut(each, tmp_path / f"trace-{number}") for number, each in enumerate(folders)]
        store = JetStreamStore(f"{url}?sync=always")
        with traced(servers, cuts), closing(store.event_log(ONE)) as log:
            assert log.durability == "power-cut"
            appending = Appending(log, size)
            with appending.running():
                appending.wait()
                cut_power(servers, cuts)
                appending.wait()
        streams = stored_in(store)
    assert {*map(stream, appending.acknowledged)} <= {*streams}
    assert len(streams) == len({*streams})


def test_a_power_cut_takes_what_servers_do_not_sync_and_owners_do_not_call_it_safe(tmp_path: Path) -> None:
    with running(tmp_path, 1, sync_always=False) as (url, servers, folders):
        cuts = [PowerCut(each, tmp_path / f"trace-{number}") for number, each in enumerate(folders)]
        store = JetStreamStore(url)
        with traced(servers, cuts):
            with closing(store.event_log(ONE)) as log:
                assert log.durability == "process-crash"
                appending = Appending(log)
                with appending.running():
                    appending.wait()
            lost = cut_power(servers, cuts)
        streams = stored_in(store)
    assert lost > 0
    assert not {*map(stream, appending.acknowledged)} <= {*streams}
