"""Rows that any service inserts into a table of its own are captured and published."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pytest

from postroom import connect
from postroom.adapters.compose.brokers import MailboxTarget
from postroom.adapters.compose.outbox import (
    CaptureColumns,
    CaptureSettings,
    MessagingSettings,
    create_slot,
    open_capture,
)
from postroom.adapters.postgres.capture.source import PostgresCaptureSource
from postroom.adapters.postgres.migrate import migrate
from postroom.application.outbox.relay import OutboxSettings
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from tests.support.captures import LOGICAL, TABLE, ServiceDatabase, capturing, ids, service_database
from tests.support.memory_stream import MemoryStream
from tests.support.outboxes import column, numbers
from tests.support.servers.postgres import PostgresServer, postgres_folder
from tests.support.waiting import SECONDS, until

TEMPLATE = "template_messaging"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_folder() as folder, PostgresServer(folder, LOGICAL) as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {TEMPLATE}".encode())
        migrate(server.url(TEMPLATE), "messaging")
        yield server


@pytest.fixture
def database(server: PostgresServer) -> Iterator[ServiceDatabase]:
    with service_database(server, TEMPLATE) as database:
        asyncio.run(database.create_slot())
        yield database


async def capture_all(database: ServiceDatabase, stream: MemoryStream, **options: Any) -> None:
    async with capturing(database, stream, **options) as capture, asyncio.timeout(SECONDS):
        await capture.run_once()


def message_ids(stream: MemoryStream) -> list[str]:
    return [headers["Nats-Msg-Id"] for _, _, headers in stream.messages]


async def test_a_committed_row_is_published_under_its_own_id_with_its_fields_as_headers(
    database: ServiceDatabase,
) -> None:
    stream = MemoryStream()
    id_ = UUID("0196a1b2-0000-7000-8000-00000000000a")
    database.execute(
        "INSERT INTO events VALUES (%s, 'order', 'Größe 1', 'order_placed', '{\"n\": 1}',"
        " '2026-01-15 09:00:00.5+01', 2, '{\"Tenant\": \"é\"}')",
        (id_,),
    )
    await capture_all(database, stream)
    assert stream.messages == [
        (
            "sea.event.order_placed.v2",
            b'{"n": 1}',
            {
                "Nats-Msg-Id": str(id_),
                "Event-Type": "order_placed",
                "Event-Version": "2",
                "Occurred-At": "2026-01-15T08:00:00.500000Z",
                "Aggregate-Type": "order",
                "Aggregate-Id": "Größe 1",
                "Tenant": "é",
            },
        )
    ]


async def test_rows_are_published_in_the_order_of_commit_and_rolled_back_ones_never(
    database: ServiceDatabase,
) -> None:
    stream = MemoryStream()
    with psycopg.connect(database.url) as first, psycopg.connect(database.url) as rolled_back:
        insert = "INSERT INTO events (aggregate_id, payload) VALUES ('o-1', %s)"
        first.execute(insert, ('{"n": 1, "order": "o-1"}',))  # the row is older, its commit younger
        rolled_back.execute(insert, ('{"n": 9, "order": "o-1"}',))
        rolled_back.rollback()
        database.insert("o-1", 0)
        first.commit()
    await capture_all(database, stream)
    assert numbers(stream.payloads, "o-1") == [0, 1]


async def test_a_row_that_its_transaction_deletes_is_published_and_other_changes_are_not(
    database: ServiceDatabase,
) -> None:
    stream = MemoryStream()
    with psycopg.connect(database.url) as connection:
        connection.execute(
            'INSERT INTO events (aggregate_id, payload) VALUES (\'o-1\', \'{"n": 0, "order": "o-1"}\')'
        )
        connection.execute("DELETE FROM events")
    database.insert("o-1", 1)
    database.execute('UPDATE events SET payload = \'{"n": 7, "order": "o-1"}\'')
    database.execute("TRUNCATE events")
    await capture_all(database, stream)
    assert numbers(stream.payloads, "o-1") == [0, 1]


async def test_rows_are_published_once_although_the_process_ends_after_each_batch(
    database: ServiceDatabase,
) -> None:
    stream = MemoryStream()
    for n in range(5):
        database.insert("o-1", n)
        await capture_all(database, stream)
    assert len(stream.published) == 5  # without the stream's deduplication


async def test_a_huge_transaction_is_read_in_batches(database: ServiceDatabase) -> None:
    stream = MemoryStream()
    sizes: list[int] = []
    database.execute(
        "INSERT INTO events (aggregate_id, payload)"
        " SELECT n % 100, jsonb_build_object('n', n, 'order', n % 100) FROM generate_series(1, 10000) AS n"
    )
    async with capturing(database, stream) as capture:
        read = capture._source.read

        async def measured(limit: int, wait_ms: int) -> Any:
            batch = await read(limit, wait_ms)
            sizes.append(len(batch.rows))
            return batch

        capture._source.read = measured  # type: ignore[method-assign]
        await capture.run_once()
    assert len(stream.published) == 10_000
    assert max(sizes) == 500
    per_order: dict[bytes, list[int]] = {}
    for payload in stream.payloads:
        n, order = (part.split(b": ")[1] for part in payload.strip(b"{}").split(b", "))
        per_order.setdefault(order, []).append(int(n))
    assert all(values == sorted(values) for values in per_order.values())


async def test_a_transaction_that_is_interrupted_is_published_again_from_its_beginning(
    database: ServiceDatabase,
) -> None:
    stream = MemoryStream()
    database.insert("o-0", 0)
    database.insert("o-1", *range(1_200))
    async with capturing(database, stream) as capture:
        while len(stream.published) < 500:
            await capture.capture_once(50)
    assert len(stream.published) < 1_201
    await capture_all(database, stream)
    assert numbers(stream.payloads, "o-1") == list(range(1_200))
    assert stream.published.count(b'{"n": 0, "order": "o-0"}') == 1  # its transaction was confirmed


async def test_a_row_that_is_captured_twice_is_held_once(
    database: ServiceDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise InvalidRequest("The stream is full.")

    async def fail(*_: object) -> None:
        raise Unavailable("The process ended here.")

    database.insert("o-1", 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(PostgresCaptureSource, "confirm", fail)
        with pytest.raises(Unavailable, match="ended here"):
            await capture_all(database, MemoryStream(refuse), random=lambda: 0.9)
    stream = MemoryStream()
    await capture_all(database, stream)
    assert stream.published == []
    database.execute("UPDATE outbox_retries SET retry_at = now()")
    await capture_all(database, stream)
    assert numbers(stream.published, "o-1") == [0, 1]


async def test_a_row_that_is_refused_is_held_with_its_aggregate_and_published_in_order_later(
    database: ServiceDatabase,
) -> None:
    refused = ['"n": 1,']

    async def refuse(_: str, payload: bytes) -> None:
        if any(text.encode() in payload for text in refused):
            raise InvalidRequest("The stream is full.")

    stream = MemoryStream(refuse)
    for n in range(4):
        database.insert("o-1", n)
    database.insert("o-2", 0)
    settings = OutboxSettings(poll_ms=10, backoff_base_ms=60_000)
    await capture_all(database, stream, settings=settings, random=lambda: 0.9)
    assert numbers(stream.payloads, "o-1") == [0]
    assert numbers(stream.payloads, "o-2") == [0]
    assert column(database.url, "publish_error") == ["The stream is full.", None, None]
    refused.clear()
    database.insert("o-1", 4)  # waits behind those that are held
    await capture_all(database, stream, settings=settings)
    assert numbers(stream.payloads, "o-1") == [0]
    database.execute("UPDATE outbox_retries SET retry_at = now()")
    await capture_all(database, stream, settings=settings)
    assert numbers(stream.payloads, "o-1") == [0, 1, 2, 3, 4]
    assert sorted(message_ids(stream)) == sorted(str(id_) for id_ in ids(database))
    types = [headers.get("Content-Type") for _, _, headers in stream.messages]
    assert types == [None, None, *["application/json"] * 4]
    database.insert("o-1", 5)
    await capture_all(database, stream)
    assert (numbers(stream.payloads, "o-1")[-1], len(column(database.url, "id"))) == (5, 4)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ("'o-1', 'order_placed', NULL, now(), 1, NULL", "its payload is NULL"),
        ("NULL, 'order_placed', '1', now(), 1, NULL", "its aggregate_id is NULL"),
        ("'o-1', 'order placed', '1', now(), 1, NULL", "The event type 'order placed' can't be part"),
        ("'o-1', 'order_placed', '1', '-infinity', 1, NULL", "not a time of the years 1 to 9999: -infinity"),
        ("'o-1', 'order_placed', '1', '0044-03-15 BC', 1, NULL", "not a time of the years 1 to 9999: 0044"),
        (
            "'o-1', 'order_placed', '1', now() + interval '1 h', 1, NULL",
            "more than a minute after its commit",
        ),
        ("'o-1', 'order_placed', '1', now(), 0, NULL", "its version must be at least 1; it was 0"),
        ("'o-1', 'order_placed', '1', now(), 1, '[1]'", "its headers is not a JSON object of texts"),
        ("'o-1', 'order_placed', '1', now(), 1, '{\"Event-Id\": \"1\"}'", "the attribute 'Event-Id'"),
        ("e'o\\n1', 'order_placed', '1', now(), 1, NULL", "its aggregate's id must be 1 to 512 characters"),
    ],
)
async def test_a_row_that_can_not_be_read_is_parked_with_the_reason_and_others_go_on(
    database: ServiceDatabase, values: str, reason: str
) -> None:
    stream = MemoryStream()
    database.insert("o-2", 0)
    database.execute(
        "INSERT INTO events (aggregate_id, event_type, payload, occurred_at, version, headers)"
        f" VALUES ({values})"
    )
    database.insert("o-2", 1)
    await capture_all(database, stream)
    assert numbers(stream.payloads, "o-2") == [0, 1]
    ((error,), (payload,)) = column(database.url, "publish_error"), column(database.url, "payload")
    assert reason in error
    assert "insert a corrected row" in error
    assert set(payload["columns"]) >= {"aggregate_id", "event_type", "payload"}
    database.execute("UPDATE outbox_retries SET retry_at = now()")
    await capture_all(database, stream)  # parks it again
    assert database.execute("SELECT retry_at FROM outbox_retries") == [(None,)]
    assert len(stream.published) == 2


async def test_an_outage_of_the_target_loses_nothing(database: ServiceDatabase) -> None:
    stream = MemoryStream()
    stream.crash()
    for n in range(10):
        database.insert(f"o-{n % 2}", n)
    with pytest.raises(Unavailable):
        await capture_all(database, stream)
    stream.restart()
    async with capturing(database, stream) as capture, asyncio.TaskGroup() as tasks:
        tasks.create_task(capture.run())
        await until(lambda: len(stream.messages) == 10)
        stream.crash()
        database.insert("o-0", 10, 12)
        await until(lambda: not capture.progress.is_made)
        stream.restart()
        await until(lambda: len(stream.messages) == 12)
        capture.stop()
    assert numbers(stream.payloads, "o-0") == [0, 2, 4, 6, 8, 10, 12]
    assert column(database.url, "id") == []


async def test_an_outage_of_the_outbox_table_loses_nothing(database: ServiceDatabase) -> None:
    stream = MemoryStream()
    database.execute("ALTER TABLE outbox_events RENAME TO moved")
    database.insert("o-1", 0)
    with pytest.raises(Unavailable, match="has no outbox"):
        await capture_all(database, stream)
    async with capturing(database, stream) as capture, asyncio.TaskGroup() as tasks:
        tasks.create_task(capture.run())
        await until(lambda: not capture.progress.is_made)
        database.execute("ALTER TABLE moved RENAME TO outbox_events")
        await until(lambda: stream.messages)
        database.insert("o-1", 1)
        await until(lambda: len(stream.messages) == 2)
        capture.stop()
    assert numbers(stream.payloads, "o-1") == [0, 1]


async def test_a_second_process_takes_over_when_the_first_ends(database: ServiceDatabase) -> None:
    stream = MemoryStream()
    async with (
        capturing(database, stream) as first,
        capturing(database, stream) as second,
        asyncio.TaskGroup() as tasks,
    ):
        ending = tasks.create_task(first.run())
        database.insert("o-1", 0)
        await until(lambda: stream.messages)
        tasks.create_task(second.run())
        await until(lambda: second._is_standby)
        assert second.progress.is_made
        first.stop()
        await ending
        database.insert("o-1", 1)
        await until(lambda: len(stream.messages) == 2)
        second.stop()
    assert (first.counts.published, second.counts.published) == (1, 1)


async def test_what_the_server_keeps_for_an_idle_slot_shrinks(database: ServiceDatabase) -> None:
    stream = MemoryStream()
    source = PostgresCaptureSource(database.url, database.settings, 30_000)
    database.execute("CREATE TABLE other AS SELECT n, repeat('x', 1000) FROM generate_series(1, 2000) AS n")
    before = await source.state()
    await capture_all(database, stream)
    after = await source.state()
    await source.close()
    assert before.lag_bytes > 2_000_000 > 100_000 > after.lag_bytes


async def test_a_reader_whose_connection_the_server_ended_reads_again(database: ServiceDatabase) -> None:
    stream = MemoryStream()
    async with capturing(database, stream) as capture, asyncio.TaskGroup() as tasks:
        tasks.create_task(capture.run())
        for n in range(3):
            database.insert("o-1", n)
            await until(lambda n=n: len(stream.messages) == n + 1)  # type: ignore[misc]
            database.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
        capture.stop()
    assert numbers(stream.payloads, "o-1") == [0, 1, 2]


UNUSUAL = """
CREATE TYPE mood AS ENUM ('good', 'very good');
CREATE DOMAIN short AS varchar(20);
CREATE TABLE events (
    "Größe id" bigserial PRIMARY KEY, kind mood, who short, data bytea, "at" timestamp,
    a int[], b interval, c point, d tsvector, e money, f jsonpath
)
"""


async def test_tables_of_any_types_are_published(server: PostgresServer) -> None:
    columns = CaptureColumns(
        id="Größe id",
        aggregate_type="=Größe",
        aggregate_id="who",
        event_type="=moved",
        payload="data",
        occurred_at="at",
        content_type="=application/octet-stream",
    )
    with service_database(server, TEMPLATE, columns=columns, create_table=UNUSUAL) as database:
        await database.create_slot()
        database.execute(
            """INSERT INTO events (kind, who, data, "at", a, b, c, d, e, f) VALUES ('very good', 'Zoë',"""
            """ '\\x00ff5c', '2026-01-15 08:00', '{1,NULL}', '1 day', '(1,2)', 'a b', 1.5, '$.a')"""
        )
        for name in ("a", "b"):  # a table that changes between rows
            database.execute(f"ALTER TABLE events DROP COLUMN {name}")
            database.execute("INSERT INTO events (who, data) VALUES ('Zoë', '')")
        stream = MemoryStream()
        await capture_all(database, stream)
    ((subject, payload, headers), *others) = stream.messages
    assert (subject, payload) == ("sea.event.moved.v1", b"\x00\xff\\")
    assert [payload for _, payload, _ in others] == [b"", b""]
    assert UUID(headers["Nats-Msg-Id"]).version == 5
    assert headers == {
        "Nats-Msg-Id": headers["Nats-Msg-Id"],
        "Event-Type": "moved",
        "Event-Version": "1",
        "Occurred-At": "2026-01-15T08:00:00.000000Z",
        "Aggregate-Type": "Größe",
        "Aggregate-Id": "Zoë",
        "Content-Type": "application/octet-stream",
    }
    assert len(set(message_ids(stream))) == 3


async def test_rows_before_and_after_a_column_was_renamed_are_published_under_all_its_names(
    database: ServiceDatabase,
) -> None:
    stream = MemoryStream()
    async with capturing(database, stream) as capture:  # it has read the table before it is altered
        database.insert("o-1", 0)
        await capture.run_once()
        database.execute(  # one transaction, no part of which is confirmed
            """
            INSERT INTO events (aggregate_id, payload) VALUES ('o-1', '{"n": 1, "order": "o-1"}');
            ALTER TABLE events RENAME COLUMN payload TO body;
            INSERT INTO events (aggregate_id, body) VALUES ('o-1', '{"n": 2, "order": "o-1"}')
            """
        )
        with pytest.raises(InvalidRequest, match="no column payload for payload"):
            await capture.run_once()
    assert numbers(stream.payloads, "o-1") in ([0], [0, 1])
    old = database.settings
    new = msgspec.structs.replace(old.columns, payload="body")
    database.settings = msgspec.structs.replace(old, columns=new)
    with pytest.raises(InvalidRequest, match="have no column body for payload: it was renamed"):
        await capture_all(database, stream)
    new = msgspec.structs.replace(old.columns, payload=("payload", "body"))
    database.settings = msgspec.structs.replace(old, columns=new)
    await capture_all(database, stream)
    assert list(dict.fromkeys(numbers(stream.payloads, "o-1"))) == [0, 1, 2]
    assert column(database.url, "id") == []  # nothing was parked


async def test_the_rows_of_partitions_are_published(server: PostgresServer) -> None:
    table = """
    CREATE TABLE events (id text, aggregate_type text, aggregate_id text, event_type text, payload json)
    PARTITION BY LIST (aggregate_type);
    CREATE TABLE orders PARTITION OF events DEFAULT
    """
    with service_database(server, TEMPLATE, columns=CaptureColumns(), create_table=table) as database:
        await database.create_slot()
        database.execute("""INSERT INTO events VALUES ('é', 'order', 'o-1', 'made', '{"a":  1}')""")
        stream = MemoryStream()
        await capture_all(database, stream)
    assert stream.payloads == [b'{"a":  1}']


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
async def test_texts_are_read_in_the_encoding_of_the_database(server: PostgresServer, encoding: str) -> None:
    name = f"in_{encoding.lower()}"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {name} ENCODING {encoding} LOCALE 'C' TEMPLATE template0".encode()
        )
    url = server.url(name)
    migrate(url, "messaging")
    text = TABLE.replace("payload jsonb", "payload text")
    database = ServiceDatabase(url, create_table=text)
    try:
        await database.create_slot()
        text = f"convert_from('\\xe9', '{encoding}')"
        database.execute(f"INSERT INTO events (aggregate_id, payload) VALUES ('o-1', {text}), ({text}, '2')")
        stream = MemoryStream()
        await capture_all(database, stream)
        if encoding == "LATIN1":
            assert stream.payloads == ["é".encode(), b"2"]
        else:
            assert stream.payloads == [b"\xe9"]
            (error,) = column(url, "publish_error")  # bytes, as this encoding is none
            assert b"its aggregate_id is not text in utf-8" in error
    finally:
        database.drop_slot()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": "no_such"}, "has no table public.no_such; correct table under"),
        ({"columns": CaptureColumns(payload="body")}, "has no column body for payload; set payload under"),
        (
            {"publication": "no_such"},
            "has no publication no_such; create it by `postroom outbox capture --create`",
        ),
        (
            {"slot": "no_such"},
            "has no replication slot no_such; create it by `postroom outbox capture --create`",
        ),
        ({"publication": "of_another"}, "does not publish inserts into public.events; alter it"),
        ({"publication": "of_updates"}, "does not publish inserts into public.events; alter it"),
        ({"slot": "of_another_plugin"}, "is of another database or plugin; set slot under"),
    ],
)
async def test_what_can_not_be_captured_is_refused_with_the_remedy(
    database: ServiceDatabase, changes: dict[str, Any], message: str
) -> None:
    database.execute("CREATE TABLE other (n int)")
    database.execute("CREATE PUBLICATION of_another FOR TABLE other")
    database.execute("CREATE PUBLICATION of_updates FOR TABLE events WITH (publish = 'update')")
    if "slot" in changes and "plugin" in changes["slot"]:
        database.execute("SELECT pg_create_physical_replication_slot('of_another_plugin')")
    database.settings = msgspec.structs.replace(database.settings, **changes)
    try:
        with pytest.raises((InvalidRequest, NotFound), match=re.escape(message)):
            await capture_all(database, MemoryStream())
    finally:
        database.drop_slot()


async def test_a_table_that_is_renamed_is_captured_and_then_refused(database: ServiceDatabase) -> None:
    stream = MemoryStream()
    async with capturing(database, stream) as capture:
        running = asyncio.create_task(capture.run())
        database.insert("o-1", 0)
        await until(lambda: stream.messages)
        with psycopg.connect(database.url) as connection:
            connection.execute("ALTER TABLE events RENAME TO renamed")
            connection.execute("INSERT INTO renamed (aggregate_id, payload) VALUES ('o-1', '1')")
        await until(lambda: len(stream.messages) == 2)
        capture._right_ends = 0  # as if the time of the next check had come
        with pytest.raises(InvalidRequest, match=r"has no table public\.events"):
            await asyncio.wait_for(running, SECONDS)


async def test_a_publication_that_is_dropped_ends_an_idle_capture(
    database: ServiceDatabase,
) -> None:
    async with capturing(database, MemoryStream()) as capture:
        running = asyncio.create_task(capture.run())
        await until(lambda: capture._right_ends)
        database.execute("DROP PUBLICATION postroom_outbox")
        capture._right_ends = 0
        with pytest.raises(NotFound, match="has no publication postroom_outbox"):
            await asyncio.wait_for(running, SECONDS)


async def test_a_slot_is_created_once(database: ServiceDatabase) -> None:
    assert not await database.create_slot()


async def test_the_outbox_table_itself_is_refused(database: ServiceDatabase) -> None:
    target = MailboxTarget(address="/no/such/folder/mail.db")
    with pytest.raises(InvalidRequest, match="is the outbox table, whose events"):
        async with open_capture(database.messaging, CaptureSettings(table="outbox_events"), target):
            pass


@pytest.mark.parametrize(
    "settings",
    [
        {"table": ""},
        {"table": "a."},
        {"table": "a", "slot": "a-b"},
        {"table": "a", "publication": ""},
        {"table": 5},
        {"table": "a", "columns": {}},
        {"table": "a", "slot": None},
        {"table": "a", "database": 1},
    ],
)
def test_a_name_that_postgresql_would_refuse_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="must be"):
        CaptureSettings(**settings)


@pytest.mark.parametrize(
    "columns",
    [
        {"id": "=1"},
        {"id": ""},
        {"headers": ""},
        {"id": 5},
        {"event_type": None},
        {"payload": ()},
        {"headers": ("a", "=b")},
    ],
)
def test_a_column_that_no_table_can_have_is_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="must be"):
        CaptureColumns(**columns)


async def test_without_logical_decoding_the_setting_is_named(messaging_database: str) -> None:
    with psycopg.connect(messaging_database) as connection:
        connection.execute(TABLE.encode())
    with pytest.raises(InvalidRequest, match="has wal_level = replica; set wal_level = logical"):
        await create_slot(MessagingSettings(messaging_database), CaptureSettings(table="events"))


async def test_a_slot_whose_log_was_removed_is_an_error_and_not_a_gap() -> None:
    limits = {"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB", "min_wal_size": "32MB"}
    with postgres_folder() as folder, PostgresServer(folder, LOGICAL | limits) as server:
        url = server.create_database()
        migrate(url, "messaging")
        database = ServiceDatabase(url)
        await database.create_slot()
        database.insert("o-1", 0)
        for _ in range(3):
            database.execute("SELECT pg_switch_wal()")
            database.execute("CREATE TABLE filler AS SELECT repeat('x', 1000) FROM generate_series(1, 20000)")
            database.execute("DROP TABLE filler")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CHECKPOINT")
        with pytest.raises(
            InvalidRequest, match=r"removed the write-ahead log.*insert the missing rows again"
        ):
            await capture_all(database, MemoryStream())


async def test_a_mailbox_has_each_row_once(database: ServiceDatabase, tmp_path: Path) -> None:
    target = MailboxTarget(address=str(tmp_path / "mail.db"))
    settings = OutboxSettings(cleanup_every_ms=0)
    for n in range(2):
        database.insert("o-1", n)
        async with open_capture(database.messaging, database.settings, target, settings) as capture:
            await capture.run_once()
    async with connect(str(tmp_path / "mail.db")) as mailbox:
        received = await mailbox.receive_messages("sea.order", max_messages=10)
    assert [each.message_id for each in received] == [str(id_) for id_ in ids(database)]
