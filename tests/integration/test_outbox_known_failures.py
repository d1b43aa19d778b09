"""How the outboxes of others are known to fail, and that these tests would see it if ours did.

Each check runs on the relay as it is, and on one into which the defect was put.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.adapters.postgres.messaging.outbox import Outbox
from postroom.adapters.postgres.messaging.outbox_repository import PostgresClaim, PostgresOutboxRepository
from postroom.adapters.system.clock import SystemClock
from postroom.application.outbox.relay import OutboxRelay, OutboxSettings, PublishBatch
from postroom.application.ports.outbox import OutboxRow, PublishAck
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.support.memory_stream import MemoryStream
from tests.support.outboxes import CONTEXT, column, numbers, order_placed, record


class ForgetfulStream(MemoryStream):
    """A stream whose deduplication window is always over: what is published twice is there twice."""

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        published = await super().publish(subject, payload, headers)
        self._ids.clear()
        return published


class UnclaimedRepository(PostgresOutboxRepository):
    """The defect: every relay takes every event, as with a plain SELECT of what is unpublished."""

    @asynccontextmanager
    async def claim(self, partitions: Sequence[int], *, wait: bool = False) -> AsyncIterator[PostgresClaim]:
        async with self._transaction() as connection:
            yield PostgresClaim(connection, self._sql, partitions, self._batch_bytes)


class CursorClaim(PostgresClaim):
    """The defect: whatever comes before the last event that was seen is taken for done."""

    last = 0

    async def find_unpublished(self, now: int, limit: int) -> list[OutboxRow]:
        found = await super().find_unpublished(now, limit)
        positions = await self._connection.execute(
            "SELECT id, position FROM outbox_events WHERE id = ANY(%s)", ([each.event.id for each in found],)
        )
        position: dict[UUID, int] = dict(await positions.fetchall())
        found = [each for each in found if position[each.event.id] > CursorClaim.last]
        CursorClaim.last = max([CursorClaim.last, *position.values()])
        return found


class CursorRepository(PostgresOutboxRepository):
    @asynccontextmanager
    async def claim(self, partitions: Sequence[int], *, wait: bool = False) -> AsyncIterator[PostgresClaim]:
        async with super().claim(partitions, wait=wait) as claim:
            yield CursorClaim(claim._connection, claim._sql, claim.partitions, self._batch_bytes)


def new_relay(
    repository: PostgresOutboxRepository, stream: MemoryStream, seed: int = 0, batch: int = 50
) -> OutboxRelay:
    settings = OutboxSettings(batch=batch, backoff_base_ms=1, backoff_max_ms=1)
    return OutboxRelay(repository, stream, SystemClock(), Random(seed).random, CONTEXT, settings=settings)


async def relay_late_commit(url: str, repository: PostgresOutboxRepository) -> list[bytes]:
    """Publish an event while the transaction of an earlier one is open, then go on; return what came."""
    stream = MemoryStream()
    relay = new_relay(repository, stream)
    with psycopg.connect(url) as slow:
        Outbox().record(slow, order_placed("slow", 1))
        record(url, order_placed("quick", 1))
        while await relay.relay_once():
            pass
        assert len(stream.payloads) == 1
    while await relay.relay_once():
        pass
    await repository.close()
    return stream.payloads


async def test_rows_of_a_slow_transaction_are_not_skipped_as_in_watermill_311(
    messaging_database: str,
) -> None:
    repository = PostgresOutboxRepository(messaging_database)
    assert len(await relay_late_commit(messaging_database, repository)) == 2


async def test_a_cursor_over_positions_would_skip_them(
    messaging_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CursorClaim, "last", 0)
    repository = CursorRepository(messaging_database)
    assert len(await relay_late_commit(messaging_database, repository)) == 1


async def relay_in_parallel(
    url: str,
    repository: type[PostgresOutboxRepository],
    stream: MemoryStream,
    *,
    relays: int,
    seed: int,
    batch: int = 50,
) -> None:
    """Run relays beside each other until everything is published, or for 500 rounds."""
    repositories = [repository(url) for _ in range(relays)]
    running = [new_relay(each, stream, seed + n, batch) for n, each in enumerate(repositories)]

    async def run(relay: OutboxRelay) -> None:
        for _ in range(500):
            try:
                await relay.relay_once()
            except Unavailable:
                continue
            if None not in await asyncio.to_thread(column, url, "published_at"):
                return
            await asyncio.sleep(0.001)

    await asyncio.gather(*map(run, running))
    for each in repositories:
        await each.close()


AGGREGATES = [f"o-{n}" for n in range(6)]


async def orders_on_the_stream(
    url: str, repository: type[PostgresOutboxRepository], stream: MemoryStream
) -> dict[str, list[int]]:
    record(url, *(order_placed(AGGREGATES[n % 6], n) for n in range(120)))
    rng = Random(1)

    async def behave(_: str, __: bytes) -> None:
        await asyncio.sleep(rng.random() / 500)

    stream.behave = behave
    await relay_in_parallel(url, repository, stream, relays=3, seed=7)
    return {aggregate: numbers(stream.payloads, aggregate) for aggregate in AGGREGATES}


IN_ORDER = {aggregate: list(range(n, 120, 6)) for n, aggregate in enumerate(AGGREGATES)}


async def test_parallel_relays_keep_the_order_of_each_aggregate_unlike_masstransit_3512(
    messaging_database: str,
) -> None:
    found = await orders_on_the_stream(messaging_database, PostgresOutboxRepository, ForgetfulStream())
    assert found == IN_ORDER


async def test_without_claims_parallel_relays_would_publish_twice_and_out_of_order(
    messaging_database: str,
) -> None:
    found = await orders_on_the_stream(messaging_database, UnclaimedRepository, ForgetfulStream())
    assert found != IN_ORDER


async def relay_with_one_refusal(url: str) -> list[int]:
    record(url, *(order_placed("o-1", n) for n in range(5)))
    refusals = iter([True])

    async def behave(_: str, payload: bytes) -> None:
        if b'"n": 1,' in payload and next(refusals, False):
            raise InvalidRequest("Not now.")

    stream = MemoryStream(behave)
    await relay_in_parallel(url, PostgresOutboxRepository, stream, relays=1, seed=0)
    return numbers(stream.payloads, "o-1")


async def test_no_event_overtakes_one_of_its_aggregate_that_was_refused(messaging_database: str) -> None:
    assert await relay_with_one_refusal(messaging_database) == [0, 1, 2, 3, 4]


async def test_events_of_an_aggregate_sent_together_would_overtake_it(
    messaging_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PublishBatch.publish

    async def publish_together(self: PublishBatch, events: Sequence[OutboxRow], concurrency: int) -> None:
        for each in events:  # every event a lane of its own
            await original(self, [each], concurrency)

    monkeypatch.setattr(PublishBatch, "publish", publish_together)
    assert await relay_with_one_refusal(messaging_database) == [0, 2, 3, 4, 1]


class StoppedClock(SystemClock):
    """A process that is stopped while it publishes: when it goes on, its clock has moved on."""

    stopped_for = 0

    def uptime(self) -> int:
        return super().uptime() + self.stopped_for


async def relay_through_a_lost_claim(url: str, *, claim_ms: int) -> list[bytes]:
    """Let a relay lose its claim within a batch, and a second one take over; return what was stored.

    Arguments:
        claim_ms: for how long the first relay believes its claim to last; it is stopped for a minute, in
            which the database ends the silent claim.
    """
    record(url, *(order_placed("o-1", n) for n in range(4)))
    clock = StoppedClock()
    taken_over = asyncio.Event()
    second = PostgresOutboxRepository(url)
    stream = ForgetfulStream()

    async def stop_once(_: str, payload: bytes) -> None:
        if b'"n": 1,' in payload and not taken_over.is_set():
            stream.behave = None
            with psycopg.connect(url) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
                    " WHERE application_name = 'first' AND datname = current_database()"
                )
            assert await new_relay(second, stream).relay_once() == 4
            taken_over.set()
            clock.stopped_for = 60_000_000

    stream.behave = stop_once
    first = PostgresOutboxRepository(url, name="first")
    stopped = OutboxRelay(
        first, stream, clock, Random(0).random, CONTEXT, settings=OutboxSettings(claim_ms=claim_ms)
    )
    with pytest.raises(Unavailable):  # what it thinks of its batch can't be noted any more
        await stopped.relay_once()
    assert taken_over.is_set()
    assert None not in column(url, "published_at")
    await first.close()
    await second.close()
    return stream.payloads


async def test_a_relay_whose_claim_is_over_stops_publishing_unlike_masstransit_3791(
    messaging_database: str,
) -> None:
    stored = await relay_through_a_lost_claim(messaging_database, claim_ms=30_000)
    # 0 was stored and not noted, 1 was under way: both go out again, with the ids that JetStream knows.
    assert numbers(stored, "o-1") == [0, 0, 1, 2, 3, 1]


async def test_a_relay_that_ignored_its_deadline_would_publish_in_parallel_with_the_second(
    messaging_database: str,
) -> None:
    stored = await relay_through_a_lost_claim(messaging_database, claim_ms=3_600_000)
    assert numbers(stored, "o-1") == [0, 0, 1, 2, 3, 1, 2, 3]


REFUSALS = st.dictionaries(st.integers(0, 29), st.integers(1, 3), max_size=8)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    aggregates=st.lists(st.integers(0, 4), min_size=1, max_size=30),
    refusals=REFUSALS,
    outages=st.sets(st.integers(0, 60), max_size=4),
    relays=st.integers(1, 3),
    batch=st.integers(1, 20),
    seed=st.integers(0, 2**16),
)
def test_whatever_the_stream_does_every_event_is_published_once_and_in_order(
    messaging_database: str,
    aggregates: list[int],
    refusals: dict[int, int],
    outages: set[int],
    relays: int,
    batch: int,
    seed: int,
) -> None:
    with psycopg.connect(messaging_database) as connection:
        connection.execute("TRUNCATE outbox_events, outbox_retries, aggregate_events")
    record(messaging_database, *(order_placed(f"a-{a}", n) for n, a in enumerate(aggregates)))
    left, calls = dict(refusals), 0

    async def behave(_: str, payload: bytes) -> None:
        nonlocal calls
        calls += 1
        n = int(payload.removeprefix(b'{"n": ').partition(b",")[0])
        await asyncio.sleep(0)
        if calls in outages:
            raise Unavailable("NATS is gone.")
        if left.get(n, 0):
            left[n] -= 1
            raise InvalidRequest("Not now.")

    stream = ForgetfulStream(behave)
    asyncio.run(
        relay_in_parallel(
            messaging_database, PostgresOutboxRepository, stream, relays=relays, seed=seed, batch=batch
        )
    )
    for a in set(aggregates):
        expected = [n for n, each in enumerate(aggregates) if each == a]
        assert numbers(stream.payloads, f"a-{a}") == expected
    with psycopg.connect(messaging_database) as connection:
        counts = connection.execute(
            "SELECT count(*) FILTER (WHERE type = 'OutboxEventPublished.1') = count(DISTINCT stream),"
            " (SELECT count(*) FROM outbox_retries) FROM aggregate_events"
        ).fetchone()
    assert counts == (True, 0)
