"""Numbered migrations, which create the tables of Postroom, and the check that a database has them.

A set is a folder under `migrations/`: `store` (the event log), `messaging` (outbox and inbox), `leases`, and
`keys` (of subjects). Its files `NNNN_name.sql` are applied in order, each in its own transaction, and never
edited afterwards. Nothing else in Postroom changes a schema.

A database is migrated before the processes that use it are replaced. So a migration must be compatible with
the previous release: it adds, and removes only what that release no longer uses.
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
from postroom.domain.errors import InvalidRequest, Unavailable, UnusableServer

LOCK_TIMEOUT = "60s"
SCHEMAS = {"keys": "postroom_keys", "leases": "postroom", "store": "postroom"}
"""The schema of a set's tables; sets without one use the search path."""
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
    sets = sorted(each.name for each in folder.iterdir() if each.is_dir())
    if set_ not in sets:
        raise InvalidRequest(f"There is no set of migrations {set_!r}; the sets are {', '.join(sets)}.")
    steps = []
    for file in folder.joinpath(set_).iterdir():
        if match := _FILE.fullmatch(file.name):
            text = file.read_text("utf-8")
            checksum = sha256(text.encode()).hexdigest()
            steps.append(Migration(set_, int(match[1]), match[2], checksum, text))
    return tuple(sorted(steps))


def migrate(url: str, set_: str, *, target: int | None = None, dry_run: bool = False) -> list[Migration]:
    """Apply the migrations of a set that a database lacks; concurrent calls are serialized by a lock.

    Arguments:
        url: the database, with a user who may create tables.
        target: number of the last migration to apply; None applies all.
        dry_run: change nothing.

    Returns: the migrations that were applied, or would be.
    Raises: Unavailable when the database can't be used, or has migrations that differ from these.
    """
    with closing(connect(url, "postroom migrate")) as connection, unavailable(url):
        if dry_run:
            return _pending(connection, url, set_, target)
        with _migration_lock(connection, url):
            pending = _pending(connection, url, set_, target)
            if pending:
                _prepare(connection, set_)
            for migration in pending:
                _apply(connection, migration)
            return pending


def check(url: str, set_: str) -> None:
    """Check that a database has all migrations of a set.

    Raises: Unavailable when migrations are missing.
    """
    with closing(connect(url, "postroom")) as connection:
        check_connection(connection, url, set_)


def check_connection(connection: Connection, url: str, set_: str) -> None:
    """Check through an open connection that a database has all migrations of a set; see `check`."""
    with unavailable(url):
        if _pending(connection, url, set_, None, ahead=1):
            option = "--store" if set_ == "store" else f"--{set_}"
            raise UnusableServer(
                f"The database {shown(url)} lacks tables of this version of Postroom; run "
                f"`postroom migrate {option} URL` as a user who may create tables."
            )


@contextmanager
def _migration_lock(connection: Connection, url: str) -> Iterator[None]:
    """Hold the lock of migrations while the context lasts."""
    connection.execute(_SQL["limit_waiting"], {"timeout": LOCK_TIMEOUT})
    try:
        connection.execute(_SQL["lock"])
    except psycopg.errors.LockNotAvailable as error:
        raise Unavailable(
            f"Another process has been migrating {shown(url)} for {LOCK_TIMEOUT}; retry when it is done."
        ) from error
    yield  # the lock ends with the connection


def _pending(
    connection: Connection, url: str, set_: str, target: int | None, ahead: int = 0
) -> list[Migration]:
    """Return the migrations still to be applied, after checking those that were applied.

    Arguments:
        ahead: number of later, unknown migrations that are tolerated in the database.
    """
    ours = {migration.number: migration for migration in migrations(set_)}
    applied = _applied(connection, set_)
    for number, name, checksum in applied:
        if number not in ours:
            if number <= max(ours) + ahead:
                continue
            raise Unavailable(
                f"The database {shown(url)} has the migration {set_}/{number:04d}_{name}, which this version "
                "of Postroom does not have; install the version that migrated it, or a later one."
            )
        if ours[number].checksum != checksum:
            raise Unavailable(
                f"The migration {set_}/{number:04d}_{name} differs from the one applied to {shown(url)}; "
                "migrations must not be edited, so reinstall a released version of Postroom."
            )
    last = max(ours) if target is None else target
    return [ours[number] for number in sorted(ours) if len(applied) < number <= last]


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
        values = {"set": migration.set, "number": migration.number, "name": migration.name}
        connection.execute(
            sql.SQL(_SQL["record"]).format(table=_table(migration.set)),
            values | {"checksum": migration.checksum},
        )


def _table(set_: str) -> sql.Identifier:
    schema = (SCHEMAS[set_],) if set_ in SCHEMAS else ()
    return sql.Identifier(*schema, "postroom_migrations")
