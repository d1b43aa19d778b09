"""Numbered migrations: how a database gets the tables of Postroom, and how it is told that it has them.

A set is a folder under `migrations/`: `store` (the event log), `messaging` (outbox and inbox). Its files
`NNNN_name.sql` are applied in their order, each in a transaction of its own, and never edited afterwards.
Nothing else in Postroom changes a schema.

A database is migrated before the processes that use it are replaced. So a migration leaves intact what the
version before it runs: it adds, and removes only what that version had stopped using.
"""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

import psycopg
from psycopg import sql

from postroom.adapters.postgres.database import Connection, connect, shown, unavailable
from postroom.adapters.sql.statements import statements
from postroom.domain.errors import InvalidRequest, Unavailable

LOCK_TIMEOUT = "60s"
SCHEMAS = {"store": "postroom"}
"""The schema in which a set keeps its tables; those of others are where the search path says."""
_SQL = statements("postroom.adapters.postgres", "migrate.sql")
_FILE = re.compile(r"(\d{4})_(\w+)\.sql")


class Migration(NamedTuple):
    """One step of a set: its number and name, the hash of its text, and the text."""

    set: str
    number: int
    name: str
    checksum: str
    text: str


@cache
def migrations(set_: str) -> tuple[Migration, ...]:
    """Return the migrations of a set in their order.

    Raises: InvalidRequest when there is no such set.
    """
    folder = files("postroom.adapters.postgres").joinpath("migrations")
    known = sorted(each.name for each in folder.iterdir() if each.is_dir())
    if set_ not in known:
        raise InvalidRequest(f"There are no migrations {set_!r}; there are {', '.join(known)}.")
    found = []
    for file in folder.joinpath(set_).iterdir():
        if match := _FILE.fullmatch(file.name):
            text = file.read_text("utf-8")
            checksum = sha256(text.encode()).hexdigest()
            found.append(Migration(set_, int(match[1]), match[2], checksum, text))
    return tuple(sorted(found))


def migrate(url: str, set_: str, *, target: int | None = None, dry_run: bool = False) -> list[Migration]:
    """Apply the migrations of a set that a database lacks; two that do so at once take turns.

    Arguments:
        url: the database, as a user who may create there.
        target: number of the last one to apply; None applies all.
        dry_run: change nothing.

    Returns: the migrations that were applied, or would be.
    Raises: Unavailable when the database can't be reached, refuses, or was migrated by other code than this.
    """
    with closing(connect(url, "postroom migrate")) as connection, unavailable(url):
        if dry_run:
            return _pending(connection, url, set_, target)
        with _alone(connection, url):
            pending = _pending(connection, url, set_, target)
            if pending:
                _prepare(connection, set_)
            for migration in pending:
                _apply(connection, migration)
            return pending


def check(url: str, set_: str) -> None:
    """See that a database has all migrations of a set; this changes nothing.

    Raises: Unavailable that says to run `postroom migrate`.
    """
    with closing(connect(url, "postroom")) as connection:
        check_connection(connection, url, set_)


def check_connection(connection: Connection, url: str, set_: str) -> None:
    """See that the database at the end of a connection has all migrations of a set, as `check` does."""
    with unavailable(url):
        if _pending(connection, url, set_, None, ahead=1):
            option = "--store" if set_ == "store" else f"--{set_}"
            raise Unavailable(
                f"The database {shown(url)} lacks tables of this version of Postroom; run "
                f"`postroom migrate {option} URL` once, as a user who may create them."
            )


@contextmanager
def _alone(connection: Connection, url: str) -> Iterator[None]:
    """Keep other migrations out while the context lasts."""
    connection.execute(_SQL["limit_waiting"], {"timeout": LOCK_TIMEOUT})
    try:
        connection.execute(_SQL["lock"])
    except psycopg.errors.LockNotAvailable as error:
        raise Unavailable(
            f"Somebody else has been migrating {shown(url)} for {LOCK_TIMEOUT}; retry when that is done."
        ) from error
    yield  # the lock ends with the connection


def _pending(
    connection: Connection, url: str, set_: str, target: int | None, ahead: int = 0
) -> list[Migration]:
    """Return what is still to be applied, after seeing that what was applied is what we would have.

    Arguments:
        ahead: how many migrations that are unknown here may have been applied on top of those that are known.
    """
    known = {migration.number: migration for migration in migrations(set_)}
    applied = _applied(connection, set_)
    for number, name, checksum in applied:
        if number not in known:
            if number <= max(known) + ahead:
                continue
            raise Unavailable(
                f"The database {shown(url)} has the migration {set_}/{number:04d}_{name}, which this version "
                "of Postroom does not know; install the version that migrated it, or a later one."
            )
        if known[number].checksum != checksum:
            raise Unavailable(
                f"The migration {set_}/{number:04d}_{name} was another one when {shown(url)} was migrated; "
                "migrations are never edited, so install Postroom as it was released."
            )
    last = max(known) if target is None else target
    return [known[number] for number in sorted(known) if len(applied) < number <= last]


def _applied(connection: Connection, set_: str) -> list[tuple[int, str, str]]:
    table = _table(set_)
    exists = connection.execute(_SQL["find_table"], {"table": table.as_string(connection)}).fetchone()
    if exists == (None,):
        return []
    return connection.execute(sql.SQL(_SQL["applied"]).format(table=table), {"set": set_}).fetchall()


def _prepare(connection: Connection, set_: str) -> None:
    with connection.transaction():
        if set_ in SCHEMAS:
            connection.execute(sql.SQL(_SQL["create_schema"]).format(schema=sql.Identifier(SCHEMAS[set_])))
        connection.execute(sql.SQL(_SQL["create_table"]).format(table=_table(set_)))


def _apply(connection: Connection, migration: Migration) -> None:
    with connection.transaction():
        connection.execute(migration.text.encode())
        facts = {"set": migration.set, "number": migration.number, "name": migration.name}
        connection.execute(
            sql.SQL(_SQL["record"]).format(table=_table(migration.set)),
            facts | {"checksum": migration.checksum},
        )


def _table(set_: str) -> sql.Identifier:
    schema = (SCHEMAS[set_],) if set_ in SCHEMAS else ()
    return sql.Identifier(*schema, "postroom_migrations")
