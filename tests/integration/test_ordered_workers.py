"""Ordered workers: the order of each aggregate's messages, with any number of workers."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import msgspec
import pytest

from postroom.adapters.system.clock import SystemClock
from postroom.application.inbox.worker import InboxWorker
from postroom.application.ports.inbox import HandlerRequest
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest, PoisonMessage
from tests.integration import ordered_drill
from tests.integration.inbox_world import CONSUMER, EVENTS, SOON, Handler, World, opened_world
from tests.integration.ordered_drill import Plan
from tests.support.waiting import until, until_answer, within

ORDERED = msgspec.structs.replace(SOON, ordered=True, lease_ms=600)
PATIENT = msgspec.structs.replace(CONSUMER, max_deliver=1_000)


@pytest.fixture
async def world(nats_url: str, messaging_database: str) -> AsyncIterator[World]:
    async with opened_world(nats_url, messaging_database) as world:
        await world.make_streams()
        yield world


class Workers:
    """Workers of one world, which run until they are stopped."""

    def __init__(self, world: World, stack: AsyncExitStack) -> None:
        self._world = world
        self._stack = stack
        self._running: list[tuple[asyncio.Event, asyncio.Task[None]]] = []
        self.all: list[InboxWorker] = []

    async def start(self, handler: Handler, concurrency: int = 10) -> InboxWorker:
        settings = msgspec.structs.replace(ORDERED, concurrency=concurrency)
        worker = await self._stack.enter_async_context(self._world.worker(handler, settings, PATIENT))
        stop = asyncio.Event()
        self._running.append((stop, asyncio.create_task(worker.run(stop))))
        self.all.append(worker)
        return worker

    async def stop(self) -> None:
        for stop, _ in self._running:
            stop.set()
        await asyncio.gather(*(task for _, task in self._running))


@pytest.fixture
async def workers(world: World) -> AsyncIterator[Workers]:
    async with AsyncExitStack() as stack:
        workers = Workers(world, stack)
        yield workers
        await workers.stop()


def partitions(world: World) -> Counter[str]:
    """Return how many partitions each worker owns."""
    return Counter(owner for (owner,) in world.rows("SELECT CAST(worker AS text) FROM inbox_partitions"))


@pytest.mark.parametrize("count", [2, 8])
async def test_any_number_of_workers_keeps_the_order_of_each_aggregate_while_handlers_fail(
    world: World, workers: Workers, count: int
) -> None:
    handled: dict[int, list[int]] = defaultdict(list)
    failed: set[str] = set()

    def handler_of(name: str) -> Handler:
        async def handle(request: HandlerRequest) -> None:
            aggregate, n = request.payload
            await asyncio.sleep(0.001)
            if (aggregate + n) % 5 == 0 and request.message_id not in failed:
                failed.add(request.message_id)
                raise RuntimeError("down")
            if n == 5:
                raise PoisonMessage("no total")
            handled[aggregate].append(n)
            by_worker[name] += 1

        return handle

    by_worker: Counter[str] = Counter()
    for number in range(count):
        await workers.start(handler_of(f"worker {number}"))
    await until(lambda: len(partitions(world)) == count and None not in partitions(world))
    for n in range(10):
        for aggregate in range(20):
            await world.publish((aggregate, n), aggregate=f"o-{aggregate}")
    await until(lambda: by_worker.total() >= 180)
    await until_answer(lambda: settled(world))
    assert set(map(tuple, handled.values())) == {(0, 1, 2, 3, 4, 6, 7, 8, 9)}
    assert len(handled) == 20
    assert failed
    assert len(by_worker) > 1
    assert len(await world.dead_letters()) == 20


async def settled(world: World) -> bool:
    info = await world.stream.consumer_info(EVENTS, CONSUMER.durable)
    return not (
        info.num_pending or info.num_ack_pending or world.rows("SELECT count(*) FROM inbox_queue") != [(0,)]
    )


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "not ordered"])
async def test_a_message_waits_for_the_one_before_it_only_if_the_workers_are_ordered(
    world: World, ordered: bool
) -> None:
    """Without order the second worker handles what comes next, so this test can tell the difference."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    handled: list[int] = []

    async def handler(request: HandlerRequest) -> None:
        if request.payload == 0:
            begun.set()
            await within(go_on.wait())
        handled.append(request.payload)

    settings = msgspec.structs.replace(ORDERED, ordered=ordered, concurrency=10 if ordered else 1)
    await world.publish(0, aggregate="o-1")
    async with world.worker(handler, settings) as one, world.worker(handler, settings) as other:
        stop = asyncio.Event()
        runs = [asyncio.create_task(worker.run(stop)) for worker in (one, other)]
        await within(begun.wait())
        await world.publish(1, aggregate="o-1")
        await world.publish(2, aggregate="another" if ordered else "o-1")
        await until(lambda: 2 in handled)
        go_on.set()
        await until(lambda: len(handled) == 3)
        stop.set()
        await asyncio.gather(*runs)
    assert handled.index(0) < handled.index(1) if ordered else handled == [1, 2, 0]


async def test_workers_that_join_and_leave_share_the_partitions_anew(world: World, workers: Workers) -> None:
    async def handler(request: HandlerRequest) -> None: ...

    await workers.start(handler)
    assert list(partitions(world).values()) == [64]
    async with AsyncExitStack() as stack:
        others = Workers(world, stack)
        await others.start(handler)
        await others.start(handler)
        await until(lambda: sorted(partitions(world).values()) == [20, 22, 22])
        await others.stop()
    await until(lambda: list(partitions(world).values()) == [64])


async def test_once_handles_what_is_there_and_a_message_that_failed_keeps_back_its_aggregate(
    world: World,
) -> None:
    for n in range(4):
        await world.publish(n, aggregate="o-1")
    await world.publish(9, aggregate="o-2")
    handled: list[int] = []
    failures = 2

    async def handler(request: HandlerRequest) -> None:
        nonlocal failures
        if request.payload == 1 and failures:
            failures -= 1
            raise RuntimeError("down")
        handled.append(request.payload)

    settings = msgspec.structs.replace(ORDERED, backoff_base_ms=60_000, backoff_max_ms=60_000)
    async with world.worker(handler, settings) as worker:
        await worker.run(asyncio.Event(), until_idle=True)
    assert sorted(handled) == [0, 9]
    assert world.rows("SELECT sequence, failures > 0 FROM inbox_queue ORDER BY position")[0] == (2, True)
    with pytest.raises(InvalidRequest, match="Set ordered = true"):
        async with world.worker(handler, SOON):
            pass


class LateClock(SystemClock):
    """A clock that a pause of the process moves on."""

    late = 0

    def uptime(self) -> int:
        return super().uptime() + self.late


async def test_a_worker_that_is_paused_after_a_failure_does_not_go_on_with_what_is_behind(
    world: World,
) -> None:
    handled: list[int] = []
    failures = 1
    clock = LateClock()

    async def handler(request: HandlerRequest) -> None:
        nonlocal failures
        if request.payload == 0 and failures:
            failures -= 1
            raise RuntimeError("down")
        handled.append(request.payload)

    for n in range(3):
        await world.publish(n, aggregate="o-1")
    async with world.worker(handler, ORDERED) as worker:
        nack = worker._source.nack

        async def paused_nack(messages: Sequence[SourceMessage], delay_ms: int) -> None:
            clock.late += 3_600_000_000
            await nack(messages, delay_ms)

        worker._clock = clock
        worker._source.nack = paused_nack  # type: ignore[method-assign]  # a pause at the worst moment
        stop = asyncio.Event()
        running = asyncio.create_task(worker.run(stop))
        await until(lambda: len(handled) == 3)
        stop.set()
        await running
    assert handled == [0, 1, 2]


async def test_a_consumer_that_was_created_anew_is_read_from_its_start(world: World) -> None:
    handled: list[int] = []

    async def handler(request: HandlerRequest) -> None:
        handled.append(request.payload)

    async def handle_all() -> None:
        async with world.worker(handler, ORDERED) as worker:
            await worker.run(asyncio.Event(), until_idle=True)

    for n in range(3):
        await world.publish(n, aggregate="o-1")
    await handle_all()
    await world.stream.delete_stream(EVENTS)
    await world.stream.add_stream(name=EVENTS, subjects=["shop.event.>"])
    await world.publish(3, aggregate="o-1")
    await handle_all()
    assert handled == [0, 1, 2, 3]


@pytest.mark.extended
async def test_handlers_by_type_keep_the_order_while_workers_are_killed_paused_and_stopped(
    nats_url: str, messaging_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 5 pauses a worker beyond its lease, stops one and kills two."""
    monkeypatch.setattr(ordered_drill, "PAUSE_SECONDS", 3.0)
    plan = Plan(1_000, 2, seed=5, by_type=True, disturbances=5, aggregates=50, dead_every=97, handler_ms=100)
    assert await ordered_drill.drill(plan, nats_url, messaging_database) == []
