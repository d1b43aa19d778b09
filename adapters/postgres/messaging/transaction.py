"""The user's own transaction, whichever library it is open in.

A connection is a psycopg `Connection`, or a SQLAlchemy `Connection` or `Session` on any driver; or one of
their asyncio forms. Statements have parameters `:name`; nothing here begins, commits or rolls back anything.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from postroom.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from sqlalchemy import Connection as SqlConnection
    from sqlalchemy.ext.asyncio import AsyncConnection as AsyncSqlConnection
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    Connection: TypeAlias = psycopg.Connection[Any] | SqlConnection | Session | scoped_session[Any]
    AsyncConnection: TypeAlias = (
        psycopg.AsyncConnection[Any] | AsyncSqlConnection | AsyncSession | async_scoped_session[Any]
    )

Row = tuple[Any, ...]

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]\w*)")
_NO_TRANSACTION = (
    "The connection commits every statement by itself (autocommit), so there is no transaction to write in; "
    "open one first, such as with connection.transaction() or engine.begin()."
)


class DatabaseRefused(Exception):
    """A statement failed in the user's transaction; says why in the same way whichever library ran it.

    Arguments:
        sqlstate: the error's code; None where the server was not reached.
        constraint: what was violated, where a constraint was.
    """

    def __init__(self, sqlstate: str | None, constraint: str | None) -> None:
        super().__init__(sqlstate, constraint)
        self.sqlstate = sqlstate
        self.constraint = constraint


def execute(connection: "Connection", statement: str, parameters: Mapping[str, Any]) -> Sequence[Row]:
    """Run a statement in the transaction of a connection and return its rows, if it has any.

    What a SQLAlchemy session still holds back is flushed first, so that the order of writes is the order of
    the code.

    Raises: InvalidRequest when there is no transaction, or for what is no connection to PostgreSQL.
    """
    if isinstance(connection, psycopg.Connection):
        _require_transaction(connection.autocommit, connection.info.transaction_status)
        # Whatever cursors and rows the user has set the connection to.
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            cursor.execute(for_psycopg(statement), parameters)
            return cursor.fetchall() if cursor.description is not None else ()
    from sqlalchemy import Connection as SqlConnection
    from sqlalchemy.orm import Session, scoped_session

    if isinstance(connection, scoped_session):
        connection = connection()
    if isinstance(connection, Session):
        connection.flush()
        connection = connection.connection()
    if not isinstance(connection, SqlConnection):
        raise _no_connection(connection, "psycopg Connection, or a SQLAlchemy Connection or Session")
    _check(connection)
    return _run(connection, statement, parameters)


async def execute_async(
    connection: "AsyncConnection", statement: str, parameters: Mapping[str, Any]
) -> Sequence[Row]:
    """Run a statement as `execute` does, on a connection of asyncio."""
    if isinstance(connection, psycopg.AsyncConnection):
        _require_transaction(connection.autocommit, connection.info.transaction_status)
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(for_psycopg(statement), parameters)
            return await cursor.fetchall() if cursor.description is not None else ()
    from sqlalchemy.ext.asyncio import AsyncConnection as AsyncSqlConnection
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

    if isinstance(connection, async_scoped_session):
        connection = connection()
    if isinstance(connection, AsyncSession):
        await connection.flush()
        connection = await connection.connection()
    if not isinstance(connection, AsyncSqlConnection):
        raise _no_connection(
            connection, "psycopg AsyncConnection, or a SQLAlchemy AsyncConnection or AsyncSession"
        )
    await connection.run_sync(_check)
    return await connection.run_sync(_run, statement, parameters)


@contextmanager
def refusals() -> Iterator[None]:
    """Raise `DatabaseRefused`, from the library's own error, when a constraint is violated inside."""
    try:
        yield
    except Exception as error:
        # SQLAlchemy keeps the driver's error in `orig`; drivers agree on what they call its code.
        cause: Any = getattr(error, "orig", None) or error
        sqlstate = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
        if not isinstance(sqlstate, str) or not sqlstate.startswith("23"):
            raise
        diagnostics = getattr(cause, "diag", None)
        constraint = getattr(diagnostics, "constraint_name", None)
        raise DatabaseRefused(sqlstate, constraint or str(cause)) from error


@lru_cache(maxsize=256)
def for_psycopg(statement: str) -> str:
    """Return a statement with its parameters in the form that psycopg wants."""
    return _PARAMETER.sub(r"%(\1)s", statement.replace("%", "%%"))


def _run(connection: "SqlConnection", statement: str, parameters: Mapping[str, Any]) -> Sequence[Row]:
    result = connection.execute(_for_sqlalchemy(statement), parameters)
    return [tuple(row) for row in result] if result.returns_rows else ()


@lru_cache(maxsize=256)
def _for_sqlalchemy(statement: str) -> Any:
    from sqlalchemy import text

    return text(statement)


def _check(connection: "SqlConnection") -> None:
    dialect = connection.dialect
    if dialect.name != "postgresql":
        raise InvalidRequest(f"Outbox and inbox live in PostgreSQL; this is a connection to {dialect.name}.")
    raw: Any = connection.connection.dbapi_connection
    if dialect.detect_autocommit_setting(raw):
        raise InvalidRequest(_NO_TRANSACTION)


def _require_transaction(autocommit: bool, status: TransactionStatus) -> None:
    if autocommit and status == TransactionStatus.IDLE:
        raise InvalidRequest(_NO_TRANSACTION)


def _no_connection(given: object, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"Give a {wanted}; it was {type(given).__module__}.{type(given).__qualname__}.")
