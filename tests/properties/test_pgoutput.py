"""The decoder of pgoutput returns what PostgreSQL inserted, and refuses all other bytes."""

from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.adapters.postgres.capture.pgoutput import (
    Begin,
    Commit,
    Insert,
    Message,
    Other,
    Relation,
    decode,
)
from tests.support.captures import LOGICAL
from tests.support.servers.postgres import PostgresServer, postgres_folder

TEXTS = st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
ROWS = st.lists(
    st.tuples(TEXTS, st.none() | st.binary(max_size=40), st.none() | st.integers(-(2**63), 2**63 - 1)),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def connection() -> Iterator[psycopg.Connection]:
    with (
        postgres_folder() as folder,
        PostgresServer(folder, LOGICAL) as server,
        psycopg.connect(server.url(), autocommit=True) as connection,
    ):
        connection.execute('CREATE TABLE "Größe 1" ("ä b" text, data bytea, n bigint)')
        connection.execute("CREATE TABLE other (n int PRIMARY KEY)")
        connection.execute("CREATE TYPE mood AS ENUM ('good')")
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        yield connection


def changes(connection: psycopg.Connection) -> list[bytes]:
    """Return the messages since the last call."""
    rows = connection.execute(
        "SELECT data FROM pg_logical_slot_get_binary_changes('s', NULL, NULL,"
        " 'proto_version', '1', 'publication_names', 'p')"
    )
    return [bytes(data) for (data,) in rows]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS)
def test_inserted_rows_are_decoded(
    connection: psycopg.Connection, rows: list[tuple[str | None, bytes | None, int | None]]
) -> None:
    with connection.transaction(), connection.cursor() as cursor:
        cursor.executemany('INSERT INTO "Größe 1" VALUES (%s, %s, %s)', rows)
    decoded = [decode(data) for data in changes(connection)]
    assert [type(message) for message in decoded[:1] + decoded[-1:]] == [Begin, Commit]
    (relation,) = [each for each in decoded if isinstance(each, Relation)]
    assert (relation.schema.decode(), relation.name.decode()) == ("public", "Größe 1")
    assert [name.decode() for name, _ in relation.columns] == ["ä b", "data", "n"]
    assert [type_ for _, type_ in relation.columns] == [25, 17, 20]
    inserted = [each.values for each in decoded if isinstance(each, Insert)]
    assert inserted == [
        (
            None if text is None else text.encode(),
            None if data is None else b"\\x" + data.hex().encode(),
            None if n is None else str(n).encode(),
        )
        for text, data, n in rows
    ]


def test_changes_that_are_no_inserts_are_recognised(connection: psycopg.Connection) -> None:
    connection.execute("ALTER TABLE other ADD COLUMN IF NOT EXISTS m mood")
    connection.execute("INSERT INTO other VALUES (1, 'good')")
    connection.execute("UPDATE other SET n = 2")
    connection.execute("DELETE FROM other")
    connection.execute("TRUNCATE other")
    kinds = {each.kind for each in map(decode, changes(connection)) if isinstance(each, Other)}
    assert kinds == {b"Y", b"U", b"D", b"T"}


@settings(max_examples=300, deadline=None)
@given(
    data=st.binary(max_size=60)
    | st.tuples(st.sampled_from(b"BCRIUDTYOM"), st.binary(max_size=60)).map(
        lambda pair: bytes([pair[0]]) + pair[1]
    )
)
def test_bytes_are_a_message_or_a_value_error(data: bytes) -> None:
    try:
        message: Message = decode(data)
    except ValueError:
        return
    assert isinstance(message, Begin | Commit | Relation | Insert | Other)


def test_a_message_that_is_cut_off_is_refused_at_every_length(connection: psycopg.Connection) -> None:
    connection.execute("INSERT INTO \"Größe 1\" VALUES ('text', 'bytes', 1)")
    for data in changes(connection):
        for length in range(len(data)):
            try:
                decode(data[:length])
            except ValueError:
                continue
            pytest.fail(f"{data[:length]!r} was decoded")
