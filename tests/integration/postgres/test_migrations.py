"""Migrations: they make what `schema/` shows, once, in order, and leave running what ran before them."""

import os
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from postroom.adapters.compose import list_mailboxes, open_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.postgres.database import connect
from postroom.adapters.postgres.event_log import PostgresEventLog
from postroom.adapters.postgres.migrate import SCHEMAS, check, migrate, migrations
from postroom.adapters.sql.statements import Migration
from postroom.adapters.sql.transaction import for_psycopg
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable, UnusableServer, UnusableStore
from tests.conformance.log_store import ONE
from tests.conformance.records import append, mixed
from tests.support.fixtures import CreateDatabase

CATALOG = Path(__file__).with_name("catalog.sql").read_text("utf-8")
FROZEN = Path(__file__).with_name("frozen")
"""`<set>/<number>/`: the statements as they were when that migration was the newest.

The store has none yet: its migrations were rewritten when the log became one of commits.
"""
SETS = ("keys", "leases", "messaging", "store")


def catalog(url: str) -> list[str]:
    """Return all that is in a database, a line each."""
    with closing(connect(url, "test")) as connection:
        return [line for (line,) in connection.execute(CATALOG) if "postroom_migrations" not in line]


def apply(url: str, text: str) -> None:
    with closing(connect(url, "test")) as connection:
        connection.execute(text.encode())


def names(found: list[Migration]) -> list[tuple[str, int]]:
    return [(each.set, each.number) for each in found]


# -- what they make ---


@pytest.mark.parametrize("set_", SETS)
def test_all_migrations_together_make_what_the_schema_file_says(
    create_database: CreateDatabase, set_: str
) -> None:
    migrated, made = create_database(None), create_database(None)
    migrate(migrated, set_)
    if set_ in SCHEMAS:
        apply(made, f"CREATE SCHEMA {SCHEMAS[set_]}")
    apply(made, files("postroom.adapters.postgres").joinpath("schema", f"{set_}.sql").read_text("utf-8"))
    assert catalog(migrated) == catalog(made)
    assert len(catalog(made)) > 20


@pytest.mark.parametrize("set_", SETS)
def test_migrations_are_numbered_without_a_gap(set_: str) -> None:
    assert [each.number for each in migrations(set_)] == list(range(1, len(migrations(set_)) + 1))


def test_migrating_again_does_nothing(empty_database: str) -> None:
    everything = [("store", each.number) for each in migrations("store")]
    assert names(migrate(empty_database, "store")) == everything
    before = catalog(empty_database)
    assert migrate(empty_database, "store") == []
    assert catalog(empty_database) == before


def test_migrations_are_applied_one_by_one_up_to_a_target(empty_database: str) -> None:
    assert names(migrate(empty_database, "store", target=1)) == [("store", 1)]
    assert names(migrate(empty_database, "store")) == [
        ("store", each.number) for each in migrations("store")[1:]
    ]


def test_a_dry_run_shows_what_is_to_be_done_and_does_nothing(empty_database: str) -> None:
    assert names(migrate(empty_database, "messaging", dry_run=True)) == [
        ("messaging", each.number) for each in migrations("messaging")
    ]
    assert catalog(empty_database) == []


def test_two_that_migrate_at_once_take_turns(empty_database: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: migrate(empty_database, "store"), range(4)))
    assert sorted(each for steps in done for each in steps) == list(migrations("store"))
    check(empty_database, "store")


def test_both_sets_fit_in_one_database(empty_database: str) -> None:
    migrate(empty_database, "messaging")
    with pytest.raises(UnusableServer, match="lacks tables"):
        check(empty_database, "store")
    migrate(empty_database, "store")
    check(empty_database, "messaging")
    check(empty_database, "store")


def test_a_store_is_made_only_where_every_text_fits(postgres_admin_url: str) -> None:
    parts = urlsplit(postgres_admin_url)
    name = f"postroom_test_latin_{os.getpid()}"
    apply(postgres_admin_url, f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'")
    with pytest.raises(Unavailable, match="a store needs a database that was created with ENCODING 'UTF8'"):
        migrate(parts._replace(path=f"/{name}").geturl(), "store")
    apply(postgres_admin_url, f"DROP DATABASE {name}")


def test_a_set_that_is_none_is_refused(empty_database: str) -> None:
    with pytest.raises(
        InvalidRequest, match="no set of migrations 'shop'; the sets are keys, leases, messaging, store"
    ):
        migrate(empty_database, "shop")


# -- what is noticed ---


async def test_a_database_that_was_not_migrated_says_what_to_run(empty_database: str) -> None:
    says = r"lacks tables of this version of Postroom; run `postroom migrate --store URL`"
    with pytest.raises(UnusableServer, match=says):
        list_mailboxes(empty_database)
    with pytest.raises(UnusableServer, match=says), read_mailbox(empty_database):
        pass
    with pytest.raises(UnusableServer, match=says):
        async with open_mailbox(empty_database):
            pass
    with pytest.raises(UnusableServer, match="--messaging URL"):
        check(empty_database, "messaging")
    assert catalog(empty_database) == []


def test_an_edited_migration_is_refused(postgres_store: str) -> None:
    apply(postgres_store, "UPDATE postroom.postroom_migrations SET checksum = 'another' WHERE number = 1")
    for use in (lambda: check(postgres_store, "store"), lambda: migrate(postgres_store, "store")):
        with pytest.raises(UnusableStore, match="store/0001_log differs from the one applied to"):
            use()


def pretend(url: str, ahead: int) -> None:
    """Apply so many migrations that nobody here knows."""
    last = len(migrations("store"))
    for number in range(last + 1, last + 1 + ahead):
        apply(
            url,
            f"ALTER TABLE postroom.log ADD COLUMN later_{number} TEXT;"
            "INSERT INTO postroom.postroom_migrations (set, number, name, checksum) "
            f"VALUES ('store', {number}, 'later', '')",
        )


async def test_this_version_runs_on_a_database_one_migration_ahead(postgres_store: str) -> None:
    pretend(postgres_store, ahead=1)
    with closing(PostgresEventLog(postgres_store, ONE, partition_positions=8)) as log:
        records = append(log, mixed(20, ONE))
        assert list(log.read()) == records
    with pytest.raises(UnusableStore, match="_later, which this version of Postroom does not have"):
        migrate(postgres_store, "store")


def test_a_database_two_migrations_ahead_is_refused(postgres_store: str) -> None:
    pretend(postgres_store, ahead=2)
    with pytest.raises(UnusableStore, match="does not have; install the version that migrated it"):
        list_mailboxes(postgres_store)


# -- the version before ---


def test_the_statements_of_every_earlier_version_of_outbox_and_inbox_were_kept() -> None:
    kept = {path.name for path in FROZEN.joinpath("messaging").glob("*")}
    assert kept >= {f"{each.number:04d}" for each in migrations("messaging")[:-1]}


@pytest.mark.parametrize("file", sorted(FROZEN.joinpath("messaging").glob("*/*.sql")), ids=str)
def test_the_outbox_and_inbox_statements_of_an_earlier_version_are_valid_after_all_migrations(
    messaging_database: str, file: Path
) -> None:
    parts = re.split(r"^-- name: \w+$", file.read_text("utf-8"), flags=re.MULTILINE)
    texts = [text.strip() for text in parts[1:]]
    planned = [text for text in texts if text.startswith(("SELECT", "WITH", "INSERT", "UPDATE", "DELETE"))]
    assert planned
    with psycopg.connect(messaging_database) as connection:
        for text in planned:
            connection.execute(f"EXPLAIN {for_psycopg(text)}", defaultdict(lambda: None))


# -- URLs ---


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:sesame@127.0.0.1:1/shop",
        "postgresql://user:ses@me@127.0.0.1:1/shop",
        "postgresql://user:ses/me@127.0.0.1:1/shop",
        "postgresql://user:ses%me@127.0.0.1:1/shop",
        "postgresql://user:sesame@127.0.0.1:1/shop?password=sesame",
        "postgresql://user:sesame@127.0.0.1:1/shop?ssl=sesame",
        "postgresql://user:sesame",
    ],
)
def test_no_error_shows_a_password(url: str) -> None:
    with pytest.raises(PostroomError) as refused:
        list_mailboxes(url)
    assert not re.search(r"ses|me@|sesame", str(refused.value))
