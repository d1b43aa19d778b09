"""What a relay does with events that the stream takes, refuses, or says nothing about."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta

import msgspec
import nats
import psycopg
import pytest
from nats.js.api import DiscardPolicy

from postroom.adapters.compose.outbox import (
    MessagingSettings,
    NatsSettings,
    Outbox,
    OutboxSettings,
    open_outbox,
    open_relay,
)
from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.publisher import JetStreamPublisher
from postroom.adapters.postgres import hints as hints_module
from postroom.adapters.postgres.hints import PostgresHints
from postroom.adapters.postgres.messaging.outbox_repository import PostgresOutboxRepository
from postroom.adapters.system.clock import SystemClock
from postroom.application.messaging import Cleanup
from postroom.application.outbox import relay as relay_module
from postroom.application.outbox.relay import OutboxRelay
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.support.logs import capture_logs
from tests.support.memory_stream import MemoryStream
from tests.support.outboxes import SUBJECT, column, history, names, numbers, order_placed, record, relaying
from tests.support.waiting import SECONDS, until

PUBLISHED = ["OutboxEventRecorded", "OutboxEventPublished"]
AT_ONCE = OutboxSettings(max_attempts=3)
"""Chance draws 0 in these tests, so that a refused event is tried again at once."""


def refusing(*bad: bytes, times: int = 1_000) -> Callable[[str, bytes], Awaitable[None]]:
    """Refuse some payloads, so many times."""
    left = dict.fromkeys(bad, times)

    async def behave(_: str, payload: bytes) -> None:
        if left.get(payload, 0):
            left[payload] -= 1
            raise InvalidRequest("No stream listens.")

    return behave


def payload(aggregate: str, n: int) -> bytes:
    return b'{"n": %d, "order": "%s"}' % (n, aggregate.encode())


async def test_a_recorded_event_is_published_with_its_subject_and_headers(messaging_database: str) -> None:
    (id_,) = record(messaging_database, order_placed("o-1", 1, event_version=2))
    stream = MemoryStream()
    async with relaying(messaging_database, stream) as relay:
        assert await relay.relay_once() == 1
        assert await relay.relay_once() == 0
    ((subject, data, headers),) = stream.messages
    assert (subject, data) == ("sea.event.order_placed.v2", payload("o-1", 1))
    assert (headers["Nats-Msg-Id"], headers["Aggregate-Id"]) == (str(id_), "o-1")
    assert names(history(messaging_database, id_)) == PUBLISHED
    assert column(messaging_database, "publish_attempts") == [1]
    assert None not in column(messaging_database, "published_at")


async def test_a_payload_is_published_as_the_database_holds_it(messaging_database: str) -> None:
    big = {"n": 2**70, "text": "Zoë \u2028 \\u0000 \U0001f600", "list": [1.5, None, True]}
    record(messaging_database, order_placed("o-1", 1, payload=big))
    stream = MemoryStream()
    async with relaying(messaging_database, stream) as relay:
        await relay.relay_once()
    with psycopg.connect(messaging_database) as connection:
        text = connection.execute("SELECT payload::text FROM outbox_events").fetchone()
    assert text is not None
    assert stream.payloads == [text[0].encode()]
    assert b"1180591620717411303424" in stream.payloads[0]


async def test_events_of_an_aggregate_are_published_one_at_a_time_and_aggregates_in_parallel(
    messaging_database: str,
) -> None:
    record(messaging_database, *(order_placed(f"o-{n % 7}", n) for n in range(70)))
    flying: list[bytes] = []
    most = 0

    async def behave(_: str, data: bytes) -> None:
        nonlocal most
        aggregate = data[-5:]
        assert aggregate not in flying
        flying.append(aggregate)
        most = max(most, len(flying))
        await asyncio.sleep(0.001)
        flying.remove(aggregate)

    stream = MemoryStream(behave)
    async with relaying(messaging_database, stream) as relay:
        await relay.relay_once()
    for n in range(7):
        assert numbers(stream.payloads, f"o-{n}") == list(range(n, 70, 7))
    assert most > 1


async def test_a_relay_that_is_behind_publishes_a_batch_while_another_is_in_flight(
    messaging_database: str,
) -> None:
    record(messaging_database, *(order_placed(f"o-{n % 60}", n) for n in range(180)))
    flying: set[int] = set()
    overlapped = asyncio.Event()

    async def behave(_: str, data: bytes) -> None:
        # `relay_once` has one batch of each group of partitions, and awaits both before the next.
        task = id(asyncio.current_task())
        flying.add(task)
        if len(stream.messages) >= 20:
            if len(flying) > 1:
                overlapped.set()
            async with asyncio.timeout(SECONDS):
                await overlapped.wait()
        flying.discard(task)

    stream = MemoryStream(behave)
    async with relaying(messaging_database, stream, settings=OutboxSettings(batch=5, concurrency=2)) as relay:
        while await relay.relay_once():
            pass
    # Each batch publishes one aggregate at a time, so two at once are of two batches.
    assert overlapped.is_set()
    for n in range(60):
        assert numbers(stream.payloads, f"o-{n}") == list(range(n, 180, 60))


async def test_a_refused_event_in_one_of_two_batches_holds_back_its_aggregate_only(
    messaging_database: str,
) -> None:
    record(messaging_database, *(order_placed(f"o-{n % 60}", n) for n in range(180)))
    stream = MemoryStream(refusing(payload("o-7", 67)))
    settings = OutboxSettings(batch=20, concurrency=8, max_attempts=2)
    async with relaying(messaging_database, stream, settings=settings) as relay:
        while await relay.relay_once():
            pass
    assert (relay.counts.published, relay.counts.parked) == (178, 1)
    for n in range(60):
        assert numbers(stream.payloads, f"o-{n}") == ([7] if n == 7 else list(range(n, 180, 60)))


async def test_a_refused_event_holds_back_its_aggregate_only_until_it_gets_through(
    messaging_database: str,
) -> None:
    events = [order_placed("o-1", 1), order_placed("o-2", 1), order_placed("o-1", 2), order_placed("o-2", 2)]
    first, *_ = record(messaging_database, *events)
    stream = MemoryStream(refusing(payload("o-1", 1), times=2))
    async with relaying(messaging_database, stream, settings=AT_ONCE) as relay:
        await relay.relay_once()
        assert stream.payloads == [payload("o-2", 1), payload("o-2", 2)]
        assert column(messaging_database, "publish_error")[0] == "No stream listens."
        while await relay.relay_once():
            pass
    assert stream.payloads[2:] == [payload("o-1", 1), payload("o-1", 2)]
    assert (relay.counts.published, relay.counts.failed, relay.counts.parked) == (4, 2, 0)
    assert column(messaging_database, "publish_attempts") == [3, 1, 1, 1]
    assert column(messaging_database, "publish_error") == [None] * 4
    failed = ["OutboxEventRecorded", "OutboxPublishFailed", "OutboxPublishFailed", "OutboxEventPublished"]
    assert names(history(messaging_database, first)) == failed


async def test_an_event_refused_too_often_is_parked_and_an_operator_has_it_tried_again(
    messaging_database: str,
) -> None:
    first, _ = record(messaging_database, order_placed("o-1", 1), order_placed("o-1", 2))
    stream = MemoryStream(refusing(payload("o-1", 1), times=3))
    messaging = MessagingSettings(messaging_database, "sea")
    async with (
        relaying(messaging_database, stream, settings=AT_ONCE) as relay,
        open_outbox(messaging) as desk,
    ):
        while await relay.relay_once():
            pass
        assert (relay.counts.parked, stream.messages) == (1, [])
        (parked,) = await desk.list_failed_events(10, only_parked=True)
        assert (parked.id, parked.parked, parked.attempts, parked.error) == (
            first,
            True,
            3,
            "No stream listens.",
        )
        assert (await desk.get_backlog()).count == 2
        assert await desk.retry_events.all() == 1
        assert await desk.retry_events.all() == 0
        while await relay.relay_once():
            pass
    assert stream.payloads == [payload("o-1", 1), payload("o-1", 2)]


async def test_a_discarded_event_lets_the_later_ones_go_on(messaging_database: str) -> None:
    first, _ = record(messaging_database, order_placed("o-1", 1), order_placed("o-1", 2))
    stream = MemoryStream(refusing(payload("o-1", 1)))
    messaging = MessagingSettings(messaging_database, "sea")
    async with (
        relaying(messaging_database, stream, settings=AT_ONCE) as relay,
        open_outbox(messaging) as desk,
    ):
        while await relay.relay_once():
            pass
        assert await desk.discard_events([first], "the schema is gone") == 1
        while await relay.relay_once():
            pass
    assert stream.payloads == [payload("o-1", 2)]
    assert history(messaging_database, first)[-1].reason == "the schema is gone"  # type: ignore[attr-defined]


async def test_an_event_whose_type_is_no_word_of_a_subject_is_refused_and_nothing_else_suffers(
    messaging_database: str,
) -> None:
    with psycopg.connect(messaging_database) as connection:
        connection.execute(
            "INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload)"
            " VALUES (gen_random_uuid(), 'order', 'o-1', 'order.>', '{}')"
        )
    record(messaging_database, order_placed("o-2", 1))
    stream = MemoryStream()
    async with relaying(messaging_database, stream, settings=AT_ONCE) as relay:
        while await relay.relay_once():
            pass
    assert (stream.payloads, relay.counts.parked) == ([payload("o-2", 1)], 1)
    assert "can't be part of a subject" in column(messaging_database, "publish_error")[0]


async def test_an_outage_counts_no_attempts_and_events_stored_before_it_are_marked_published(
    messaging_database: str,
) -> None:
    record(messaging_database, *(order_placed(f"o-{n}", 1) for n in range(20)))
    taken = 0

    async def behave(_: str, __: bytes) -> None:
        nonlocal taken
        if taken == 5:
            raise Unavailable("NATS is gone.")
        taken += 1

    stream = MemoryStream(behave)
    async with relaying(messaging_database, stream) as relay:
        with pytest.raises(Unavailable, match=r"NATS is gone\."):
            await relay.relay_once()
        assert len(stream.messages) == 5
        assert sorted(column(messaging_database, "publish_attempts")) == [0] * 15 + [1] * 5
        stream.behave = None
        while await relay.relay_once():
            pass
    assert (len(stream.published) - len(stream.messages), relay.counts.failed) == (
        len(stream.published) - 20,
        0,
    )
    assert column(messaging_database, "publish_attempts") == [1] * 20


async def test_an_event_the_stream_never_answers_to_counts_as_refused_while_others_are_stored(
    messaging_database: str,
) -> None:
    async def behave(_: str, data: bytes) -> None:
        if data == payload("o-1", 1):
            await asyncio.sleep(0.01)
            raise Unavailable("No answer.")

    record(messaging_database, order_placed("o-1", 1), *(order_placed("o-1", n) for n in range(2, 5)))
    stream = MemoryStream(behave)
    async with relaying(messaging_database, stream, settings=AT_ONCE) as relay:
        with pytest.raises(Unavailable):  # alone, it can't be told from an outage
            await relay.relay_once()
        assert column(messaging_database, "publish_attempts") == [0] * 4
        beside = same_partition(messaging_database, "o-1")
        record(messaging_database, *(order_placed(name, 1) for name in beside))
        await relay.relay_once()
    assert column(messaging_database, "publish_attempts") == [1, 0, 0, 0, 1, 1, 1]


async def test_events_without_an_answer_hold_back_their_own_kind_only_and_are_parked(
    messaging_database: str,
) -> None:
    async def behave(subject: str, _: bytes) -> None:
        await asyncio.sleep(0)
        if "order_lost" in subject:
            raise Unavailable("No answer.")

    # They come first, in every partition, and fill several batches.
    lost = [order_placed(f"l-{n}", n, event_type="order_lost") for n in range(80)]
    record(messaging_database, *lost, order_placed("l-0", 1), *(order_placed(f"o-{n}", n) for n in range(40)))
    stream = MemoryStream(behave)
    settings = OutboxSettings(max_attempts=2, batch=8, concurrency=8)
    async with relaying(messaging_database, stream, settings=settings) as relay:
        for _ in range(4):
            with suppress(Unavailable):  # once only events without an answer are left
                await relay.relay_once()
        assert relay.counts.published == 40
        while relay.counts.parked < 80:
            # Events that are recorded now and then prove that the target is there.
            first = len(stream.messages)
            record(messaging_database, *(order_placed(f"o-{first + n}", n) for n in range(40)))
            with suppress(Unavailable):
                await relay.relay_once()
    assert column(messaging_database, "published_at")[:81] == [None] * 81
    assert column(messaging_database, "publish_attempts")[:81] == [2] * 80 + [0]


async def test_an_outage_counts_no_attempts_of_any_kind(messaging_database: str) -> None:
    async def behave(_: str, __: bytes) -> None:
        raise Unavailable("NATS is gone.")

    kinds = ("order_placed", "order_paid", "order_shipped")
    record(messaging_database, *(order_placed(f"o-{n}", n, event_type=kinds[n // 40]) for n in range(120)))
    async with relaying(
        messaging_database, MemoryStream(behave), settings=OutboxSettings(batch=5, concurrency=2)
    ) as relay:
        with pytest.raises(Unavailable, match=r"NATS is gone\."):
            await relay.relay_once()
    assert column(messaging_database, "publish_attempts") == [0] * 120


def same_partition(url: str, aggregate: str) -> list[str]:
    """Return three other aggregates of the same partition."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT name FROM (SELECT 'x-' || n AS name FROM generate_series(1, 1000) n) AS names WHERE"
            " hashtextextended('order/' || name, 0) & 15 = hashtextextended('order/' || %s, 0) & 15 LIMIT 3",
            (aggregate,),
        ).fetchall()
    return [name for (name,) in rows]


async def test_what_the_stream_calls_a_duplicate_counts_as_stored(messaging_database: str) -> None:
    record(messaging_database, order_placed("o-1", 1), order_placed("o-1", 2))
    stream = MemoryStream()
    async with relaying(messaging_database, stream) as relay:
        await relay.relay_once()
        with psycopg.connect(messaging_database) as connection:  # as if the relay had died before it noted it
            connection.execute("UPDATE outbox_events SET published_at = NULL")
            connection.execute("DELETE FROM aggregate_events WHERE type = 'OutboxEventPublished.1'")
        await relay.relay_once()
    assert (len(stream.messages), len(stream.published)) == (2, 4)
    assert None not in column(messaging_database, "published_at")


async def test_more_events_than_a_batch_holds_are_published_over_several(messaging_database: str) -> None:
    record(messaging_database, *(order_placed(f"o-{n % 10}", n) for n in range(200)))
    stream = MemoryStream()
    async with relaying(messaging_database, stream, settings=OutboxSettings(batch=7, concurrency=3)) as relay:
        while await relay.relay_once():
            pass
    for n in range(10):
        assert numbers(stream.payloads, f"o-{n}") == list(range(n, 200, 10))


@asynccontextmanager
async def running(relay: OutboxRelay) -> AsyncIterator[None]:
    """Run a relay for as long as the context lasts."""
    task = asyncio.create_task(relay.run())
    yield
    relay.stop()
    await task


async def test_a_hint_wakes_a_relay_that_would_sleep_on(messaging_database: str) -> None:
    stream = MemoryStream()
    hints = PostgresHints(messaging_database)
    asleep = OutboxSettings(poll_ms=3_600_000)
    async with (
        relaying(messaging_database, stream, hints=hints, settings=asleep) as relay,
        running(relay),
    ):
        await until(lambda: listens(messaging_database))
        for n in range(3):
            with psycopg.connect(messaging_database) as connection:
                Outbox(notify=True).record(connection, order_placed("o-1", n))
            await until(has_messages(stream, n + 1))
    await hints.close()
    await hints.close()


async def test_a_relay_that_is_to_be_notified_publishes_rows_of_plain_sql_and_delayed_events_in_time(
    messaging_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints_module, "QUIET_SECONDS", 0.1)
    for name, value in {"QUIET_MS": 100, "LOST_MS": 3_600_000}.items():
        monkeypatch.setattr(relay_module, name, value)
    stream = MemoryStream()
    hints = PostgresHints(messaging_database)
    often = OutboxSettings(poll_ms=50)
    async with (
        relaying(messaging_database, stream, hints=hints, settings=often) as relay,
        running(relay),
    ):
        await until(hints.watch)
        with psycopg.connect(messaging_database) as connection:
            connection.execute(
                "INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload)"
                " VALUES (gen_random_uuid(), 'order', 'o-1', 'order_placed', '{}')"
            )
        await until(has_messages(stream, 1))
        await until(hints.watch)
        later = datetime.now(UTC) + timedelta(seconds=1)
        record(messaging_database, msgspec.structs.replace(order_placed("o-2", 1), publish_at=later))
        await until(has_messages(stream, 2))
    await hints.close()


def has_messages(stream: MemoryStream, count: int) -> Callable[[], bool]:
    return lambda: len(stream.messages) == count


def listens(url: str) -> bool:
    with psycopg.connect(url) as connection:
        query = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE query ILIKE 'listen %' AND state = 'idle' AND datname = current_database()"
        )
        return connection.execute(query).fetchone() == (1,)


async def test_without_hints_events_are_found_by_looking_again(messaging_database: str) -> None:
    stream = MemoryStream()
    often = OutboxSettings(poll_ms=10)
    async with relaying(messaging_database, stream, settings=often) as relay, running(relay):
        for n in range(3):
            record(messaging_database, order_placed("o-1", n))
            await until(has_messages(stream, n + 1))


async def test_a_lost_connection_is_made_again(messaging_database: str) -> None:
    stream = MemoryStream()
    hints = PostgresHints(messaging_database)
    often = OutboxSettings(poll_ms=10)
    async with (
        relaying(messaging_database, stream, hints=hints, settings=often) as relay,
        running(relay),
    ):
        for n in range(3):
            record(messaging_database, order_placed("o-1", n))
            await until(has_messages(stream, n + 1))
            with psycopg.connect(messaging_database) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
    await hints.close()
    assert numbers(stream.payloads, "o-1") == [0, 1, 2]


async def test_background_cleanups_delete_events_published_long_ago(messaging_database: str) -> None:
    record(messaging_database, *(order_placed("o-1", n) for n in range(5)))
    async with relaying(messaging_database, MemoryStream()) as relay:
        await relay.relay_once()
    record(messaging_database, order_placed("o-1", 5))
    repository = PostgresOutboxRepository(messaging_database)
    delete = repository.delete_published
    cleanup = Cleanup("outbox", delete, SystemClock(), lambda: 0.0, retention_ms=0, batch=2)
    task = asyncio.create_task(cleanup.run(every_ms=10))
    await until(lambda: len(column(messaging_database, "id")) == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await repository.close()
    assert column(messaging_database, "published_at") == [None]


async def test_events_reach_jetstream(messaging_database: str, nats_url: str) -> None:
    client = await nats.connect(nats_url)
    stream = client.jetstream()
    await stream.add_stream(name="SEA_EVENTS", subjects=["sea.event.>"])
    ids = record(messaging_database, *(order_placed(f"Größe {n % 3}", n) for n in range(50)))
    messaging = MessagingSettings(messaging_database, "sea")
    async with open_relay(messaging, NatsSettings(nats_url), OutboxSettings(hints=False)) as relay:
        while await relay.relay_once():
            pass
    subscription = await stream.pull_subscribe(SUBJECT, stream="SEA_EVENTS")
    messages = await subscription.fetch(50)
    assert {(message.headers or {})["Nats-Msg-Id"] for message in messages} == {str(id_) for id_ in ids}
    for n in range(3):
        about = [m for m in messages if (m.headers or {})["Aggregate-Id"] == f"Größe {n}"]
        assert numbers([m.data for m in about], f"Größe {n}") == list(range(n, 50, 3))
    await client.close()


async def test_a_full_stream_holds_back_its_own_events_only_and_they_are_parked(
    messaging_database: str, nats_url: str
) -> None:
    async with connect(NatsSettings(nats_url), "test") as client:
        stream = client.jetstream()
        await stream.add_stream(name="GOOD", subjects=["sea.event.order_placed.>"])
        await stream.add_stream(
            name="FULL", subjects=["sea.event.order_full.>"], max_msgs=1, discard=DiscardPolicy.NEW
        )
        # The events of the full stream come first, in every partition.
        full = [order_placed(f"f-{n}", n, event_type="order_full") for n in range(40)]
        record(messaging_database, *full, *(order_placed(f"o-{n}", n) for n in range(40)))
        async with relaying(messaging_database, JetStreamPublisher(client), settings=AT_ONCE) as relay:
            while await relay.relay_once():
                pass
        assert (relay.counts.published, relay.counts.failed, relay.counts.parked) == (41, 78, 39)
        errors = [error for error in column(messaging_database, "publish_error") if error is not None]
        assert len(errors) == 39
        assert all("maximum messages exceeded" in error for error in errors)
        await stream.update_stream(name="FULL", subjects=["sea.event.order_full.>"], max_msgs=100)
        async with open_outbox(MessagingSettings(messaging_database, "sea")) as desk:
            assert await desk.retry_events.all() == 39
        async with relaying(messaging_database, JetStreamPublisher(client), settings=AT_ONCE) as relay:
            while await relay.relay_once():
                pass
        assert None not in column(messaging_database, "published_at")


async def test_pauses_of_an_outage_are_within_the_longest_backoff_of_the_settings(
    messaging_database: str,
) -> None:
    record(messaging_database, order_placed("o-1", 1))
    outages = 0

    async def behave(_: str, __: bytes) -> None:
        nonlocal outages
        outages += 1
        if outages <= 12:
            raise Unavailable(f"NATS is gone: {outages}.")

    stream = MemoryStream(behave)
    settings = OutboxSettings(backoff_base_ms=1, backoff_max_ms=10, hints=False)
    with capture_logs() as logs:
        async with (
            relaying(messaging_database, stream, settings=settings, random=lambda: 0.999) as relay,
            running(relay),
        ):
            await until(has_messages(stream, 1))
    pauses = [each["pause_ms"] for each in logs if each["event"] == "outbox.unavailable"]
    assert len(pauses) == 12
    assert max(pauses) <= 10


async def test_a_relay_of_a_context_that_is_no_word_of_a_subject_does_not_start(nats_url: str) -> None:
    messaging = MessagingSettings("postgresql://127.0.0.1:9/shop", "sea.>")
    with pytest.raises(InvalidRequest, match=r"The context 'sea\.>' can't be part of a subject"):
        async with open_relay(messaging, NatsSettings(nats_url)):
            pass
