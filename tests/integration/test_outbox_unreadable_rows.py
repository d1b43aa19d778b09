"""A row that the outbox's table accepts and the relay can't read is parked; all other aggregates go on."""

import json
import re
from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import psycopg
import pytest

from postroom.adapters.compose.outbox import MessagingSettings, OutboxAdmin, open_outbox
from postroom.adapters.postgres.messaging.inbox_queue import count_backlog
from postroom.adapters.postgres.messaging.settings import Tables
from postroom.application.outbox.relay import OutboxSettings
from postroom.domain.errors import InvalidRequest
from tests.support.memory_stream import MemoryStream
from tests.support.outboxes import column, history, names, numbers, order_placed, record, relaying

NEIGHBOURS = [f"o-{n}" for n in range(64)]
"""Aggregates in every partition."""
OUTSIDE = "occurred_at is outside the years 1 to 9999"
UNREADABLE = {
    "occurred at -infinity": ({"occurred_at": "'-infinity'"}, OUTSIDE),
    "occurred before year 1": ({"occurred_at": "'0044-03-15 12:00:00+00 BC'"}, OUTSIDE),
    "occurred at PostgreSQL's first time": ({"occurred_at": "'4714-11-24 00:00:00+00 BC'"}, OUTSIDE),
    "occurred a second before year 1": ({"occurred_at": "'0001-01-01 00:00:59+00:01'"}, OUTSIDE),
    "payload whose text PostgreSQL can't write": (
        {"payload": "('[' || repeat('1e131071, ', 9000) || '0]')::jsonb"},
        "payload can't be read: ",
    ),
    "payload larger than any message": (
        {"payload": "to_jsonb(repeat('x', 64 * 1024 * 1024))"},
        "payload has 67,108,866 bytes, more than 67,108,864",
    ),
}


def execute(url: str, statement: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(statement)


def insert(url: str, **expressions: str) -> UUID:
    """Insert an event of the aggregate `odd` by plain SQL, with SQL expressions for some of its columns."""
    id_ = uuid4()
    row = {
        "id": f"'{id_}'",
        "aggregate_type": "'order'",
        "aggregate_id": "'odd'",
        "event_type": "'order_placed'",
        "payload": """'{"n": 0, "order": "odd"}'""",
    } | expressions
    execute(url, f"INSERT INTO outbox_events ({', '.join(row)}) VALUES ({', '.join(row.values())})")
    return id_


def record_neighbours(url: str) -> None:
    """Record one event of every neighbour, and a second one of the aggregate `odd`."""
    record(url, *(order_placed(aggregate, 1) for aggregate in [*NEIGHBOURS, "odd"]))


@pytest.fixture
async def admin(messaging_database: str) -> AsyncIterator[OutboxAdmin]:
    async with open_outbox(MessagingSettings(messaging_database, "sea")) as opened:
        yield opened


async def relay_all(url: str, stream: MemoryStream, max_attempts: int = 20) -> None:
    settings = OutboxSettings(max_attempts=max_attempts)
    async with relaying(url, stream, settings=settings) as relay:
        while await relay.relay_once():
            pass


@pytest.mark.parametrize(("row", "reason"), UNREADABLE.values(), ids=UNREADABLE)
async def test_a_row_that_cannot_be_read_is_parked_with_the_reason_and_the_others_are_published(
    messaging_database: str, admin: OutboxAdmin, row: dict[str, str], reason: str
) -> None:
    id_ = insert(messaging_database, **row)
    record_neighbours(messaging_database)
    stream = MemoryStream()
    await relay_all(messaging_database, stream)
    assert len(stream.payloads) == len(NEIGHBOURS)
    assert numbers(stream.payloads, "odd") == []
    (parked,) = await admin.list_failed_events(10, only_parked=True)
    assert (parked.id, parked.parked, parked.attempts) == (id_, True, 0)
    assert re.search(reason, parked.error or "")
    assert names(history(messaging_database, id_)) == ["OutboxEventRecorded", "OutboxEventParked"]


@pytest.mark.parametrize(("row", "reason"), UNREADABLE.values(), ids=UNREADABLE)
async def test_a_discarded_row_that_cannot_be_read_lets_its_aggregate_go_on(
    messaging_database: str, admin: OutboxAdmin, row: dict[str, str], reason: str
) -> None:
    id_ = insert(messaging_database, **row)
    record_neighbours(messaging_database)
    stream = MemoryStream()
    await relay_all(messaging_database, stream)
    assert await admin.discard_events([id_], "replaced by hand") == 1
    await relay_all(messaging_database, stream)
    assert numbers(stream.payloads, "odd") == [1]
    discarded = history(messaging_database, id_)[-1]
    if "payload" in row:
        assert discarded.payload == b""  # type: ignore[attr-defined]
        assert re.search(f"^replaced by hand \\(.*{reason}", discarded.reason)  # type: ignore[attr-defined]
    else:
        assert json.loads(discarded.payload) == {"n": 0, "order": "odd"}  # type: ignore[attr-defined]
        assert discarded.reason == "replaced by hand"  # type: ignore[attr-defined]


async def test_a_parked_row_is_published_after_it_was_corrected_and_retried(
    messaging_database: str, admin: OutboxAdmin
) -> None:
    id_ = insert(messaging_database, occurred_at="'-infinity'")
    record_neighbours(messaging_database)
    stream = MemoryStream()
    await relay_all(messaging_database, stream)
    assert await admin.retry_events([id_]) == 1  # not corrected: it is parked again
    await relay_all(messaging_database, stream)
    assert [each.id for each in await admin.list_failed_events(10, only_parked=True)] == [id_]
    execute(messaging_database, f"UPDATE outbox_events SET occurred_at = now() WHERE id = '{id_}'")
    assert await admin.retry_events.all() == 1
    await relay_all(messaging_database, stream)
    assert numbers(stream.payloads, "odd") == [0, 1]
    assert await admin.list_failed_events(10) == []


async def test_the_first_day_of_year_1_is_published_whatever_the_time_zone_of_the_database(
    messaging_database: str, admin: OutboxAdmin
) -> None:
    name = messaging_database.rpartition("/")[2].partition("?")[0]
    execute(messaging_database, f"""ALTER DATABASE "{name}" SET timezone = 'America/Los_Angeles'""")
    insert(messaging_database, occurred_at="'0001-01-01 00:00:00+00'")
    assert (await admin.get_backlog()).count == 1
    stream = MemoryStream()
    await relay_all(messaging_database, stream)
    ((_, _, headers),) = stream.messages
    assert headers["Occurred-At"] == "0001-01-01T00:00:00.000000Z"


@pytest.mark.parametrize("attempts", [-(2**31), -5, 2**31 - 1])
@pytest.mark.parametrize("event_type", ["'order_placed'", "'no such type'"], ids=["published", "refused"])
async def test_a_row_with_any_number_of_attempts_is_published_or_parked(
    messaging_database: str, admin: OutboxAdmin, attempts: int, event_type: str
) -> None:
    insert(messaging_database, publish_attempts=str(attempts), event_type=event_type)
    record_neighbours(messaging_database)
    stream = MemoryStream()
    await relay_all(messaging_database, stream, max_attempts=1)
    is_published = event_type == "'order_placed'"
    assert len(stream.payloads) == len(NEIGHBOURS) + 2 * is_published
    assert len(await admin.list_failed_events(10, only_parked=True)) == (not is_published)


async def test_an_aggregate_id_too_long_for_an_index_is_parked_when_it_is_refused(
    messaging_database: str, admin: OutboxAdmin
) -> None:
    long = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 1000) AS n)"
    id_ = insert(messaging_database, aggregate_id=long)
    record_neighbours(messaging_database)

    async def refuse_odd(_: str, payload: bytes) -> None:
        if b'"n": 0' in payload:
            raise InvalidRequest("The message is too large.")

    stream = MemoryStream(refuse_odd)
    await relay_all(messaging_database, stream, max_attempts=1)
    assert len(stream.payloads) == len(NEIGHBOURS) + 1
    assert [each.id for each in await admin.list_failed_events(10)] == [id_]


async def test_a_row_whose_history_was_altered_is_parked(messaging_database: str, admin: OutboxAdmin) -> None:
    (id_,) = record(messaging_database, order_placed("odd", 0))
    execute(messaging_database, f"UPDATE aggregate_events SET state = '\\xff' WHERE stream = '{id_}'")
    record_neighbours(messaging_database)
    stream = MemoryStream()
    await relay_all(messaging_database, stream)
    assert len(stream.payloads) == len(NEIGHBOURS)
    (parked,) = await admin.list_failed_events(10, only_parked=True)
    assert "history can't be read" in (parked.error or "")
    assert await admin.discard_events([id_], "altered") == 1


async def test_an_unexpected_error_of_one_event_is_a_refusal_of_that_event_only(
    messaging_database: str, admin: OutboxAdmin
) -> None:
    record(messaging_database, order_placed("odd", 0))
    record_neighbours(messaging_database)

    async def fail_odd(_: str, payload: bytes) -> None:
        if b'"n": 0' in payload:
            raise UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range")

    stream = MemoryStream(fail_odd)
    await relay_all(messaging_database, stream, max_attempts=1)
    assert len(stream.payloads) == len(NEIGHBOURS)
    (parked,) = await admin.list_failed_events(10, only_parked=True)
    assert "UnicodeEncodeError" in (parked.error or "")


@pytest.mark.parametrize("row", [row for row, _ in UNREADABLE.values()], ids=UNREADABLE)
async def test_the_backlog_is_counted_with_rows_that_cannot_be_read(
    messaging_database: str, admin: OutboxAdmin, row: dict[str, str]
) -> None:
    insert(messaging_database, **row)
    assert (await admin.get_backlog()).count == 1
    outbox, _ = count_backlog(messaging_database, "sea", Tables())
    assert (outbox.count, outbox.parked) == (1, 0)


async def test_a_retry_time_of_infinity_is_a_parked_event(
    messaging_database: str, admin: OutboxAdmin
) -> None:
    insert(messaging_database, event_type="'no such type'")
    await relay_all(messaging_database, MemoryStream(), max_attempts=1)
    execute(messaging_database, "UPDATE outbox_retries SET retry_at = 'infinity'")
    (failed,) = await admin.list_failed_events(10)
    assert failed.parked
    assert column(messaging_database, "published_at") == [None]
