import sys
from pathlib import Path

import pytest

from tests.benchmarks import keys
from tests.benchmarks.job_queues import PEERS, installed_queues, open_postroom
from tests.benchmarks.workers import Size, latencies_ms, throughput

ROOT = Path(__file__).parents[2]


INSTALLED = [name for name in PEERS if name != "oban" or sys.version_info >= (3, 12)]


def test_every_peer_that_has_this_python_is_installed_for_development() -> None:
    told: list[str] = []
    assert [*installed_queues(told.append)] == ["postroom", *INSTALLED]
    assert len(told) == len(PEERS) - len(INSTALLED)


@pytest.mark.parametrize("name", ["postroom", *INSTALLED])
async def test_a_worker_is_measured_by_the_jobs_that_it_handles(name: str, postgres_store: str) -> None:
    open_queue = installed_queues(lambda _: None)[name]
    assert await throughput(open_queue, postgres_store, concurrency=4, size=Size(jobs=20)) > 0


async def test_a_latency_is_the_time_from_a_send_in_another_process_to_the_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)  # the spawned process imports tests.benchmarks
    store = str(tmp_path / "store.db")
    values = await latencies_ms(open_postroom, "postroom", store, rate=200, count=10)
    assert len(values) == 9
    assert 0 < values[0] <= values[-1]


@pytest.mark.extended
@pytest.mark.parametrize(("system", "in_order"), [("postgres.ordered", True), ("postgres.plain", False)])
async def test_the_benchmark_sees_whether_a_dead_consumer_breaks_the_order_of_its_keys(
    system: str, in_order: bool, postgres_store: str
) -> None:
    async with keys.open_queue(system, postgres_store) as queue:
        overtakes, disorder, _ = await keys.die(queue)
    assert (overtakes == disorder == 0) is in_order
