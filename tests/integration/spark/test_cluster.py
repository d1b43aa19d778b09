"""A rebuild on a cluster of two workers, which have nothing of ours but the bundle that is shipped."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import pytest
from pyspark.sql import SparkSession

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.queries import open_read_models
from postroom.adapters.compose.reports import make_report, whatif_report
from postroom.application.messages import NewMessage
from postroom.application.ports.dead_letters import DeadLetterFilter
from postroom.application.ports.read_models import BacklogFilter
from postroom.domain.policy_grid import policy_grid
from postroom.domain.search import EventFilter
from postroom.projections.spark.options import LogSelection
from tests.integration.spark.cluster import Bundle, Job
from tests.projections.histories import STORY, VARIED, live, rebuild
from tests.support.fixtures import CreateDatabase
from tests.support.servers.spark import JVM_SECONDS, SparkCluster
from tests.support.waiting import wait_until

SETTLED, READY, BATCH = 20_000, 4_000, 250
TOPIC, PASSWORD = "orders", "open-sesame"
PAYLOAD = b"a payload of a hundred bytes, more or less, as an order of two items may have them".ljust(100)


class Past(NamedTuple):
    """A store with more data than tasks may send a driver, and what one process makes of it."""

    store: str
    rows: list[Any]


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
    url = urlsplit(create_shared_database(postgres_store_template))
    store = url._replace(netloc=f"{url.username}:{PASSWORD}@{url.hostname}:{url.port}").geturl()
    live(store, "small@test", [*STORY, *VARIED])
    asyncio.run(fill(store))
    rebuild(store)
    return Past(store, rows(store))


async def fill(store: str) -> None:
    async with open_mailbox(store, mailbox="main@test") as mailbox:
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
    command = ("report.py", "whatif", *policies, "--json", "--by-topic", "--mailbox", "small@test")
    with Job(bundle, cluster, tmp_path, *command, store=past.store, is_shipped=True) as job:
        rows_of_job = job.result()["rows"]
    report = whatif_report(past.store, grid)
    small = LogSelection("small@test")
    local = make_report(past.store, report, selection=small, engine="local", parameters={"by_topic": True})
    assert rows_of_job == local.to_pylist() != []


@pytest.mark.extended
def test_workers_of_which_one_is_killed_build_what_one_process_builds_and_show_neither_rows_nor_password(
    past: Past, bundle: Bundle, cluster: SparkCluster, tmp_path: Path
) -> None:
    victim, _ = cluster.workers
    with Job(bundle, cluster, tmp_path, "rebuild.py", "--json", store=past.store) as job:
        wait_until(lambda: job.process.poll() is not None or works(victim.pid))
        assert job.process.poll() is None, job.said()
        victim.kill()
        try:
            assert job.result()["rows"]["mailbox"] > SETTLED + READY
        finally:
            victim.start(lambda: cluster.alive() == 2, JVM_SECONDS)
    assert rows(past.store) == past.rows
    events = [event["Event"] for event in job.events()]
    assert events.count("SparkListenerExecutorAdded") >= len(cluster.workers)
    assert "SparkListenerExecutorRemoved" in events
    # The rows are hundreds of times more; the driver's spark.driver.maxResultSize would refuse them, too.
    assert max(task["Task Metrics"]["Result Size"] for task in job.tasks()) < 20_000
    assert PASSWORD not in job.said() + json.dumps([*job.events(), cluster.status()])


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
    children: list[str] = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            children += (thread / "children").read_text().split()
    return max((1 + generations(int(child)) for child in children), default=0)
