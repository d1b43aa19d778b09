"""The registry of workers: it fades, forgets, and is bounded whoever reports what."""

from dataclasses import dataclass
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from postroom.application.worker_reports import (
    CAPACITY,
    FORGET_MS,
    MAX_HANDLERS,
    STALE_MS,
    HandlerState,
    WorkerRegistry,
    WorkerState,
    check_worker,
)
from postroom.domain.errors import InvalidRequest

HANDLER = HandlerState("orders", "ship", "shop/ship@host-1:7", 4)
WORKER = WorkerState("shop", "host-1", 7, "1.2", "0.1", 5_000, (HANDLER,))
YEAR_2026_US = 1_767_225_600_000_000


@dataclass
class LogTime:
    us: int = YEAR_2026_US

    def __call__(self) -> int:
        return self.us

    def advance(self, ms: int) -> None:
        self.us += ms * 1_000


@pytest.fixture
def now() -> LogTime:
    return LogTime()


@pytest.fixture
def registry(now: LogTime) -> WorkerRegistry:
    return WorkerRegistry(now)


def report(
    registry: WorkerRegistry, worker: WorkerState = WORKER, principal: str | None = None, id_: str = ""
) -> None:
    registry.report(id_ or str(uuid4()), worker, principal, ended=False)


def test_a_worker_that_falls_silent_fades_and_is_forgotten_after_an_hour(
    registry: WorkerRegistry, now: LogTime
) -> None:
    report(registry)
    now.advance(STALE_MS)
    assert not registry.list_workers()[0].is_stale
    now.advance(1)
    report(registry, replace(WORKER, name="zebra"))
    assert [(each.name, each.is_stale, each.silent_ms) for each in registry.list_workers()] == [
        ("zebra", False, 0),
        ("shop", True, STALE_MS + 1),
    ]
    now.advance(FORGET_MS - STALE_MS - 2)
    assert len(registry.list_workers()) == 2
    now.advance(1)
    assert [each.name for each in registry.list_workers()] == ["zebra"]


def test_one_that_reports_again_is_not_stale_any_more_and_keeps_the_time_of_its_start(
    registry: WorkerRegistry, now: LogTime
) -> None:
    report(registry, id_="one")
    (first,) = registry.list_workers()
    assert first.started_at == "2025-12-31T23:59:55.000000Z"
    now.advance(STALE_MS * 2)
    report(registry, replace(WORKER, uptime_ms=WORKER.uptime_ms + STALE_MS * 2), id_="one")
    assert registry.list_workers() == [first]


def test_a_log_time_that_goes_back_makes_nobody_stale(registry: WorkerRegistry, now: LogTime) -> None:
    report(registry)
    now.advance(-FORGET_MS)
    (worker,) = registry.list_workers()
    assert (worker.silent_ms, worker.is_stale) == (0, False)


def test_a_principal_replaces_and_ends_no_worker_of_another(registry: WorkerRegistry) -> None:
    report(registry, principal="shop", id_="one")
    report(registry, replace(WORKER, name="forged"), principal="mallory", id_="one")
    registry.report("one", WORKER, None, ended=True)
    assert [(each.name, each.principal) for each in registry.list_workers()] == [
        ("forged", "mallory"),
        ("shop", "shop"),
    ]


def test_thousands_of_workers_that_come_and_go_leave_the_latest(registry: WorkerRegistry) -> None:
    for number in range(3 * CAPACITY):
        report(registry, replace(WORKER, process=number))
    workers = registry.list_workers()
    assert len(workers) == CAPACITY // 2  # each has a handler
    assert min(each.process for each in workers) == 3 * CAPACITY - len(workers)


def test_one_principal_displaces_no_workers_of_others(registry: WorkerRegistry) -> None:
    for number in range(10):
        report(registry, replace(WORKER, process=number), principal="shop")
    crowd = replace(WORKER, handlers=(HANDLER,) * MAX_HANDLERS)
    for _ in range(CAPACITY):
        report(registry, crowd, principal="mallory")
    workers = registry.list_workers()
    assert sum(each.principal == "shop" for each in workers) == 10
    assert sum(1 + len(each.handlers) for each in workers) <= CAPACITY


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "a", "b"]),
            st.integers(0, 5),
            st.integers(0, MAX_HANDLERS),
            st.integers(-FORGET_MS, 2 * FORGET_MS),
            st.booleans(),
        ),
        max_size=50,
    )
)
def test_the_registry_lists_each_worker_once_within_its_bounds(
    reports: list[tuple[str | None, int, int, int, bool]],
) -> None:
    now = LogTime()
    registry = WorkerRegistry(now)
    for principal, id_, handlers, pause_ms, ended in reports:
        now.advance(pause_ms)
        worker = replace(WORKER, handlers=(HANDLER,) * handlers)
        registry.report(str(id_), worker, principal, ended=ended)
        workers = registry.list_workers()
        keys = [(each.principal, each.id) for each in workers]
        assert len(set(keys)) == len(keys)
        assert ((principal, str(id_)) in keys) is not ended
        assert sum(1 + len(each.handlers) for each in workers) <= CAPACITY


@pytest.mark.parametrize(
    "worker",
    [
        None,
        {"name": "shop"},
        replace(WORKER, name=""),
        replace(WORKER, name="n" * 256),
        replace(WORKER, name=7),
        replace(WORKER, host="\ud800"),
        replace(WORKER, version=None),
        replace(WORKER, process=True),
        replace(WORKER, process=1 << 63),
        replace(WORKER, uptime_ms=-1),
        replace(WORKER, uptime_ms=1 << 62),
        replace(WORKER, handlers="orders"),
        replace(WORKER, handlers=(None,)),
        replace(WORKER, handlers=(HANDLER,) * (MAX_HANDLERS + 1)),
        replace(WORKER, handlers=(replace(HANDLER, topic=""),)),
        replace(WORKER, handlers=(replace(HANDLER, in_use=-1),)),
        replace(WORKER, handlers=(replace(HANDLER, concurrency="4"),)),
    ],
)
def test_a_worker_that_is_malformed_is_refused(worker: object) -> None:
    with pytest.raises(InvalidRequest):
        check_worker(worker)
