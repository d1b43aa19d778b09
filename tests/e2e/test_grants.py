"""Roles of PostgreSQL that use what another user migrates (`postroom migrate --grant-to`)."""

from collections.abc import Iterator
from contextlib import closing
from secrets import token_hex
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
import pytest
from psycopg import sql

from postroom import MailboxOutbox, NewMessage
from postroom.adapters.postgres.database import connect
from postroom.adapters.postgres.event_log import PostgresEventLog
from tests.conformance.records import append
from tests.e2e.conftest import Postroom
from tests.integration.postgres.event_logs import sents
from tests.projections.histories import build_without_spark

SETS = ("store", "leases", "keys", "messaging")


@pytest.fixture
def role(empty_database: str) -> Iterator[str]:
    """Return a role without rights, whose name has to be quoted."""
    name = f'Shop "app" {token_hex(4)}'
    with closing(connect(empty_database, "test")) as database:
        database.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'hush'").format(sql.Identifier(name)))
        yield name
        database.execute(sql.SQL("DROP OWNED BY {0}").format(sql.Identifier(name)))
        database.execute(sql.SQL("DROP ROLE {0}").format(sql.Identifier(name)))


@pytest.fixture
def role_url(empty_database: str, role: str) -> str:
    url = urlsplit(empty_database)
    return url._replace(netloc=f"{quote(role)}:hush@{url.hostname}:{url.port}").geturl()


def migrate(postroom: Postroom, url: str, set_: str, *arguments: str) -> str:
    out: str = postroom.ok("migrate", f"--{set_}", url, *arguments).out
    return out


@pytest.mark.extended
def test_a_role_uses_partitions_and_read_models_that_were_made_after_the_grant(
    postroom: Postroom, empty_database: str, role: str, role_url: str
) -> None:
    assert f"granted to {role}" in migrate(postroom, empty_database, "store", "--grant-to", role)
    with closing(PostgresEventLog(role_url, "other@local", partition_positions=8)) as log:
        records = append(log, sents(40))
        assert list(log.read()) == records
    there: dict[str, Any] = {"POSTROOM_STORE": role_url}
    postroom.ok("send", "orders", "hello", "--id", "order-1", **there)
    for number in range(2):  # each makes tables of another version
        build_without_spark(empty_database)
        postroom.ok("send", "orders", "hello", "--id", f"later-{number}", **there)
        postroom.ok("views", "follow", "--once", **there)
        assert len(postroom.ok("search", "--json", **there).lines) == 42 + number
    with closing(psycopg.connect(role_url, autocommit=True)) as connection:
        for table in ("log_1_4", "log_index_1_4", "mailbox"):
            connection.execute(f"SELECT FROM postroom.{table}".encode())
        for forbidden in ("CREATE TABLE postroom.mine ()", "DELETE FROM postroom.postroom_migrations"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(forbidden.encode())
    findings = postroom("doctor", "--json", **there).json["checks"]
    rights = {each["check"]: each["status"] for each in findings if each["check"].startswith("database ")}
    assert (rights["database rights"], rights["database tables"]) == ("ok", "ok")


def test_partitions_do_not_count_as_missing_rights(
    postroom: Postroom, empty_database: str, role: str, role_url: str
) -> None:
    migrate(postroom, empty_database, "store")
    with closing(connect(empty_database, "test")) as database:
        for statement in (
            "GRANT USAGE ON SCHEMA postroom TO {}",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA postroom TO {}",
            "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA postroom TO {}",
        ):
            database.execute(sql.SQL(statement).format(sql.Identifier(role)))
    postroom.ok("send", "orders", "hello", POSTROOM_STORE=role_url)
    findings = postroom("doctor", "--json", POSTROOM_STORE=role_url).json["checks"]
    assert [each["status"] for each in findings if each["check"] == "database rights"] == ["ok"]


@pytest.mark.parametrize("set_", SETS)
def test_a_role_may_use_each_set_but_no_other_table_and_not_migrate(
    postroom: Postroom, empty_database: str, role: str, role_url: str, set_: str
) -> None:
    with closing(connect(empty_database, "test")) as database:
        database.execute(b"CREATE TABLE public.salaries ()")
        migrate(postroom, empty_database, set_)
        assert "permission denied" in postroom("migrate", f"--{set_}", role_url).err
        migrate(postroom, empty_database, set_, "--grant-to", role, "--grant-to", role)
        assert "is up to date" in migrate(postroom, role_url, set_)
        tables = database.execute(
            b"SELECT oid::regclass::text FROM pg_class WHERE relkind IN ('r', 'p')"
            b" AND relnamespace::regnamespace::text IN ('public', 'postroom', 'postroom_keys')"
        ).fetchall()
        denied = [
            name
            for (name,) in tables
            for (may,) in database.execute(
                "SELECT has_table_privilege(%s, %s, 'SELECT') AND has_table_privilege(%s, %s, 'DELETE')",
                (role, name, role, name),
            )
            if not may
        ]
        assert len(tables) > len(denied)
        assert {name.rpartition(".")[2] for name in denied} == {"postroom_migrations", "salaries"}


def test_a_role_erases_subject_keys(
    postroom: Postroom, empty_database: str, role: str, role_url: str
) -> None:
    migrate(postroom, empty_database, "keys", "--grant-to", role)
    with closing(psycopg.connect(role_url, autocommit=True)) as connection:
        connection.execute("SELECT postroom_keys.rewrite_subjects('nobody', NULL)")
        connection.execute(
            "INSERT INTO postroom_keys.subjects (pseudonym, blind_index, data_key, created_at)"
            " VALUES ('a', 'b', 'c', 1)"
        )
        found = connection.execute("SELECT postroom_keys.rewrite_subjects('a', 2)").fetchall()
    assert found == [(True,)]


def test_an_unknown_role_changes_nothing(postroom: Postroom, empty_database: str) -> None:
    for name in ("nobody", "PUBLIC", "public", "", 'x"; DROP TABLE y; --', "n" * 70):
        refused = postroom("migrate", "--store", empty_database, "--grant-to", name)
        assert (refused.code, f"has no role {name!r}; create it first" in refused.err) == (1, True)
    with closing(connect(empty_database, "test")) as database:
        assert database.execute(b"SELECT to_regnamespace('postroom')").fetchall() == [(None,)]


def test_tables_of_somebody_else_are_named(
    postroom: Postroom, empty_database: str, role: str, role_url: str
) -> None:
    migrate(postroom, empty_database, "store", "--grant-to", role)
    refused = postroom("migrate", "--store", role_url, "--grant-to", "pg_monitor")
    assert refused.code == 2
    assert "denies a privilege" in refused.err or "can't grant privileges" in refused.err


def test_a_file_has_no_roles(postroom: Postroom) -> None:
    postroom.ok("send", "orders", "hello")
    refused = postroom("migrate", "--grant-to", "app")
    assert (refused.code, "--grant-to is for PostgreSQL databases" in refused.err) == (2, True)


def test_a_role_counts_recorded_messages_after_the_grant_and_is_told_of_it_before(
    postroom: Postroom, empty_database: str, role: str, role_url: str
) -> None:
    migrate(postroom, empty_database, "messaging")
    with closing(connect(empty_database, "test")) as database, database.transaction():
        message = NewMessage(topic="orders", payload=b"", message_id="order-1")
        MailboxOutbox(wall=lambda: 1).record(database, message)

    def outboxes() -> list[tuple[str, str, str]]:
        done = postroom("doctor", "--json", "--outbox", role_url)
        findings = [each for each in done.json["checks"] if each["check"] == "outboxes"]
        return [(each["status"], each["finding"], each["advice"]) for each in findings]

    ((status, finding, advice),) = outboxes()
    assert status == "warning"
    assert "denies a privilege" in finding
    assert "--grant-to" in advice
    migrate(postroom, empty_database, "messaging", "--grant-to", role)
    ((status, finding, advice),) = outboxes()
    assert status == "warning"
    assert finding.startswith("1 message for main@local in postgresql://")
