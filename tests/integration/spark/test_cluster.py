"""A rebuild on a cluster of two workers, which have nothing of ours but the bundle that is shipped."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import pytest
from pyspark.sql import SparkSession

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.archive import build_segments, open_archive
from postroom.adapters.compose.projections import rebuild_projections
from postroom.adapters.compose.queries import open_read_models
from postroom.adapters.compose.reports import make_report, whatif_report
from postroom.application.messages import NewMessage
from postroom.application.ports.dead_letters import DeadLetterFilter
from postroom.application.ports.read_models import BacklogFilter
from postroom.domain.policy_grid import policy_grid
from postroom.domain.search import EventFilter
from postroom.projections.reports.report import REPORTS
from postroom.projections.spark.options import LogSelection
from tests.integration.spark.cluster import Bundle, Job
from tests.projections.histories import STORY, VARIED, live, rebuild
from tests.support.fixtures import CreateDatabase
from tests.support.servers.spark import JVM_SECONDS, SparkCluster
from tests.support.waiting import wait_until

SETTLED, READY, BATCH = 20_000, 4_000, 250
TOPIC, PASSWORD = "orders", "open-sesame"
MAIN, SMALL = "main@test", "small@test"
PAYLOAD = b"a payload of a hundred bytes, more or less, as an order of two items may have them".ljust(100)


ELASTIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
}


class Past(NamedTuple):
    """A store with more data than tasks may send a driver, and what one process makes of it."""

    store: str
    rows: list[Any]
    counts: dict[str, int]
    archive: str = ""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.build(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def past(
    create_shared_database: CreateDatabase, postgres_store_template: str, spark: SparkSession
) -> Past:  # in PostgreSQL, as the workers of a cluster on many machines share no file
    store = with_password(create_shared_database(postgres_store_template))
    live(store, SMALL, [*STORY, *VARIED])
    asyncio.run(fill(store))
    counts = rebuild(store).rows
    return Past(store, rows(store), counts)


@pytest.fixture(scope="module")
def archived(
    past: Past, create_shared_database: CreateDatabase, tmp_path_factory: pytest.TempPathFactory
) -> Past:
    """A copy with segments of 50,000, 10,000 and some 100 records; the log lacks the first 60,000."""
    store = with_password(create_shared_database(past.store))
    folder = str(tmp_path_factory.mktemp("segments"))
    for mailbox in (MAIN, SMALL):
        build_segments(store, mailbox, open_archive(folder), is_whole=mailbox == SMALL)
    asyncio.run(delete_old_events(store, folder))
    assert [each.last // 1_000 for each in open_archive(folder).segments(MAIN)] == [49, SETTLED * 3 // 1_000]
    counts = rebuild_projections(store, archive=folder, engine="local").rows
    assert counts["mailbox"] > SETTLED + READY
    return Past(store, rows(store), counts, folder)


def with_password(store: str) -> str:
    url = urlsplit(store)
    return url._replace(netloc=f"{url.username}:{PASSWORD}@{url.hostname}:{url.port}").geturl()


async def delete_old_events(store: str, archive: str) -> None:
    async with open_mailbox(store, mailbox=MAIN, archive=archive) as mailbox:
        await mailbox.delete_old_events(time.time_ns() // 1_000)


async def fill(store: str) -> None:
    async with open_mailbox(store, mailbox=MAIN) as mailbox:
        for count, is_settled in ((SETTLED, True), (READY, False)):
            for _ in range(0, count, BATCH):
                await mailbox.send_batch([NewMessage(topic=TOPIC, payload=PAYLOAD)] * BATCH)
                if is_settled:
                    received = await mailbox.receive_messages(TOPIC, max_messages=BATCH)
                    await mailbox.ack_messages([each.receipt for each in received])


@pytest.mark.extended
def test_the_environment_of_the_bundle_has_no_postroom_but_what_its_code_needs(bundle: Bundle) -> None:
    def imports(module: str, *path: Path) -> subprocess.CompletedProcess[str]:
        script = f"import sys; sys.path += {[*map(str, path)]}; import {module}; print({module}.__file__)"
        return subprocess.run(
            [bundle.python, "-I", "-c", script], capture_output=True, text=True, check=False, cwd="/"
        )

    alone = imports("postroom")
    assert alone.returncode != 0
    assert "No module named 'postroom'" in alone.stderr
    shipped = imports("postroom.projections.rebuild", bundle.code)
    assert shipped.returncode == 0, shipped.stderr
    assert shipped.stdout.startswith(f"{bundle.code}/")


@pytest.mark.extended
def test_a_report_by_workers_that_have_only_the_bundle_is_that_of_one_process(
    past: Past, bundle: Bundle, cluster: SparkCluster, tmp_path: Path
) -> None:
    grid = policy_grid(max_attempts=[1, 3], visibility_ms=[1_000])
    policies = ("--attempts", "1,3", "--visibility", "1s")
    command = ("report.py", "whatif", *policies, "--json", "--by-topic", "--mailbox", SMALL)
    with Job(bundle, cluster, tmp_path, *command, store=past.store, is_shipped=True) as job:
        rows_of_job = job.result()["rows"]
    report = whatif_report(past.store, grid)
    small = LogSelection(SMALL)
    local = make_report(past.store, report, selection=small, engine="local", parameters={"by_topic": True})
    assert rows_of_job == local.to_pylist() != []


@pytest.mark.extended
@pytest.mark.parametrize("log", ["past", "archived"])
def test_workers_of_which_one_is_killed_build_what_one_process_builds_and_show_neither_rows_nor_password(
    log: str, request: pytest.FixtureRequest, bundle: Bundle, cluster: SparkCluster, tmp_path: Path
) -> None:
    past: Past = request.getfixturevalue(log)
    victim, _ = cluster.workers
    command = ("rebuild.py", "--json", "--archive", past.archive)
    settings = ELASTIC if past.archive else {}
    with Job(bundle, cluster, tmp_path, *command, store=past.store, settings=settings) as job:
        kill_when(lambda: works(victim.pid), job, victim.kill)
        try:
            assert job.result()["rows"] == past.counts
        finally:
            victim.start(lambda: cluster.alive() == 2, JVM_SECONDS)
    assert rows(past.store) == past.rows
    assert job.lost()
    events = [event["Event"] for event in job.events()]
    assert events.count("SparkListenerExecutorAdded") >= len(cluster.workers)
    assert "SparkListenerExecutorRemoved" in events
    # The rows are hundreds of times more; the driver's spark.driver.maxResultSize would refuse them, too.
    assert max(task["Task Metrics"]["Result Size"] for task in job.tasks()) < 20_000
    assert PASSWORD not in job.said() + json.dumps([*job.events(), cluster.status()])


@pytest.mark.extended
def test_workers_that_come_and_go_verify_read_models_with_the_archive(
    archived: Past, bundle: Bundle, cluster: SparkCluster, tmp_path: Path
) -> None:
    command = ("verify.py", "--json", "--archive", archived.archive)
    with Job(bundle, cluster, tmp_path, *command, store=archived.store, settings=ELASTIC) as job:
        verified = job.result()
    assert verified["skipped"] == []
    assert verified["models"]["mailbox"]["rows"] > SETTLED + READY


@pytest.mark.extended
def test_a_report_of_which_an_executor_is_killed_while_it_scans_segments_is_that_of_one_process(
    archived: Past, bundle: Bundle, cluster: SparkCluster, tmp_path: Path
) -> None:
    _, worker = cluster.workers
    earlier = children(worker.pid)

    def kill_executor() -> None:
        for pid in busy_executors(worker.pid, earlier):
            os.kill(pid, signal.SIGKILL)

    command = ("report.py", "latency", "--json", "--archive", archived.archive)
    with Job(bundle, cluster, tmp_path, *command, store=archived.store) as job:
        kill_when(lambda: busy_executors(worker.pid, earlier), job, kill_executor)
        rows_of_job = job.result()["rows"]
    assert any("FileScanRDD" in name for name in job.lost()), job.lost()
    local = make_report(
        archived.store,
        REPORTS["latency"],
        selection=LogSelection(),
        archive=archived.archive,
        engine="local",
    ).to_pylist()
    assert sum(row["messages"] for row in local) > SETTLED
    assert rows_of_job == [row | {"start": f"{row['start'].isoformat()}Z"} for row in local]


def kill_when(is_time: Callable[[], object], job: Job, kill: Callable[[], None]) -> None:
    """Kill processes of a job while it runs."""
    wait_until(lambda: job.process.poll() is not None or is_time())
    assert job.process.poll() is None, job.said()
    kill()


def rows(store: str) -> list[Any]:
    """Return all that the read models of a store serve."""
    with closing(open_read_models(store)) as models:
        found: list[Any] = [*models.backlog(BacklogFilter(limit=1_000)).items]
        found += models.dead_letters(DeadLetterFilter(limit=1_000)).items
        wanted = EventFilter(limit=1_000)
        while True:
            page = models.search(wanted)
            found += page.items
            if page.next_cursor is None:
                return found
            wanted = msgspec.structs.replace(wanted, cursor=page.next_cursor)


def works(pid: int) -> bool:
    """Tell whether a worker has an executor with a Python process for a task."""
    return generations(pid) == 3  # the executor, its Python daemon, and what that forks


def generations(pid: int) -> int:
    """Return how many generations of processes descend from one."""
    return max((1 + generations(child) for child in children(pid)), default=0)


def children(pid: int) -> set[int]:
    """Return the processes that a process has started."""
    started: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            started |= set(map(int, (thread / "children").read_text().split()))
    return started


def busy_executors(worker: int, earlier: set[int]) -> set[int]:
    """Return the executors of a worker, besides earlier ones, that have begun a task."""
    return {pid for pid in children(worker) - earlier if "Executor task l" in thread_names(pid)}


def thread_names(pid: int) -> set[str]:
    """Return the beginnings of the names of a process's threads."""
    names = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):
            names.add(thread.read_text().strip())
    return names
