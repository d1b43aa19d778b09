"""What every outbox repository promises; an adapter's test inherits the suite and brings its fixtures."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from uuid import UUID, uuid4

import msgspec
import pytest

from postroom.application.outbox.events import decide_on
from postroom.application.ports.outbox import (
    PARTITIONS,
    Backlog,
    Decision,
    Kind,
    OutboxRepository,
    OutboxRow,
)
from postroom.domain.outbox import (
    MS,
    DiscardOutboxEvent,
    MarkFailed,
    MarkPublished,
    OutboxCommand,
    PublishPolicy,
    RetryOutboxEvent,
)
from postroom.domain.record import Event
from tests.support.outboxes import names, order_placed

Record = Callable[..., list[UUID]]
History = Callable[[UUID], list[Event]]
ALL = range(PARTITIONS)
NOW = 2_000_000_000_000_000
LATER = NOW + 3_600_000_000
PUBLISHED = MarkPublished("sea.event.order_placed.v1")


def refused(attempts: int = 20) -> MarkFailed:
    return MarkFailed("no stream", PublishPolicy(attempts), 0.5)


def all_decided(stored: Sequence[OutboxRow], command: OutboxCommand, now: int = NOW) -> list[Decision]:
    return [decide_on(each, command, now) for each in stored]


async def unpublished(repository: OutboxRepository, now: int = NOW, limit: int = 100) -> Sequence[OutboxRow]:
    async with repository.claim(ALL) as claim:
        return await claim.find_unpublished(now, limit)


async def publish(repository: OutboxRepository, limit: int = 100, now: int = NOW) -> None:
    async with repository.claim(ALL) as claim:
        found = await claim.find_unpublished(now, limit)
        await claim.mark_published(all_decided(found, PUBLISHED, now))


async def refuse(repository: OutboxRepository, limit: int = 100, attempts: int = 20) -> None:
    async with repository.claim(ALL) as claim:
        found = await claim.find_unpublished(NOW, limit)
        await claim.increment_attempts(all_decided(found, refused(attempts)))


async def claimed(repository: OutboxRepository, partitions: Sequence[int]) -> list[int]:
    async with repository.claim(partitions) as claim:
        return sorted(claim.partitions)


def ids(stored: Sequence[OutboxRow]) -> list[UUID]:
    return [each.event.id for each in stored]


def at(year: int) -> datetime:
    return datetime(year, 1, 1, tzinfo=UTC)


class OutboxRepositoryConformance:
    async def test_an_event_is_read_as_it_was_recorded(
        self, repository: OutboxRepository, record: Record
    ) -> None:
        trace = f"00-{'a' * 32}-{'b' * 16}-01"
        about = {"correlation_id": str(uuid4()), "causation_id": "order 1", "traceparent": trace}
        (id_,) = record(order_placed("o-1", 1, event_version=3, **about))
        (found,) = await unpublished(repository)
        event = found.event
        assert (event.id, event.version, event.status, event.publish_attempts) == (id_, 1, "waiting", 0)
        assert (event.aggregate_type, event.aggregate_id) == ("order", "o-1")
        assert (event.event_type, event.event_version) == ("order_placed", 3)
        assert msgspec.structs.asdict(event.correlation) | {"traceparent": event.traceparent} == about
        assert found.payload == b'{"n": 1, "order": "o-1"}'

    async def test_events_are_found_in_the_order_they_were_recorded_whatever_their_clocks_say(
        self, repository: OutboxRepository, record: Record
    ) -> None:
        expected = [
            record(order_placed("o-1", n, occurred_at=at(2020 - n), id=UUID(int=100 - n)))[0]
            for n in range(5)
        ]
        expected += record(*(order_placed("o-1", n, id=UUID(int=50 - n)) for n in range(5)))
        assert ids(await unpublished(repository)) == expected
        assert ids(await unpublished(repository, limit=3)) == expected[:3]

    async def test_a_published_event_is_not_read_again(
        self, repository: OutboxRepository, record: Record, history: History
    ) -> None:
        first, second = record(order_placed("o-1", 1), order_placed("o-1", 2))
        await publish(repository, limit=1)
        assert ids(await unpublished(repository)) == [second]
        assert names(history(first)) == ["OutboxEventRecorded", "OutboxEventPublished"]
        async with repository.claim(ALL) as claim:
            (found,) = await claim.find([first])
        assert (found.event.status, found.event.published_at, found.event.publish_attempts) == (
            "published",
            NOW,
            1,
        )

    async def test_a_refused_event_holds_back_the_later_ones_of_its_aggregate_and_no_others(
        self, repository: OutboxRepository, record: Record
    ) -> None:
        first, *_, other, last = record(
            order_placed("o-1", 1), order_placed("o-1", 2), order_placed("o-2", 1), order_placed("o-1", 3)
        )
        await refuse(repository, limit=1)
        assert ids(await unpublished(repository)) == [other]
        found = await unpublished(repository, now=LATER)
        assert (ids(found)[0], ids(found)[-1], len(found)) == (first, last, 4)
        event = found[0].event
        assert (event.publish_attempts, event.publish_error, event.version) == (1, "no stream", 2)
        assert event.retry_at == NOW + 1_000 * MS

    async def test_an_aggregate_is_its_type_and_its_id(
        self, repository: OutboxRepository, record: Record
    ) -> None:
        record(order_placed("o/1", 1), order_placed("1", 1, aggregate_type="order/o"))
        await refuse(repository, limit=1)
        (found,) = await unpublished(repository)
        assert found.event.aggregate_type == "order/o"

    async def test_a_parked_event_waits_until_an_operator_has_it_tried_again(
        self, repository: OutboxRepository, record: Record, history: History
    ) -> None:
        first, second = record(order_placed("o-1", 1), order_placed("o-1", 2))
        await refuse(repository, limit=1, attempts=1)
        assert await unpublished(repository, now=LATER) == []
        (parked,) = await repository.find_failed(10, only_parked=True)
        assert (parked.id, parked.status) == (first, "parked")

        async with repository.claim(ALL, wait=True) as claim:
            await claim.retry(all_decided(await claim.find([first]), RetryOutboxEvent()))
        assert ids(await unpublished(repository)) == [first, second]
        assert await repository.find_failed(10, only_parked=True) == []
        await publish(repository)
        assert await repository.find_failed(10, only_parked=False) == []
        assert names(history(first)) == [
            "OutboxEventRecorded",
            "OutboxPublishFailed",
            "OutboxEventParked",
            "OutboxEventRetried",
            "OutboxEventPublished",
        ]

    async def test_failed_events_are_listed_oldest_first_and_parked_ones_alone(
        self, repository: OutboxRepository, record: Record
    ) -> None:
        first, second, third = record(*(order_placed(f"o-{n}", 1) for n in range(3)))
        await refuse(repository, limit=1)
        await refuse(repository, limit=1, attempts=1)
        assert [event.id for event in await repository.find_failed(10, only_parked=False)] == [first, second]
        assert [event.id for event in await repository.find_failed(1, only_parked=False)] == [first]
        assert [event.id for event in await repository.find_failed(10, only_parked=True)] == [second]
        assert ids(await unpublished(repository)) == [third]

    async def test_a_discarded_event_leaves_the_outbox_and_its_payload_stays_in_its_history(
        self, repository: OutboxRepository, record: Record, history: History
    ) -> None:
        first, second = record(order_placed("o-1", 1), order_placed("o-1", 2))
        await refuse(repository, limit=1, attempts=1)
        async with repository.claim(ALL, wait=True) as claim:
            found = await claim.find([first])
            payload = found[0].payload
            assert payload is not None
            await claim.discard(all_decided(found, DiscardOutboxEvent("too large", payload)))
        assert ids(await unpublished(repository)) == [second]
        assert await repository.backlog() == Backlog(1, (await unpublished(repository))[0].event.occurred_at)
        last = history(first)[-1]
        assert names([last]) == ["OutboxEventDiscarded"]
        assert last.payload == b'{"n": 1, "order": "o-1"}'  # type: ignore[attr-defined]

    async def test_events_of_other_kinds_are_found_unless_they_wait_for_one_of_these_kinds(
        self, repository: OutboxRepository, record: Record
    ) -> None:
        kinds = [Kind("order", "order_lost", 1), Kind("parcel", "order_placed", 1)]
        lost = {"event_type": "order_lost"}
        _, _, *expected, _, _ = record(
            order_placed("o-1", 1, **lost),
            order_placed("o-1", 2),
            order_placed("o-2", 1),
            order_placed("o-3", 1, **lost, event_version=2),
            order_placed("o-1", 1, **lost, aggregate_type="ship"),
            order_placed("o-2", 2, **lost),
            order_placed("o-4", 1, aggregate_type="parcel"),
        )
        async with repository.claim(ALL) as claim:
            assert ids(await claim.find_besides(NOW, 100, kinds)) == expected
            assert ids(await claim.find_besides(NOW, 2, kinds)) == expected[:2]
        await refuse(repository, limit=3)
        async with repository.claim(ALL) as claim:
            assert ids(await claim.find_besides(NOW, 100, kinds)) == expected[1:]
            assert len(await claim.find_besides(LATER, 100, [])) == 7

    async def test_a_partition_is_claimed_by_one_at_a_time(
        self, repository: OutboxRepository, other: OutboxRepository, record: Record
    ) -> None:
        record(*(order_placed(f"o-{n}", 1) for n in range(100)))
        async with repository.claim([3, 5, 7]) as mine, other.claim(range(8)) as others:
            assert sorted(mine.partitions) == [3, 5, 7]
            assert sorted(others.partitions) == [0, 1, 2, 4, 6]
            found = [set(ids(await each.find_unpublished(NOW, 200))) for each in (mine, others)]
            assert found[0]
            assert found[1]
            assert not found[0] & found[1]
        assert await claimed(other, ALL) == list(ALL)

    async def test_the_partitions_together_hold_every_event(
        self, repository: OutboxRepository, record: Record
    ) -> None:
        expected = record(*(order_placed(f"o-{n}", 1) for n in range(100)))
        found: list[UUID] = []
        for partition in ALL:
            async with repository.claim([partition]) as claim:
                found += ids(await claim.find_unpublished(NOW, 200))
        assert sorted(found) == sorted(expected)

    async def test_a_claim_that_fails_leaves_no_trace(
        self, repository: OutboxRepository, other: OutboxRepository, record: Record, history: History
    ) -> None:
        (id_,) = record(order_placed("o-1", 1))

        async def fail() -> None:
            async with repository.claim(ALL) as claim:
                await claim.mark_published(all_decided(await claim.find([id_]), PUBLISHED))
                raise ConnectionError

        with pytest.raises(ConnectionError):
            await fail()
        assert ids(await unpublished(other)) == [id_]
        assert names(history(id_)) == ["OutboxEventRecorded"]

    async def test_the_backlog_counts_unpublished_events_and_has_the_time_of_the_oldest(
        self, repository: OutboxRepository, record: Record
    ) -> None:
        assert await repository.backlog() == Backlog(0, None)
        record(order_placed("o-1", 1, occurred_at=at(2021)), order_placed("o-1", 2, occurred_at=at(2020)))
        record(order_placed("o-2", 1))
        assert await repository.backlog() == Backlog(3, int(at(2020).timestamp() * 1_000_000))
        await refuse(repository, limit=1, attempts=1)
        assert (await repository.backlog()).count == 3
        await publish(repository)
        assert (await repository.backlog()).count == 2

    async def test_cleaning_removes_old_published_events_with_their_histories_and_nothing_else(
        self, repository: OutboxRepository, record: Record, history: History
    ) -> None:
        old, young, *_ = record(*(order_placed(f"o-{n}", 1) for n in range(4)))
        await publish(repository, limit=1)
        await publish(repository, limit=1, now=LATER)
        await refuse(repository, limit=1, attempts=1)
        assert await repository.delete_published(LATER, 10) == 1
        assert await repository.delete_published(LATER, 10) == 0
        assert history(old) == []
        assert names(history(young)) == ["OutboxEventRecorded", "OutboxEventPublished"]
        assert (await repository.backlog()).count == 2

    async def test_cleaning_is_done_in_batches(self, repository: OutboxRepository, record: Record) -> None:
        record(*(order_placed("o-1", n) for n in range(5)))
        await publish(repository)
        assert [await repository.delete_published(LATER, 2) for _ in range(4)] == [2, 2, 1, 0]

    async def test_no_decisions_write_nothing(
        self, repository: OutboxRepository, record: Record, history: History
    ) -> None:
        (id_,) = record(order_placed("o-1", 1))
        before = await unpublished(repository)
        async with repository.claim(ALL) as claim:
            for write in (claim.mark_published, claim.increment_attempts, claim.retry, claim.discard):
                await write([])
        assert await unpublished(repository) == before
        assert names(history(id_)) == ["OutboxEventRecorded"]

    async def test_closing_twice_is_fine_and_a_closed_repository_opens_again(
        self, repository: OutboxRepository, record: Record
    ) -> None:
        record(order_placed("o-1", 1))
        await repository.close()
        await repository.close()
        assert len(await unpublished(repository)) == 1
