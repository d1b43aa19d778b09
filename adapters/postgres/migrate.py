"""Numbered migrations, which create the tables of Postroom, and the check that a database has them.

A set is a folder under `migrations/`: `store` (the event log), `messaging` (outbox and inbox), `leases`, and
`keys` (of subjects). Its files `NNNN_name.sql` are applied in order, each in its own transaction, and never
edited afterwards. Nothing else in Postroom changes a schema.

A database is migrated before the processes that use it are replaced. So a migration must be compatible with
the previous release: it adds, and removes only what that release no longer uses. A migration that extends the
format of the store is not compatible (ADR 0101): stop the processes of the previous release before it.
"""

import re
from collections.abc import Sequence
from contextlib import closing

import psycopg
from psycopg import sql

from postroom.adapters.postgres.database import Connection, connect
from postroom.adapters.postgres.errors import shown, unavailable
from postroom.adapters.postgres.url import schema_of
from postroom.adapters.sql.statements import Migration, read_migrations, statements
from postroom.application.mailbox.codec import RECORDS, check_format
from postroom.domain.errors import InvalidRequest, Unavailable, UnusableServer, UnusableStore

LOCK_TIMEOUT = "60s"
SCHEMAS = {"keys": "postroom_keys", "leases": "postroom", "store": "postroom"}
"""The schema of a set's tables unless the URL names one; sets without one use the search path."""
_LOCK = "postroom migrate"
RIGHTS = {"keys": "SELECT, INSERT, UPDATE, DELETE, TRUNCATE"}
"""Privileges on tables that differ from `_RIGHTS`: an erasure rewrites the table of subject keys."""
_RIGHTS = "SELECT, INSERT, UPDATE, DELETE"
_CREATED = re.compile(r"^CREATE TABLE (\w+)", re.MULTILINE)
_SQL = statements("postroom.adapters.postgres", "migrate.sql")
_LOG_OF_RECORDS = "ffbe2165c1a35b71cb7d4bf1006747e3b1f4bee2a021203beac774d8c51614b2"
"""Checksum of the first migration before commits, the only one that was edited after it was released."""


def migrations(set_: str) -> tuple[Migration, ...]:
    """Return the migrations of a set; see `read_migrations`."""
    return read_migrations("postroom.adapters.postgres", set_)


def migrate(
    url: str,
    set_: str,
    *,
    target: int | None = None,
    dry_run: bool = False,
    grant_to: Sequence[str] = (),
) -> list[Migration]:
    """Apply the migrations of a set that a database lacks; concurrent calls are serialized by a lock.

    Arguments:
        url: the database, with a user who may create tables.
        target: number of the last migration to apply; None applies all.
        dry_run: change nothing.
        grant_to: names of roles that get the right to use the tables of the set, and in Postroom's schemas
            also later tables.

    Returns: the migrations that were applied, or would be.
    Raises: InvalidRequest when a role does not exist, or the schema of a first set has tables of others;
        UnusableServer when this user can't grant privileges to a role, Unavailable when the database can't be
        used, UnusableStore when it has migrations that differ from these, or the format of a newer version.
    """
    connection = connect(url, "postroom migrate", {"lock_timeout": LOCK_TIMEOUT})
    with closing(connection), unavailable(url):
        _check_roles(connection, url, grant_to)
        pending = _pending(connection, url, set_, target)
        if pending and set_ in SCHEMAS:
            _check_schema(connection, url, set_)
        if dry_run:
            return pending
        applied = []
        while pending:
            with connection.transaction():
                _lock(connection, url)
                pending = _pending(connection, url, set_, target)  # others may have been first
                if pending:
                    _prepare(connection, url, set_)
                    _apply(connection, url, pending[0])
                    applied.append(pending.pop(0))
        if grant_to:
            with connection.transaction():
                _lock(connection, url)
                for role in grant_to:
                    _grant(connection, url, set_, role)
        return applied


def apply_within(connection: Connection, url: str, set_: str) -> list[Migration]:
    """Apply the migrations of a set that a database lacks in the open transaction of a connection.

    Arguments:
        url: the database, for messages.

    Returns and raises: as `migrate`.
    """
    _lock(connection, url)
    pending = _pending(connection, url, set_, None)
    if pending:
        _prepare(connection, url, set_)
    for each in pending:
        _apply(connection, url, each)
    return pending


def check(url: str, set_: str) -> None:
    """Check that a database has all migrations of a set.

    Raises: UnusableServer when migrations are missing, UnusableStore when they belong to another version.
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


def _check_roles(connection: Connection, url: str, roles: Sequence[str]) -> None:
    existing = {name for (name,) in connection.execute(_SQL["roles"])} if roles else set()
    for role in roles:
        if role not in existing:
            raise InvalidRequest(
                f"The server of {shown(url)} has no role {role!r}; create it first, or correct its name."
            )


def _check_schema(connection: Connection, url: str, set_: str) -> None:
    """Refuse tables of others in the schema of a first set, as roles are granted privileges on all tables."""
    schema = _schema(url, set_)

    def is_own() -> bool:
        return any(_applied(connection, url, each) for each in SCHEMAS if _schema(url, each) == schema)

    if is_own():
        return
    values = {"schema": schema, "known": ["postroom_migrations", *_created("messaging")]}
    others = [name for (name,) in connection.execute(_SQL["others"], values)]
    if others and not is_own():  # else another migration has just created them
        raise InvalidRequest(
            f"The schema {schema} of {shown(url)} has tables that are not Postroom's ({', '.join(others)}); "
            "name one that has none, by ?schema=NAME, as roles are granted privileges on all tables of it."
        )


def _created(set_: str) -> list[str]:
    return [each for step in migrations(set_) for each in _CREATED.findall(step.text)]


def _grant(connection: Connection, url: str, set_: str, role: str) -> None:
    """Grant a role the privileges to use a set, but not to migrate it; the transaction is the caller's.

    Raises: UnusableServer when a table belongs to a user for whom this one can't grant.
    """
    table = _table(url, set_)
    argument = {"table": table.as_string(connection)}
    ((quoted, schema, owner),) = connection.execute(_SQL["schema"], argument).fetchall()
    if role == owner:
        return
    # In a schema shared with the tables of a service, grant privileges only on the tables of the set.
    tables = None if set_ in SCHEMAS else _created(set_)
    parts = {
        "role": sql.Identifier(role),
        "schema": sql.Identifier(schema),
        "table": table,
        "rights": sql.SQL(RIGHTS.get(set_, _RIGHTS)),
        "tables": sql.SQL("ALL TABLES IN SCHEMA {}").format(sql.Identifier(schema))
        if tables is None
        else sql.SQL(", ").join(sql.Identifier(schema, each) for each in tables),
    }
    names = ["grant_use", "grant_tables", "protect_migrations"]
    if tables is None:
        names.insert(0, "grant_functions")
    for name in names:
        connection.execute(sql.SQL(_SQL[name]).format(**parts))
    if tables is None:
        for (owner,) in connection.execute(_SQL["owners"], {"schema": quoted}).fetchall():
            parts["owner"] = sql.Identifier(owner)
            for name in ("grant_later_tables", "grant_later_functions"):
                connection.execute(sql.SQL(_SQL[name]).format(**parts))
    granted = {"schema": quoted, "role": role, "tables": tables}
    # The server only warns about tables of others.
    for name, owner in connection.execute(_SQL["not_granted"], granted).fetchall():
        raise UnusableServer(
            f"This user can't grant privileges on {name} of {shown(url)}, which belongs to {owner}; run "
            "`postroom migrate --grant-to` as that user."
        )


def _lock(connection: Connection, url: str) -> None:
    """Hold the lock of migrations until the transaction ends."""
    try:
        connection.execute(_SQL["lock"], {"name": _LOCK})
    except psycopg.errors.LockNotAvailable as error:
        raise Unavailable(
            f"Another process has been migrating {shown(url)} for {LOCK_TIMEOUT}; retry when it is done."
        ) from error


def _pending(
    connection: Connection, url: str, set_: str, target: int | None, ahead: int = 0
) -> list[Migration]:
    """Return the migrations still to be applied, after checking those that were applied.

    Arguments:
        ahead: number of later, unknown migrations that are tolerated in the database.
    """
    ours = {migration.number: migration for migration in migrations(set_)}
    applied = _applied(connection, url, set_)
    for number, name, checksum in applied:
        if number not in ours:
            if number <= max(ours) + ahead:
                continue
            raise UnusableStore(
                f"The database {shown(url)} has the migration {set_}/{number:04d}_{name}, which this version "
                "of Postroom does not have; install the version that migrated it, or a later one."
            )
        if checksum == _LOG_OF_RECORDS:
            check_format(shown(url), RECORDS)
        if ours[number].checksum != checksum:
            raise UnusableStore(
                f"The migration {set_}/{number:04d}_{name} differs from the one applied to {shown(url)}; "
                "migrations must not be edited, so reinstall a released version of Postroom."
            )
    last = max(ours) if target is None else target
    return [ours[number] for number in sorted(ours) if len(applied) < number <= last]


def _applied(connection: Connection, url: str, set_: str) -> list[tuple[int, str, str]]:
    table = _table(url, set_)
    exists = connection.execute(_SQL["find_table"], {"table": table.as_string(connection)}).fetchone()
    if exists == (None,):
        return []
    if set_ == "store":
        for number, version in connection.execute(sql.SQL(_SQL["format"]).format(table=table)).fetchall():
            check_format(shown(url), number, version)
    return connection.execute(sql.SQL(_SQL["applied"]).format(table=table), {"set": set_}).fetchall()


def _prepare(connection: Connection, url: str, set_: str) -> None:
    schema = _schema(url, set_)
    if schema and not connection.execute(_SQL["find_schema"], {"schema": schema}).fetchall():
        connection.execute(sql.SQL(_SQL["create_schema"]).format(schema=sql.Identifier(schema)))
    connection.execute(sql.SQL(_SQL["create_table"]).format(table=_table(url, set_)))


def _apply(connection: Connection, url: str, migration: Migration) -> None:
    connection.execute(migration.text.encode())
    values = {"set": migration.set, "number": migration.number, "name": migration.name}
    connection.execute(
        sql.SQL(_SQL["record"]).format(table=_table(url, migration.set)),
        values | {"checksum": migration.checksum},
    )


def _schema(url: str, set_: str) -> str | None:
    return schema_of(url) or SCHEMAS.get(set_)


def _table(url: str, set_: str) -> sql.Identifier:
    schema = _schema(url, set_)
    return sql.Identifier(*([schema] if schema else []), "postroom_migrations")
