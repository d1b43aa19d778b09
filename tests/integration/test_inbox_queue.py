"""The queue of ordered workers in PostgreSQL."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import psycopg
import pytest

from postroom.adapters.postgres.messaging.inbox import PostgresInbox
from postroom.adapters.postgres.messaging.inbox_queue import PostgresInboxQueue
from postroom.application.inbox.request import PARTITIONS
from postroom.application.ports.inbox import NewMessage, QueuedMessage, Retry
from postroom.application.ports.source import Headers, SourceMessage, StreamState
from postroom.domain.errors import Unavailable
from tests.support.waiting import until_answer

STATE = StreamState("first", 0, 0)
LONG_MS = 600_000

Queues = Callable[[], PostgresInboxQueue]


@pytest.fixture
async def queues(messaging_database: str) -> AsyncIterator[Queues]:
    """Open the same queue once more, as another worker does."""
    opened: list[PostgresInboxQueue] = []

    def open_() -> PostgresInboxQueue:
        opened.append(PostgresInboxQueue(messaging_database, "SHOP/sea"))
        return opened[-1]

    yield open_
    for queue in opened:
        await queue.close()


async def joined(queues: Queues, lease_ms: int = LONG_MS) -> PostgresInboxQueue:
    queue = queues()
    await queue.open(STATE)
    await queue.renew(lease_ms)
    await queue.claim()
    return queue


def new(sequence: int, lane: int) -> NewMessage:
    headers = Headers([("Aggregate-Id", "ü"), ("X", "1"), ("X", "2")])
    return NewMessage(
        lane % PARTITIONS, lane, SourceMessage("shop.\x00", b"\x00\xff", headers, 1, str(sequence), None)
    )


async def add(queue: PostgresInboxQueue, *lanes: int, after: int = 0) -> None:
    messages = [new(after + at, lane) for at, lane in enumerate(lanes, 1)]
    assert await queue.add(after, after + len(lanes), messages)


async def sequences(queue: PostgresInboxQueue, in_hand: Sequence[int] = ()) -> list[str]:
    return [each.message.sequence for each in await queue.next(10, in_hand, ())]


def retry(queued: QueuedMessage, delay_ms: int) -> Retry:
    return Retry(queued.position, queued.partition, queued.epoch, delay_ms)


async def test_messages_come_back_as_they_were_in_the_order_of_the_stream(queues: Queues) -> None:
    queue = await joined(queues)
    await add(queue, 5, -7, 5)
    first, second, third = await queue.next(10, (), ())
    assert [first.message.sequence, second.message.sequence, third.message.sequence] == ["1", "2", "3"]
    assert (first.lane, second.lane, second.partition) == (5, -7, 57)
    assert first.position < second.position < third.position
    assert (first.message.subject, first.message.data) == ("shop.\x00", b"\x00\xff")
    assert first.message.header_pairs == [("Aggregate-Id", "ü"), ("X", "1"), ("X", "2")]
    assert (await queue.next(1, [first.position], ()))[0] == second
    assert await queue.next(10, (), [5, 57]) == []
    await queue.settle([first.position, second.position], [])
    assert await sequences(queue) == ["3"]


async def test_the_backlog_counts_messages_by_partition_with_the_first_of_each(
    queues: Queues, messaging_database: str
) -> None:
    queue = await joined(queues)
    await add(queue, 5, 7, 69, 5)
    (first, *_) = await queue.next(10, (), ())
    await queue.settle([first.position], [])
    inbox = PostgresInbox(messaging_database)
    five, seven = await inbox.queue_backlog()
    assert (five.consumer, five.partition, five.count, five.first_sequence) == ("SHOP/sea", 5, 2, 3)
    assert (seven.partition, seven.count, seven.first_sequence) == (7, 1, 2)
    with psycopg.connect(messaging_database) as connection:
        ((added,),) = connection.execute("SELECT DISTINCT extract(epoch FROM added_at) FROM inbox_queue")
    assert five.oldest_at == seven.oldest_at == round(added * 1_000_000)
    assert await inbox.queue_backlog("SHOP/sea") == [five, seven]
    assert await inbox.queue_backlog("SHOP/other") == []
    with psycopg.connect(messaging_database) as connection:
        connection.execute("ALTER TABLE inbox_queue DROP COLUMN added_at")
    with pytest.raises(Unavailable, match="has no inbox of this version: column"):
        await inbox.queue_backlog()
    await inbox.close()


async def test_a_long_partition_does_not_keep_the_others_from_being_read(queues: Queues) -> None:
    queue = await joined(queues)
    await add(queue, *[5] * 40, 7)
    first = await queue.next(30, (), ())
    assert [each.message.sequence for each in first] == [*map(str, range(1, 17)), "41"]
    rest = await queue.next(30, [each.position for each in first], ())
    assert [each.message.sequence for each in rest] == [*map(str, range(17, 33))]


async def test_messages_are_added_only_right_after_the_last_one(queues: Queues) -> None:
    one, other = await joined(queues), await joined(queues)
    await add(one, 1, 2)
    assert not await other.add(0, 1, [new(1, 1)])
    assert not await other.add(3, 4, [new(4, 1)])
    await add(other, 3, after=2)
    assert (await asyncio.gather(*(each.add(3, 4, [new(4, 4)]) for each in (one, other) * 5))).count(
        True
    ) == 1
    assert await one.use() == (4, 2)


async def test_one_worker_at_a_time_has_the_turn_to_add(queues: Queues) -> None:
    one, other = await joined(queues), await joined(queues)
    await add(one, 1, 2)
    turn = await one.take_turn(LONG_MS, 1)
    assert turn is not None
    assert (turn.sequence, turn.queued) == (2, 1)
    assert await other.take_turn(LONG_MS, 10) is None
    assert await one.take_turn(1, 10) is not None

    async def has_turn() -> bool:
        return await other.take_turn(LONG_MS, 10) is not None

    await until_answer(has_turn)
    await other.leave()
    assert await one.take_turn(LONG_MS, 10) is not None


async def test_a_message_that_waits_keeps_back_its_lane_only(queues: Queues) -> None:
    queue = await joined(queues)
    await add(queue, 1, 1, 65, 1, 2)  # lanes 1 and 65 have the same partition
    first, second = (await queue.next(10, (), ()))[:2]
    await queue.settle([], [retry(first, LONG_MS)])
    assert await sequences(queue) == ["3", "5"]
    await queue.settle([], [retry(first, 0)])
    assert await sequences(queue) == ["1", "2", "3", "4", "5"]
    assert (await queue.next(1, (), ()))[0].failures == 2
    assert (await queue.next(1, (), ()))[0].message.delivered == 3
    await queue.settle([first.position], [retry(second, LONG_MS)])
    assert await sequences(queue) == ["3", "5"]


async def test_a_worker_that_does_not_renew_its_lease_loses_its_partitions_and_can_postpone_nothing(
    queues: Queues,
) -> None:
    stale = await joined(queues, lease_ms=1)
    await add(stale, 1, 2)
    (queued, *_) = await stale.next(10, (), ())
    other = queues()
    await other.open(STATE)
    await other.renew(LONG_MS)

    async def owns_all() -> bool:
        return len((await other.claim()).epochs) == PARTITIONS

    await until_answer(owns_all)
    assert await stale.next(10, (), ()) == []
    await stale.settle([], [retry(queued, LONG_MS)])
    assert await sequences(other) == ["1", "2"]
    await stale.settle([queued.position], [])  # it was settled, whoever says so
    assert await sequences(other) == ["2"]


async def test_workers_claim_their_share_and_what_others_release(queues: Queues) -> None:
    one, other = await joined(queues), await joined(queues)
    ownership = await one.claim()
    assert (len(ownership.epochs), ownership.workers) == (64, 2)
    assert (await other.claim()).epochs == {}
    await one.release(range(40, 64))
    assert len((await other.claim()).epochs) == 24
    assert len((await one.claim()).epochs) == 40
    await one.leave()
    assert (await other.claim()) == await other.claim()
    epochs = (await other.claim()).epochs
    assert len(epochs) == PARTITIONS
    assert {epochs[0], epochs[63]} == {2}


async def test_a_stream_that_was_created_anew_is_read_from_its_floor(queues: Queues) -> None:
    old, newer = await joined(queues), queues()
    await add(old, 1, 2, 3)
    await newer.open(StreamState("second", 0, 0))
    assert await old.take_turn(LONG_MS, 10) is None
    assert not await old.add(3, 4, [new(4, 1)])
    turn = await newer.take_turn(LONG_MS, 10)
    assert turn is not None
    assert (turn.sequence, turn.queued) == (0, 3)
    await add(newer, 4)
    assert await sequences(old) == ["1", "2", "3", "1"]


async def test_a_stream_that_was_restored_is_read_from_its_floor(queues: Queues) -> None:
    queue = await joined(queues)
    await add(queue, 1, 2, 3)
    await queue.open(StreamState("first", 1, 3))
    turn = await queue.take_turn(LONG_MS, 10)
    assert turn is not None
    assert turn.sequence == 3
    await queue.open(StreamState("first", 1, 2))
    turn = await queue.take_turn(LONG_MS, 10)
    assert turn is not None
    assert turn.sequence == 1


async def test_a_database_without_the_queue_says_how_to_get_one(empty_database: str) -> None:
    queue = PostgresInboxQueue(empty_database, "SHOP/sea")
    assert await queue.use() == (0, 0)
    with pytest.raises(Unavailable, match="postroom migrate --messaging URL"):
        await queue.open(STATE)
    await queue.close()
    await queue.close()


async def test_the_queue_of_another_consumer_is_another(queues: Queues, messaging_database: str) -> None:
    await add(await joined(queues), 1, 2)
    other = PostgresInboxQueue(messaging_database, "SHOP/billing")
    await other.open(STATE)
    await other.renew(LONG_MS)
    assert len((await other.claim()).epochs) == PARTITIONS
    assert await other.next(10, (), ()) == []
    await other.close()
    with psycopg.connect(messaging_database) as connection:
        assert connection.execute("SELECT count(*) FROM inbox_partitions").fetchall() == [(128,)]
