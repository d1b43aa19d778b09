"""Rows that a capture could not read are read again by a retry, with the settings of then."""

import json

import msgspec
import psycopg
import pytest

from postroom.adapters.postgres.migrate import migrate
from tests.support.captures import LOGICAL, ServiceDatabase, capturing, service_database
from tests.support.memory_stream import MemoryStream
from tests.support.outboxes import column
from tests.support.servers.postgres import PostgresServer, postgres_folder

TEMPLATE = "template_messaging"
TABLE = """
CREATE TABLE events (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregate_type text DEFAULT 'order', aggregate_id text,
    event_type text DEFAULT 'order_placed', kind text, payload jsonb, body {type}, occurred_at timestamptz,
    version int, headers jsonb
)
"""


@pytest.fixture(scope="module")
def server():
    with postgres_folder() as folder, PostgresServer(folder, LOGICAL) as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {TEMPLATE}")
        migrate(server.url(TEMPLATE), "messaging")
        yield server


@pytest.fixture(params=["jsonb"])
async def database(request, server):
    table = TABLE.format(type=request.param)
    with service_database(server, TEMPLATE, create_table=table) as database:
        await database.create_slot()
        yield database


def insert(
    database: ServiceDatabase, *bodies: str, aggregate: str = "'o-1'", kind: str = "order_moved"
) -> None:
    """Insert rows whose payload is in `body`, as after a change of the service."""
    for body in bodies:
        database.execute(
            f"INSERT INTO events (aggregate_id, kind, body) VALUES ({aggregate}, %s, %s)", (kind, body)
        )


async def capture(database: ServiceDatabase) -> MemoryStream:
    """Publish the rows, and the events of the outbox that are due."""
    stream = MemoryStream()
    async with capturing(database, stream) as opened:
        await opened.run_once()
    return stream


def configure(postroom, database: ServiceDatabase, capture: str = "", **columns: str) -> None:
    """Write the settings file, with the columns that differ from the defaults."""
    mapped = msgspec.structs.asdict(msgspec.structs.replace(database.settings.columns, **columns))
    lines = [f"{name} = {json.dumps(value)}" for name, value in mapped.items() if value is not None]
    messaging = f'[messaging]\ndatabase = "{database.url}"\ncontext = "sea"'
    settings = [messaging, capture, *lines] if capture else [messaging]
    (postroom.folder / "postroom.toml").write_text("\n".join(settings))


CAPTURE = '[capture]\ntable = "events"\n[capture.columns]'


@pytest.mark.parametrize(
    ("database", "bodies", "payloads"),
    [
        ("jsonb", ('{"n": 1}', '{"n":  2}'), [b'{"n": 1}', b'{"n": 2}']),
        ("text", ("é\\x00", "{"), ["é\\x00".encode(), b"{"]),
        ("bytea", (r"\x00ff", r"\x"), [b"\x00\xff", b""]),
    ],
    indirect=["database"],
)
async def test_rows_that_earlier_settings_could_not_read_are_published_in_order_by_a_retry_with_new_ones(
    postroom, database, bodies, payloads
):
    insert(database, *bodies)
    assert (await capture(database)).messages == []
    configure(postroom, database, CAPTURE, payload="body", event_type="kind")
    assert postroom.ok("outbox", "retry", "--all").out == "2 events will be retried\n"
    database.execute("INSERT INTO events (aggregate_id, payload) VALUES ('o-1', '3')")
    stream = await capture(database)
    assert stream.payloads == [*payloads, b"3"]
    assert [subject for subject, _, _ in stream.messages] == [
        "sea.event.order_moved.v1", "sea.event.order_moved.v1", "sea.event.order_placed.v1",
    ]  # fmt: skip
    ids = [str(id_) for (id_,) in database.execute("SELECT id FROM events ORDER BY ctid")]
    assert [headers["Nats-Msg-Id"] for _, _, headers in stream.messages] == ids


async def test_a_row_moves_to_the_aggregate_that_is_read_from_it_and_later_events_wait_for_it(
    postroom, database
):
    insert(database, "1", aggregate="NULL", kind="o-7")
    await capture(database)
    configure(postroom, database, CAPTURE, payload="body", aggregate_id="kind")
    postroom.ok("outbox", "retry", "--all")
    assert column(database.url, "aggregate_id") == ["o-7"]
    database.execute("INSERT INTO events (aggregate_id, payload) VALUES ('o-7', '2')")
    assert (await capture(database)).payloads == [b"1", b"2"]


async def test_a_row_that_still_can_not_be_read_stays_parked_with_the_reason_and_blocks_no_other_retry(
    postroom, database
):
    insert(database, "1")
    insert(database, "2", aggregate="'o-2'", kind="no token")
    await capture(database)
    (_, bad) = column(database.url, "id")
    configure(postroom, database, CAPTURE, payload="body", event_type="kind")
    done = postroom("outbox", "retry", str(bad))
    assert done.code == 1
    assert f"Outbox event {bad} still can't be published: " in done.err
    assert "'no token'" in done.err
    assert "discard it" in done.err
    assert (await capture(database)).messages == []
    done = postroom("outbox", "retry", "--all")
    assert done.code == 1
    assert "1 event will be retried, and 1 stay parked. Outbox event" in done.err
    assert (await capture(database)).payloads == [b"1"]


@pytest.mark.parametrize(
    ("section", "columns", "reason"),
    [
        ("", {}, "retry it with the settings file that has its [capture]"),
        (CAPTURE.replace("events", "other"), {}, "It is a row of the table public.events, and [capture] has"),
        (CAPTURE, {"payload": "contents"}, "have no column contents for payload: it was renamed"),
    ],
)
async def test_settings_that_can_not_be_those_of_the_row_are_refused(
    postroom, database, section, columns, reason
):
    insert(database, "1")
    await capture(database)
    (id_,) = column(database.url, "id")
    configure(postroom, database, section, **columns)
    done = postroom("outbox", "retry", str(id_))
    assert done.code == 1
    assert reason in done.err
    assert str(id_) in done.err


async def test_a_row_that_an_earlier_version_parked_is_refused_with_what_is_lost(postroom, database):
    insert(database, "1")
    await capture(database)
    # As versions did that held the texts of the columns only.
    database.execute("UPDATE outbox_events SET payload = payload->'columns'")
    database.execute("DELETE FROM aggregate_events WHERE version = 1")
    configure(postroom, database, CAPTURE, payload="body")
    done = postroom("outbox", "retry", "--all")
    assert done.code == 1
    assert "without the types of its columns" in done.err
    assert "insert a corrected row" in done.err
    assert (await capture(database)).messages == []


@pytest.mark.parametrize("payload", ["1", "{}", """jsonb_set(payload, '{types}', '{}')"""])
async def test_a_held_row_that_was_altered_is_refused(postroom, database, payload):
    insert(database, "1")
    await capture(database)
    value = payload if "(" in payload else f"'{payload}'"
    database.execute(f"UPDATE outbox_events SET payload = {value}")
    configure(postroom, database, CAPTURE, payload="body")
    done = postroom("outbox", "retry", "--all")
    assert done.code == 1
    assert "Its payload is not a row of a captured table" in done.err
