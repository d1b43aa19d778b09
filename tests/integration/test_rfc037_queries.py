"""RFC-037's table `mailbox`: its columns, and the queries of its Appendix A as they stand."""

import asyncio
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from string import ascii_letters
from typing import Any

import msgspec
import psycopg
import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.queries import open_read_models
from postroom.application.messages import NewMessage
from postroom.domain.envelope.build import open_envelope
from postroom.domain.errors import IntegrityFailure
from postroom.domain.names import DEFAULT_MAILBOX
from postroom.domain.search import EventFilter, Order
from tests.projections import following
from tests.projections.histories import model_store, new_follower, rebuild, take_extents
from tests.projections.local_runner import LocalRunner
from tests.support.altered_commits import alter

TIME_RANGE = """
SELECT message_id, timestamp, topic, principal
FROM mailbox
WHERE timestamp BETWEEN 1697000000000 AND 1697086400000
ORDER BY timestamp DESC
LIMIT 100;
"""
PRINCIPAL_AND_TOPIC = """
SELECT message_id, timestamp, correlation_id, body
FROM mailbox
WHERE principal = 'user-123'
AND topic LIKE 'admin.users.%'
ORDER BY timestamp DESC;
"""
CORRELATION_ID = """
SELECT message_id, timestamp, topic, principal, body
FROM mailbox
WHERE correlation_id = 'trace-abc123'
ORDER BY timestamp ASC;
"""
COLUMNS = [
    *("id", "message_id", "timestamp", "topic", "content_type", "schema_url", "schema_version", "encryption"),
    *("correlation_id", "principal", "namespace", "trace_id", "span_id", "custom_headers", "envelope_blob"),
    "created_at",
]
MESSAGES = [
    NewMessage(
        topic="admin.users.created",
        payload=b"created",
        message_id="m-1",
        principal="user-123",
        correlation_id="trace-abc123",
        published_at_us=1_697_000_000_000_000,
        attrs={"tenant": "blue"},
    ),
    NewMessage(
        topic="admin.users.deleted",
        payload=b"deleted",
        message_id="m-2",
        principal="user-123",
        published_at_us=1_697_000_001_000_000,
    ),
    NewMessage(
        topic="shop",
        payload=b"paid",
        message_id="m-3",
        principal="user-456",
        correlation_id="trace-abc123",
        published_at_us=1_697_000_002_000_000,
    ),
    NewMessage(topic="shop", payload=b"old", message_id="m-4", published_at_us=1_600_000_000_000_000),
]

Query = Callable[[str], list[dict[str, Any]]]
Execute = Callable[..., None]


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    url: str = request.getfixturevalue("postgres_store")
    return url


@pytest.fixture
def query(store: str) -> Query:
    def run(statement: str) -> list[dict[str, Any]]:
        if store.startswith("postgresql:"):
            with psycopg.connect(store, options="-csearch_path=postroom") as connection:
                return fetch(connection.execute(statement.encode()))
        with closing(sqlite3.connect(f"{store}-views")) as connection:
            return fetch(connection.execute(statement))

    return run


def fetch(cursor: Any) -> list[dict[str, Any]]:
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def send(store: str, *messages: NewMessage, mailbox: str = DEFAULT_MAILBOX) -> None:
    async def run() -> None:
        async with open_mailbox(store, mailbox) as opened:
            await opened.send_batch(messages)

    asyncio.run(run())


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["message_id"] for row in rows]


def test_the_queries_of_appendix_a_run_as_they_stand(store: str, query: Query) -> None:
    send(store, *MESSAGES)
    following.build(store, take_extents(store))

    in_range = query(TIME_RANGE)
    assert [tuple(row.values()) for row in in_range] == [
        ("m-3", 1_697_000_002_000, "shop", "user-456"),
        ("m-2", 1_697_000_001_000, "admin.users.deleted", "user-123"),
        ("m-1", 1_697_000_000_000, "admin.users.created", "user-123"),
    ]
    of_principal = query(PRINCIPAL_AND_TOPIC)
    assert ids(of_principal) == ["m-2", "m-1"]
    traced = query(CORRELATION_ID)
    assert ids(traced) == ["m-1", "m-3"]
    assert {row["body"] for row in (*of_principal, *traced)} == {None}  # only the log has envelopes
    with closing(open_read_models(store)) as models:
        found = models.search(EventFilter(correlation_id="trace-abc123", order=Order.OLDEST_FIRST)).items
    assert [open_envelope(each.envelope_blob).payload for each in found] == [b"created", b"paid"]


def test_the_view_has_the_columns_of_the_rfcs_table(store: str, query: Query) -> None:
    send(store, *MESSAGES)
    following.build(store, take_extents(store))
    rows = {row["message_id"]: row for row in query("SELECT * FROM mailbox")}
    assert list(rows["m-1"]) == [*COLUMNS, "body"]
    assert rows["m-1"]["custom_headers"] == '{"tenant":"blue"}'
    assert (rows["m-1"]["namespace"], rows["m-1"]["schema_url"]) == ("main", None)


def test_the_view_shows_the_active_version(store: str, query: Query) -> None:
    send(store, MESSAGES[0])
    following.build(store, take_extents(store))
    send(store, MESSAGES[1])
    assert ids(query("SELECT message_id FROM mailbox ORDER BY id")) == ["m-1"]
    for _ in range(3):  # so that the tables of the first version are dropped
        following.build(store, take_extents(store))
        assert ids(query("SELECT message_id FROM mailbox ORDER BY id")) == ["m-1", "m-2"]
    send(store, MESSAGES[2])
    following.build(store, take_extents(store))
    model_store(store).roll_back()
    assert ids(query("SELECT message_id FROM mailbox ORDER BY id")) == ["m-1", "m-2"]


def test_the_queries_of_appendix_a_use_the_rfcs_indexes(store: str, query: Query) -> None:
    others = [
        NewMessage(
            topic="admin.users.created",
            payload=b"x" * 100,
            principal=f"user-{1_000 + number}",
            correlation_id=f"other-{number}",
            trace_id=f"trace-{number}",
            published_at_us=1_600_000_000_000_000,
        )
        for number in range(2_000)
    ]
    long = "".join(random.Random(37).choices(ascii_letters, k=50_000))
    too_long = NewMessage(topic="shop", payload=b"", principal=long)
    send(store, *MESSAGES, too_long, *others)
    version = rebuild(store, runner=LocalRunner()).version
    explain = "EXPLAIN" if store.startswith("postgresql:") else "EXPLAIN QUERY PLAN"
    for statement, column in (
        (TIME_RANGE, "timestamp"),
        (PRINCIPAL_AND_TOPIC, "principal"),
        (CORRELATION_ID, "correlation_id"),
        ("SELECT message_id FROM mailbox WHERE principal = 'user-1234'", "principal"),
        ("SELECT message_id FROM mailbox WHERE trace_id = 'trace-7'", "trace_id"),
    ):
        plan = " ".join(str(value) for row in query(f"{explain} {statement}") for value in row.values())
        assert f"idx_{column}_v{version}" in plan
        assert "SCAN mailbox" not in plan
        assert "Seq Scan" not in plan
    (row,) = query(f"SELECT principal FROM mailbox WHERE principal = '{long}'")
    assert row["principal"] == long


# -- ids ---


@pytest.fixture
def execute(store: str) -> Execute:
    """Run statements that write into the read models."""

    def run(*statements: str) -> None:
        if store.startswith("postgresql:"):
            with psycopg.connect(store, options="-csearch_path=postroom") as database:
                for statement in statements:
                    database.execute(statement.encode())
            return
        with closing(sqlite3.connect(f"{store}-views")) as file, file:
            for statement in statements:
                file.execute(statement)

    return run


def copy_rows(version: int) -> tuple[str, ...]:
    """Return statements that copy all messages to other places."""
    table = f"mailbox_v{version}"
    return (
        f"CREATE TEMP TABLE copied AS SELECT * FROM {table}",
        "UPDATE copied SET id = -id",
        f"INSERT INTO {table} SELECT * FROM copied",
    )


def test_a_message_id_is_unique_in_its_mailbox(store: str, query: Query, execute: Execute) -> None:
    send(store, MESSAGES[0])
    send(store, MESSAGES[0], mailbox="other@local")
    version = following.build(store, take_extents(store))
    assert ids(query("SELECT message_id FROM mailbox")) == ["m-1", "m-1"]
    with pytest.raises((sqlite3.IntegrityError, psycopg.errors.UniqueViolation), match="message_id"):
        execute(*copy_rows(version))


def test_records_altered_to_the_same_id_are_reported(store: str) -> None:
    send(store, MESSAGES[0])
    following.build(store)
    send(store, msgspec.structs.replace(MESSAGES[0], message_id="m-2"))
    alter(store, "events", lambda events: events.replace(b"m-2", b"m-1"))
    with (
        closing(new_follower(store)) as follower,
        pytest.raises(IntegrityFailure, match="another message of its topic has the same id"),
    ):
        follower.advance()
    with pytest.raises(IntegrityFailure, match="another message of its topic has the same id"):
        rebuild(store, runner=LocalRunner())


def test_an_id_that_is_sent_again_after_retention_belongs_to_the_later_message(
    store: str, query: Query
) -> None:
    settle_and_remove(store, None)
    following.build(store, [])
    with closing(new_follower(store)) as follower:
        follower.advance()
        settle_and_remove(store, None)
        send(store, MESSAGES[0])
        follower.advance()
    assert ids(query("SELECT message_id FROM mailbox")) == ["m-1"]


def test_with_an_archive_an_id_that_is_sent_again_belongs_to_both_messages(
    store: str, query: Query, tmp_path: Path
) -> None:
    archive = str(tmp_path / "archive")
    settle_and_remove(store, archive)
    send(store, MESSAGES[0])
    rebuild(store, archive=archive, runner=LocalRunner())
    assert ids(query("SELECT message_id FROM mailbox")) == ["m-1", "m-1"]


def settle_and_remove(store: str, archive: str | None) -> None:
    """Send the first message, ack it, and remove its records from the log."""

    async def run() -> None:
        async with open_mailbox(store, archive=archive) as mailbox:
            sent = await mailbox.send_message(MESSAGES[0])
            (received,) = await mailbox.receive_messages(MESSAGES[0].topic)
            assert received.message_id == sent.message_id
            await mailbox.ack_messages([received.receipt])
            await asyncio.sleep(0.002)
            await mailbox.delete_old_events(mailbox.engine.now())

    asyncio.run(run())
