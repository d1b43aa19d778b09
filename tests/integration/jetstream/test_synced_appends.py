"""Servers with `sync_interval: always` have synced an append to a log before it is answered.

This is as near to a power cut as one machine comes: it shows that the servers ask the operating system to
sync, not that a disk obeys.
"""

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from postroom.adapters.jetstream.store import JetStreamStore
from tests.conformance.log_store import ONE
from tests.conformance.records import append, sent
from tests.support.servers.nats import NatsServer
from tests.support.servers.nats_cluster import NatsCluster
from tests.support.servers.server import LoopbackServer
from tests.support.system_calls import STRACE
from tests.support.waiting import SECONDS, wait_until

APPENDS = 10
_SYNC = re.compile(r"^(?P<thread>\d+) +(?P<at>[\d.]+) fsync\(\d+<(?P<path>[^>]*)>(?P<rest>.*)")
_RESUMED = re.compile(r"^(?P<thread>\d+) +(?P<at>[\d.]+) <\.\.\. fsync resumed>.* = 0 ")
_DONE = re.compile(r"= 0 <(?P<seconds>[\d.]+)>$")


class Servers(NamedTuple):
    """Servers, and how many of them must have an append."""

    store: JetStreamStore
    servers: list[LoopbackServer]
    needed: int


@pytest.fixture(params=[1, 3], ids=["alone", "cluster"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    if request.param == 1:
        with NatsServer(tmp_path, sync_always=True) as server:
            yield Servers(JetStreamStore(f"{server.url}/LOGS?sync=always"), [server], 1)
        return
    with NatsCluster(tmp_path) as cluster:
        yield Servers(JetStreamStore(cluster.store("LOGS")), [*cluster.servers], 2)


def syncs(trace: Path) -> Iterator[float]:
    """Yield when syncs of files with messages were done, in seconds since 1970."""
    started: dict[str, str] = {}
    for line in trace.read_text().splitlines():
        if begun := _SYNC.match(line):
            if not begun["path"].endswith(".blk"):
                continue
            if done := _DONE.search(begun["rest"]):
                yield float(begun["at"]) + float(done["seconds"])
            else:
                started[begun["thread"]] = begun["path"]
        elif (resumed := _RESUMED.match(line)) and started.pop(resumed["thread"], None):
            yield float(resumed["at"])


@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
def test_most_servers_have_synced_an_append_when_it_is_answered(servers: Servers, tmp_path: Path) -> None:
    traces = [tmp_path / f"trace-{number}" for number in range(len(servers.servers))]
    tracers = []
    with closing(servers.store.event_log(ONE)) as log:
        append(log, [sent(1)])
        try:
            for server, trace in zip(servers.servers, traces, strict=True):
                command = [str(STRACE), "-f", "-y", "-q", "-ttt", "-T", "-e", "trace=fsync", "-o", str(trace)]
                tracers.append(subprocess.Popen([*command, "-p", str(server.pid)]))
            spans = []
            position = 1

            def append_next() -> None:
                nonlocal position
                if any(tracer.poll() is not None for tracer in tracers):
                    pytest.skip("this process may not trace another")
                began = time.time()
                append(log, [sent(position + 1)])
                spans.append((began, time.time()))
                position += 1

            def is_attached() -> bool:
                append_next()
                return all(trace.exists() and any(syncs(trace)) for trace in traces)

            wait_until(is_attached)
            spans.clear()
            for _ in range(APPENDS):
                append_next()
            wait_until(lambda: all(max(syncs(trace)) > spans[-1][0] for trace in traces))
        finally:
            for tracer in tracers:
                tracer.terminate()
                tracer.wait(SECONDS)
    done = [list(syncs(trace)) for trace in traces]
    for began, ended in spans:
        have = sum(any(began <= at <= ended for at in of_server) for of_server in done)
        assert have >= servers.needed
