from pathlib import Path

import pytest

from tests.benchmarks.job_queues import PEERS, installed_queues, open_postroom
from tests.benchmarks.workers import Size, latencies_ms, throughput

ROOT = Path(__file__).parents[2]


def test_every_peer_is_installed_for_development() -> None:
    told: list[str] = []
    assert [*installed_queues(told.append)] == ["postroom", *PEERS]
    assert told == []


@pytest.mark.parametrize("name", ["postroom", *PEERS])
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
