"""Connections to a PostgreSQL database."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from threading import Event, Timer
from typing import Any, Protocol, Self

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus

from postroom.adapters.postgres.errors import parameters_of, pooler_refusal, silent, unavailable
from postroom.adapters.postgres.url import DEFAULT_SCHEMA, in_schema, schema_of

Connection = psycopg.Connection[tuple[Any, ...]]
AsyncConnection = psycopg.AsyncConnection[tuple[Any, ...]]
Settings = Mapping[str, str]
"""Settings of the server for a connection, by name."""


class Closable(Protocol):
    """A connection of any driver."""

    def close(self) -> None:
        """Close the connection."""


CONNECT_TIMEOUT_SECONDS = 5
_DEFAULTS: dict[str, Any] = {
    "connect_timeout": CONNECT_TIMEOUT_SECONDS,
    # A lost server is detected after 20 to 30 seconds instead of two hours.
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
TEXT_SETTINGS: Settings = {
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "standard_conforming_strings": "on",
}
"""Settings of every connection: those that change the text of values and of statements."""
NO_SETTINGS: Settings = {}
_REFUSED_PARAMETER = "unsupported startup parameter"
"""Part of the message with which PgBouncer refuses options, and connections for replication."""
_SESSION = b"SELECT pg_backend_pid(), current_setting('synchronous_commit')"
"""The process of the session; a pooler gave its client another number, with which to cancel statements."""
NAME_BYTES = 63
"""Limit of an application name; the server truncates longer ones."""


def lock_name(url: str, task: str) -> str:
    """Return the name of the advisory lock of a task on a store, as statements write it; see `in_schema`."""
    return f"{schema_of(url) or DEFAULT_SCHEMA} {task}"


def follow_lock(url: str, target: str) -> str:
    """Return the name of the lock of the process that follows.

    Arguments:
        target: name of the target that the process updates, empty for the store's own read models.
    """
    return lock_name(url, f"follow{f' into {target}' if target else ''}")


class _Cursor(psycopg.Cursor[Any]):
    """A cursor that replaces the schema in each statement by the schema of its connection."""

    def execute(
        self, query: Any, params: Any = None, *, prepare: bool | None = None, binary: bool | None = None
    ) -> Self:
        return super().execute(_in_schema(self, query), params, prepare=prepare, binary=binary)

    def executemany(self, query: Any, params_seq: Any, *, returning: bool = False) -> None:
        super().executemany(_in_schema(self, query), params_seq, returning=returning)

    def stream(
        self, query: Any, params: Any = None, *, binary: bool | None = None, size: int = 1
    ) -> Iterator[Any]:
        return super().stream(_in_schema(self, query), params, binary=binary, size=size)

    @contextmanager
    def copy(self, statement: Any, params: Any = None, *, writer: Any = None) -> Iterator[psycopg.Copy]:
        with super().copy(_in_schema(self, statement), params, writer=writer) as copy:
            yield copy


class _ServerCursor(psycopg.ServerCursor[Any]):
    """A server cursor of such a connection."""

    def execute(self, query: Any, params: Any = None, *, binary: bool | None = None, **options: Any) -> Self:
        return super().execute(_in_schema(self, query), params, binary=binary, **options)


class _AsyncCursor(psycopg.AsyncCursor[Any]):
    """A cursor of such a connection, for use from asyncio."""

    async def execute(
        self, query: Any, params: Any = None, *, prepare: bool | None = None, binary: bool | None = None
    ) -> Self:
        return await super().execute(_in_schema(self, query), params, prepare=prepare, binary=binary)


def _in_schema(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any], query: Any) -> bytes:
    schema = cursor.connection.schema  # type: ignore[union-attr]  # of `_use_schema`
    text = query.as_bytes(cursor) if isinstance(query, sql.Composable) else query
    return in_schema(schema, text.decode() if isinstance(text, bytes) else text).encode()


class _Connection(Connection):
    """A connection with settings of its own; see `connect`."""

    schema: str | None = None
    local_settings: tuple[bytes, ...] = ()
    """Statements that begin each transaction through a pooler; none at a server."""

    def execute(
        self, query: Any, params: Any = None, *, prepare: bool | None = None, binary: bool = False
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        if not _begins_transaction(self):
            return super().execute(query, params, prepare=prepare, binary=binary)
        with self.transaction():
            return super().execute(query, params, prepare=prepare, binary=binary)

    @contextmanager
    def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> Iterator[psycopg.Transaction]:
        begins = _begins_transaction(self)
        with super().transaction(savepoint_name, force_rollback) as transaction:
            if begins:
                set_locally(self)
            yield transaction


class _AsyncConnection(AsyncConnection):
    """A connection with settings of its own; see `connect`."""

    schema: str | None = None
    local_settings: tuple[bytes, ...] = ()
    """Statements that begin each transaction through a pooler; none at a server."""

    async def execute(
        self, query: Any, params: Any = None, *, prepare: bool | None = None, binary: bool = False
    ) -> psycopg.AsyncCursor[tuple[Any, ...]]:
        if not _begins_transaction(self):
            return await super().execute(query, params, prepare=prepare, binary=binary)
        async with self.transaction():
            return await super().execute(query, params, prepare=prepare, binary=binary)

    @asynccontextmanager
    async def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> AsyncIterator[psycopg.AsyncTransaction]:
        begins = _begins_transaction(self)
        async with super().transaction(savepoint_name, force_rollback) as transaction:
            if begins:
                for statement in self.local_settings:
                    await super().execute(statement)
            yield transaction


def connect(
    url: str, name: str, settings: Settings = NO_SETTINGS, *, session_for: str = "", sync: str = ""
) -> Connection:
    """Open a connection in autocommit mode, to a server or to a transaction pooler.

    A server gets the settings as options of the new session. Through a pooler each transaction sets them for
    itself, so that nothing is left in a server connection that others use next (ADR 0102). If the URL names a
    schema, statements use its tables, and it is the search path (ADR 0111).

    Arguments:
        url: `postgresql://user:password@host:port/database?schema=NAME`; its options override the defaults.
        name: the connection's application name, which the server shows.
        settings: settings of the server for this connection.
        session_for: feature that needs its own session, for the message that refuses a pooler.
        sync: value of `synchronous_commit` to use if the server's is `off`.

    Raises: Unavailable when the server can't be reached or refuses, InvalidRequest for a malformed URL, or a
        pooler in place of a server.
    """
    takes_options = True
    with unavailable(url):
        try:
            connection = _Connection.connect(**server_parameters(url, name, settings), autocommit=True)
        except psycopg.OperationalError as error:
            if _REFUSED_PARAMETER not in str(error):
                raise
            takes_options = False
            connection = _Connection.connect(**_arguments(url, name), autocommit=True)
        _use_schema(connection, url)
        with closing_on_failure(connection):
            with deadline(connection, url, CONNECT_TIMEOUT_SECONDS):  # a pooler may wait for its server
                ((pid, commits),) = connection.execute(_SESSION).fetchall()
            if not takes_options or pid != connection.info.backend_pid:
                _share_sessions(connection, url, settings, session_for)
    if sync and commits == "off":
        connection.close()
        return connect(url, name, {**settings, "synchronous_commit": sync}, session_for=session_for)
    return connection


async def connect_async(
    url: str, name: str, settings: Settings = NO_SETTINGS, *, session_for: str = ""
) -> AsyncConnection:
    """Open a connection as `connect` does, for use from asyncio."""
    takes_options = True
    with unavailable(url):
        try:
            connection = await _AsyncConnection.connect(
                **server_parameters(url, name, settings), autocommit=True
            )
        except psycopg.OperationalError as error:
            if _REFUSED_PARAMETER not in str(error):
                raise
            takes_options = False
            connection = await _AsyncConnection.connect(**_arguments(url, name), autocommit=True)
        _use_schema(connection, url)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                ((pid, _),) = await (await connection.execute(_SESSION)).fetchall()
            if not takes_options or pid != connection.info.backend_pid:
                _share_sessions(connection, url, settings, session_for)
        except TimeoutError as error:
            await connection.close()
            raise silent(url, CONNECT_TIMEOUT_SECONDS) from error
        except BaseException:
            await connection.close()
            raise
    return connection


async def connect_shared(url: str, name: str) -> AsyncConnection:
    """Open a connection as `connect_async` does; a pooler may switch its server connections."""
    connection = await connect_async(url, name)
    connection.prepare_threshold = None
    return connection


async def connect_replication(url: str, name: str, settings: Settings, encoding: str) -> AsyncConnection:
    """Open a connection for logical replication from the database at a URL.

    Arguments:
        encoding: PostgreSQL's name of the encoding of texts.

    Raises: Unavailable when the server can't be reached or refuses, InvalidRequest for a malformed URL, or a
        pooler in place of a server.
    """
    arguments = server_parameters(url, name, settings)
    arguments |= {"replication": "database", "client_encoding": encoding}
    with unavailable(url):
        try:
            return await psycopg.AsyncConnection.connect(**arguments, autocommit=True)
        except psycopg.OperationalError as error:
            if _REFUSED_PARAMETER not in str(error):
                raise
            raise pooler_refusal(url, "capture") from error


@contextmanager
def deadline(connection: Connection, url: str, seconds: float) -> Iterator[None]:
    """Cut off a connection whose server does not answer in time, as the driver would wait forever.

    Raises: Unavailable.
    """
    is_over = Event()

    def cut() -> None:
        is_over.set()
        with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)

    timer = Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except psycopg.Error as error:
        if is_over.is_set():
            raise silent(url, seconds) from error
        raise
    finally:
        timer.cancel()
        timer.join()


def is_pooled(connection: Connection) -> bool:
    """Return whether a pooler stands between a connection of `connect` and its server."""
    return isinstance(connection, _Connection) and bool(connection.local_settings)


@contextmanager
def in_transaction(connection: Connection) -> Iterator[None]:
    """Begin a transaction if a pooler needs one for the settings of the statements in the context."""
    if is_pooled(connection):
        with connection.transaction():
            yield
    else:
        yield


def set_locally(connection: Connection) -> None:
    """Apply the settings of a connection of `connect` in the transaction that a statement has begun."""
    if isinstance(connection, _Connection):
        for statement in connection.local_settings:
            connection.execute(statement)


@contextmanager
def closing_on_failure(connection: Closable) -> Iterator[None]:
    """Close a connection if its use fails."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _arguments(url: str, name: str) -> dict[str, Any]:
    shortened = name.encode()[:NAME_BYTES].decode("utf-8", "ignore")
    return _DEFAULTS | parameters_of(url) | {"application_name": shortened, "client_encoding": "UTF8"}


def server_parameters(url: str, name: str, settings: Settings) -> dict[str, Any]:
    """Return the parameters of libpq for a session with settings, which override the options of the URL."""
    arguments = _arguments(url, name)
    inherited = {each.keyword: each.val for each in psycopg.pq.Conninfo.get_defaults()}
    options = arguments.get("options") or (inherited.get(b"options") or b"").decode()
    for name, value in _session_settings(url, settings).items():
        escaped = value.replace("\\", "\\\\").replace(" ", "\\ ")
        options += f" -c {name}={escaped}"
    return arguments | {"options": options.strip()}


def _share_sessions(
    connection: _Connection | _AsyncConnection, url: str, settings: Settings, session_for: str
) -> None:
    """Prepare a connection for a pooler, whose server connections others use between two transactions.

    Raises: InvalidRequest if it needs a session of its own.
    """
    if session_for:
        raise pooler_refusal(url, session_for)
    connection.prepare_threshold = None  # the next transaction may be in another session
    connection.local_settings = tuple(
        # Defaults for transactions would not apply to the transaction that sets them.
        f"SET LOCAL {name.removeprefix('default_')} = '{value}'".encode()
        for name, value in _session_settings(url, settings).items()
    )


def _session_settings(url: str, settings: Settings) -> Settings:
    schema = schema_of(url)
    return {**TEXT_SETTINGS, **({"search_path": schema} if schema else {}), **settings}


def _use_schema(connection: _Connection | _AsyncConnection, url: str) -> None:
    """Have a connection replace the schema in its statements by the schema that its URL names."""
    connection.schema = schema_of(url)
    if connection.schema is None:
        return
    if isinstance(connection, _Connection):
        connection.cursor_factory = _Cursor
        connection.server_cursor_factory = _ServerCursor
    else:
        connection.cursor_factory = _AsyncCursor


def _begins_transaction(connection: _Connection | _AsyncConnection) -> bool:
    """Return whether the next statement begins a transaction that has settings to set."""
    return (
        bool(connection.local_settings)
        and connection.pgconn.transaction_status == TransactionStatus.IDLE
        and not connection.pgconn.pipeline_status
    )
