"""Statements in the user's transaction, on a connection of any supported library.

A connection is one of `sqlite3`, of psycopg, of Django, or a SQLAlchemy `Connection` or `Session` on any
driver; or an asyncio form: of aiosqlite, of psycopg, of SQLAlchemy. Statements have parameters `:name`.
This module never begins, commits or rolls back a transaction, and imports no library that the user has not
imported.
"""

import re
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from postroom.domain.errors import InvalidRequest, UnusableServer

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import Connection as SqlConnection
    from sqlalchemy.ext.asyncio import AsyncConnection as AsyncSqlConnection
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    class DjangoConnection(Protocol):
        """A connection of Django, whose types are unknown to most type checkers."""

        @property
        def in_atomic_block(self) -> bool: ...
        def get_autocommit(self) -> bool: ...

    Connection: TypeAlias = (
        psycopg.Connection[Any] | SqlConnection | Session | scoped_session[Any] | DjangoConnection
    )
    AsyncConnection: TypeAlias = (
        psycopg.AsyncConnection[Any] | AsyncSqlConnection | AsyncSession | async_scoped_session[Any]
    )

Row = tuple[Any, ...]
Statement: TypeAlias = str | Mapping[str, str]
"""SQL for PostgreSQL, or SQL by dialect: `postgresql`, `sqlite`."""
POSTGRESQL, SQLITE = "postgresql", "sqlite"
_UNDEFINED = ("42P01", "42703")
"""SQLSTATEs of missing tables and columns."""
_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]\w*)")
_NO_TRANSACTION = (
    "The connection is in autocommit mode, so there is no transaction to write in; "
    "begin one first, for example with connection.transaction(), engine.begin() or Django's atomic()."
)


class DatabaseRefused(Exception):
    """A statement violated a constraint.

    Arguments:
        sqlstate: the error's code.
        constraint: name of the constraint, or the driver's error text.
    """

    def __init__(self, sqlstate: str, constraint: str) -> None:
        super().__init__(sqlstate, constraint)
        self.sqlstate = sqlstate
        self.constraint = constraint


class MissingTable(UnusableServer):
    """A table or column that a statement names does not exist.

    Arguments:
        creatable: whether the caller may create it in the same transaction, as in SQLite.
    """

    def __init__(self, message: str, *, creatable: bool) -> None:
        super().__init__(message)
        self.creatable = creatable


def execute(
    connection: "Connection | sqlite3.Connection", statement: Statement, parameters: Mapping[str, Any]
) -> Sequence[Row]:
    """Run a statement in the transaction of a connection and return its rows, if any.

    A SQLAlchemy session is flushed first, so that writes are executed in the order of the code.

    Raises:
        InvalidRequest: there is no transaction, or the statement is not for the connection's database.
        MissingTable: a table or column is missing.
    """
    with _missing_tables():
        return _execute(connection, statement, parameters)


async def execute_async(
    connection: "AsyncConnection", statement: Statement, parameters: Mapping[str, Any]
) -> Sequence[Row]:
    """Run a statement as `execute` does, on an asyncio connection."""
    with _missing_tables():
        return await _execute_async(connection, statement, parameters)


def _execute(connection: Any, statement: Statement, parameters: Mapping[str, Any]) -> Sequence[Row]:
    if isinstance(connection, sqlite3.Connection):
        _require_sqlite_transaction(connection)
        cursor = sqlite3.Cursor(connection)
        cursor.row_factory = None  # independent of the factories that the user configured
        return cursor.execute(_for_dialect(statement, SQLITE), parameters).fetchall()
    psycopg: Any = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(connection, psycopg.Connection):
        _require_transaction(connection)
        with psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
            cursor.execute(for_psycopg(_for_dialect(statement, POSTGRESQL)), parameters)
            return cursor.fetchall() if cursor.description is not None else ()
    if "sqlalchemy" in sys.modules:
        from sqlalchemy import Connection as SqlConnection
        from sqlalchemy.orm import Session, scoped_session

        if isinstance(connection, scoped_session):
            connection = connection()
        if isinstance(connection, Session):
            connection.flush()
            connection = connection.connection()
        if isinstance(connection, SqlConnection):
            return _run(connection, statement, parameters)
    django: Any = sys.modules.get("django.db")
    if django is not None:
        if isinstance(connection, django.ConnectionProxy):  # `django.db.connection`
            connection = django.connections[connection.alias]
        base: Any = sys.modules.get("django.db.backends.base.base")  # loaded with the first connection
        if base is not None and isinstance(connection, base.BaseDatabaseWrapper):
            sql = for_psycopg(_for_dialect(statement, connection.vendor))
            if connection.get_autocommit() and not connection.in_atomic_block:
                raise InvalidRequest(_NO_TRANSACTION)
            with connection.cursor() as cursor:
                cursor.execute(sql, parameters)
                return cursor.fetchall() if cursor.description is not None else ()
    raise _no_connection(
        connection,
        "sqlite3 or psycopg Connection, a SQLAlchemy Connection or Session, or a connection of Django",
    )


async def _execute_async(
    connection: Any, statement: Statement, parameters: Mapping[str, Any]
) -> Sequence[Row]:
    psycopg: Any = sys.modules.get("psycopg")
    if psycopg is not None and isinstance(connection, psycopg.AsyncConnection):
        _require_transaction(connection)
        async with psycopg.AsyncCursor(connection, row_factory=psycopg.rows.tuple_row) as cursor:
            await cursor.execute(for_psycopg(_for_dialect(statement, POSTGRESQL)), parameters)
            return await cursor.fetchall() if cursor.description is not None else ()
    aiosqlite: Any = sys.modules.get("aiosqlite")
    if aiosqlite is not None and isinstance(connection, aiosqlite.Connection):
        _require_sqlite_transaction(connection)
        rows = await connection.execute_fetchall(_for_dialect(statement, SQLITE), parameters)
        return [tuple(row) for row in rows]
    if "sqlalchemy.ext.asyncio" in sys.modules:
        from sqlalchemy.ext.asyncio import AsyncConnection as AsyncSqlConnection
        from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

        if isinstance(connection, async_scoped_session):
            connection = connection()
        if isinstance(connection, AsyncSession):
            await connection.flush()
            connection = await connection.connection()
        if isinstance(connection, AsyncSqlConnection):
            return await connection.run_sync(_run, statement, parameters)
    raise _no_connection(
        connection,
        "psycopg AsyncConnection, aiosqlite Connection, or a SQLAlchemy AsyncConnection or AsyncSession",
    )


@contextmanager
def constraint_errors() -> Iterator[None]:
    """Raise `DatabaseRefused` from the library's error if a constraint is violated in the context."""
    try:
        yield
    except Exception as error:
        cause, sqlstate = _cause(error)
        if not sqlstate.startswith("23"):
            raise
        diagnostics = getattr(cause, "diag", None)
        constraint = getattr(diagnostics, "constraint_name", None)
        raise DatabaseRefused(sqlstate, constraint or str(cause)) from error


@contextmanager
def _missing_tables() -> Iterator[None]:
    """Raise `MissingTable`, naming the command to run, for missing tables and columns."""
    try:
        yield
    except Exception as error:
        cause, sqlstate = _cause(error)
        is_sqlite = isinstance(cause, sqlite3.OperationalError) and str(cause).startswith("no such table")
        if not is_sqlite and sqlstate not in _UNDEFINED:
            raise
        diagnostics = getattr(cause, "diag", None)
        message = getattr(diagnostics, "message_primary", None) or str(cause).rpartition(": ")[2]
        raise MissingTable(
            f"The database lacks tables of outbox or inbox: {message}. Run `postroom migrate --messaging "
            "URL` once, or pass the names of the tables.",
            creatable=is_sqlite,
        ) from error


def _cause(error: Exception) -> tuple[Any, str]:
    """Return the driver's error, which SQLAlchemy and Django wrap, and its SQLSTATE; empty if it has none."""
    is_of_django = type(error).__module__ == "django.db.utils"
    cause: Any = getattr(error, "orig", None) or (is_of_django and error.__cause__) or error
    sqlstate = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    return cause, sqlstate if isinstance(sqlstate, str) else ""


@lru_cache(maxsize=256)
def for_psycopg(statement: str) -> str:
    """Return a statement with its parameters in psycopg's form."""
    return _PARAMETER.sub(r"%(\1)s", statement.replace("%", "%%"))


def _run(connection: "SqlConnection", statement: Statement, parameters: Mapping[str, Any]) -> Sequence[Row]:
    dialect = connection.dialect
    sql = _for_dialect(statement, dialect.name)
    raw: Any = connection.connection.dbapi_connection
    if dialect.detect_autocommit_setting(raw):
        raise InvalidRequest(_NO_TRANSACTION)
    result = connection.execute(_for_sqlalchemy(sql), parameters)
    return [tuple(row) for row in result] if result.returns_rows else ()


@lru_cache(maxsize=256)
def _for_sqlalchemy(statement: str) -> Any:
    from sqlalchemy import text

    return text(statement)


def _for_dialect(statement: Statement, dialect: str) -> str:
    """Return the SQL for a dialect."""
    if isinstance(statement, str):
        if dialect != POSTGRESQL:
            raise InvalidRequest(f"Outbox and inbox need PostgreSQL; this is a connection to {dialect}.")
        return statement
    if dialect not in statement:
        raise InvalidRequest(f"This needs PostgreSQL or SQLite; this is a connection to {dialect}.")
    return statement[dialect]


def _require_transaction(connection: Any) -> None:
    from psycopg.pq import TransactionStatus

    if connection.autocommit and connection.info.transaction_status == TransactionStatus.IDLE:
        raise InvalidRequest(_NO_TRANSACTION)


def _require_sqlite_transaction(connection: Any) -> None:
    """Raise `InvalidRequest` if an INSERT would be committed at once."""
    if connection.in_transaction:
        return
    # `autocommit` exists since Python 3.12; -1 leaves the choice to `isolation_level`, where None is
    # autocommit.
    autocommit = getattr(connection, "autocommit", -1)
    if autocommit == -1:
        autocommit = connection.isolation_level is None
    if autocommit:
        raise InvalidRequest(_NO_TRANSACTION)


def _no_connection(value: object, expected: str) -> InvalidRequest:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    advice = ""
    if kind.startswith("asyncpg."):
        advice = ' Use asyncpg through SQLAlchemy: create_async_engine("postgresql+asyncpg://...").'
    elif kind.startswith("django."):
        advice = " Django has no asyncio connections: use the synchronous form, in sync_to_async()."
    return InvalidRequest(f"Pass a {expected}; it was {kind}.{advice}")
