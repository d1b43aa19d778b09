"""What an ordered worker has in hand while the database is slow."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from uuid import UUID

import pytest

from postroom.adapters.nats.ordered_stream import JetStreamOrderedStream
from postroom.adapters.postgres.messaging.inbox_queue import PostgresInboxQueue
from postroom.adapters.system.clock import SystemClock
from postroom.application.inbox.ordered_source import OrderedSource, sharing
from postroom.application.ports.inbox import NewMessage, Retry
from postroom.application.ports.source import SourceMessage, StreamState
from postroom.domain.errors import Unavailable
from tests.support.waiting import within

STATE = StreamState("first", 0, 0)
LONG_MS = 600_000


class QueueWithSlowSettlements(PostgresInboxQueue):
    """A queue that settles nothing until it may."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "SHOP/sea")
        self.may_settle = asyncio.Event()

    async def settle(self, settled: Collection[int], retries: Collection[Retry]) -> None:
        await within(self.may_settle.wait())
        await super().settle(settled, retries)


class _Stream(JetStreamOrderedStream):
    """A stream of which only the state is known: the test adds to the queue itself."""

    def __init__(self) -> None: ...

    async def state(self) -> StreamState:
        return STATE

    async def read(self, after: int, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        await asyncio.sleep(wait_ms / 1_000)
        return []


@pytest.fixture
async def queue(messaging_database: str) -> AsyncIterator[QueueWithSlowSettlements]:
    queue = QueueWithSlowSettlements(messaging_database)
    yield queue
    await queue.close()


async def opened(queue: PostgresInboxQueue) -> OrderedSource:
    source = OrderedSource(
        queue, _Stream(), lambda _: UUID(int=0), SystemClock(), lease_ms=LONG_MS, ack_wait_ms=LONG_MS
    )
    await source.open()
    source._may_read = False  # nobody reads the stream, so a fetch need not wait for it
    return source


async def add(queue: PostgresInboxQueue, sequence: int, lane: int) -> None:
    message = SourceMessage("shop.x", b"1", {}, 1, str(sequence), None)
    assert await queue.add(sequence - 1, sequence, [NewMessage(lane, lane, message)])


async def sequences(source: OrderedSource, limit: int = 10) -> list[str]:
    return [message.sequence for message in await source.fetch(limit, 0)]


@pytest.mark.parametrize("delay_ms", [LONG_MS, 0], ids=["for a while", "at once"])
async def test_nothing_of_its_lane_is_in_hand_while_a_failure_is_being_written(
    queue: QueueWithSlowSettlements, delay_ms: int
) -> None:
    source = await opened(queue)
    await add(queue, 1, lane=5)
    await add(queue, 2, lane=6)
    (first, _) = await source.fetch(10, 0)
    writing = asyncio.create_task(source.nack([first], delay_ms))
    await asyncio.sleep(0)
    await add(queue, 3, lane=5)
    await add(queue, 4, lane=7)
    if delay_ms:
        assert await sequences(source) == ["4"]
        queue.may_settle.set()
        await writing
        assert await sequences(source) == []
    else:
        await writing
        assert await sequences(source) == ["1", "3", "4"]


async def test_what_was_read_ahead_of_a_failure_is_given_back(queue: QueueWithSlowSettlements) -> None:
    source = await opened(queue)
    queue.may_settle.set()
    for sequence, lane in enumerate((5, 6, 5, 6), 1):
        await add(queue, sequence, lane)
    (first,) = await source.fetch(1, 0)
    await source.nack([first], LONG_MS)
    assert await sequences(source) == ["2", "4"]
    assert await sequences(source) == []


async def test_a_message_in_hand_is_not_read_again_until_it_is_settled(
    queue: QueueWithSlowSettlements,
) -> None:
    source = await opened(queue)
    await add(queue, 1, lane=5)
    (first,) = await source.fetch(1, 0)
    await source.ack([first])
    await add(queue, 2, lane=5)
    assert await sequences(source) == ["2"]
    queue.may_settle.set()
    await source.flush()
    assert await sequences(source) == []


async def test_a_message_that_could_not_be_removed_is_delivered_again(
    queue: QueueWithSlowSettlements, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await opened(queue)
    await add(queue, 1, lane=5)
    (first,) = await source.fetch(1, 0)
    queue.may_settle.set()

    async def fail(*_: object) -> None:
        raise Unavailable("The database can't be reached.")

    with monkeypatch.context() as broken:
        broken.setattr(queue, "settle", fail)
        await source.ack([first])
        await source.flush()
    (again,) = await source.fetch(1, 0)
    assert again.sequence == "1"


async def test_a_worker_that_ends_removes_what_it_acknowledged(queue: QueueWithSlowSettlements) -> None:
    source = await opened(queue)
    await add(queue, 1, lane=5)
    async with sharing(source, queue):
        await source.ack(await source.fetch(1, 0))
        asyncio.get_running_loop().call_later(0.1, queue.may_settle.set)
    assert await queue.use() == (0, 0)
