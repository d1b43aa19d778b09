"""Connections to a PostgreSQL database, and errors about it."""

import asyncio
import os
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from threading import Event, Lock, Timer
from typing import Any, Protocol, Self, TypeVar

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus

from postroom.adapters.postgres.url import DEFAULT_SCHEMA, in_schema, is_url, schema_of, without_schema
from postroom.domain.errors import InvalidRequest, Unavailable, UnusableServer

Connection = psycopg.Connection[tuple[Any, ...]]
AsyncConnection = psycopg.AsyncConnection[tuple[Any, ...]]
Settings = Mapping[str, str]
"""Settings of the server for a connection, by name."""
T = TypeVar("T")


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
_LOCAL_HOSTS = ("", "localhost", "127.0.0.1", "::1")
_NO_CONNECTION = ("08", "28", "3D", "53300", "57P")
"""Prefixes of the SQLSTATE of connections that failed, were refused, or were ended by the server."""
_REFUSED = ("28", "3D")
_REFUSAL_TEXTS = ("authentication failed", "no pg_hba.conf entry", "does not exist", "permission denied")
NAME_BYTES = 63
"""Limit of an application name; the server truncates longer ones."""


def shown(url: str) -> str:
    """Return the URL for messages: without the password and all options but the schema.

    Raises: InvalidRequest for a malformed URL.
    """
    parameters = _parameters(url)
    user = f"{parameters['user']}@" if "user" in parameters else ""
    port = f":{parameters['port']}" if "port" in parameters else ""
    schema = f"?schema={schema_of(url)}" if schema_of(url) else ""
    return f"postgresql://{user}{parameters.get('host', '')}{port}/{parameters.get('dbname', '')}{schema}"


def lock_name(url: str, task: str) -> str:
    """Return the name of the advisory lock of a task on a store, as statements write it; see `in_schema`."""
    return f"{schema_of(url) or DEFAULT_SCHEMA} {task}"


def follow_lock(url: str, target: str) -> str:
    """Return the name of the lock of the process that follows.

    Arguments:
        target: name of the target that it follows into, empty for the store's own read models.
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
        sync: `synchronous_commit` in place of `off`, if the server has that.

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
            raise _silent(url, CONNECT_TIMEOUT_SECONDS) from error
        except BaseException:
            await connection.close()
            raise
    return connection


async def connect_shared(url: str, name: str) -> AsyncConnection:
    """Open a connection as `connect_async` does, whose server connections a pooler may switch."""
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
            raise _refuse_pooler(url, "capture") from error


@contextmanager
def deadline(connection: Connection, url: str, seconds: float) -> Iterator[None]:
    """Cut a connection off whose server does not answer in time, as the driver waits for ever.

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
            raise _silent(url, seconds) from error
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
    """Set the settings of a connection of `connect` in a transaction that was begun by a statement."""
    if isinstance(connection, _Connection):
        for statement in connection.local_settings:
            connection.execute(statement)


def has_ended(connection: Connection | AsyncConnection) -> bool:
    """Return whether a connection was lost, or is idle and was ended by the server or on the way to it.

    Between two statements a server sends nothing but why it ends the session; should it be anything else, a
    new connection is as good. So what was not yet sent needs no repetition, whatever it does.
    """
    if connection.closed:
        return True
    if connection.pgconn.transaction_status != TransactionStatus.IDLE:
        return False
    arrivals = select.poll()
    arrivals.register(connection.fileno(), select.POLLIN)
    return bool(arrivals.poll(0))


class Reconnecting:
    """A connection that one thread at a time uses; the next use replaces one that was lost or ended.

    Arguments:
        open_: opens and configures a connection.
    """

    def __init__(self, open_: Callable[[], Connection]) -> None:
        self._open = open_
        self._lock = Lock()
        self._connection: Connection | None = None
        self._closed = False

    @contextmanager
    def use(self) -> Iterator[Connection]:
        """Use the connection exclusively while the context lasts.

        Raises: Unavailable after `close`.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("The connection to the database was closed; open the store again.")
            if self._connection is not None and has_ended(self._connection):
                self._disconnect()
            if self._connection is None:
                self._connection = self._open()
            try:
                yield self._connection
            finally:
                if self._connection.broken:
                    self._disconnect()

    def run(self, function: Callable[[Connection], T]) -> T:
        """Return a function's result; call it once more if the connection was lost in its first call.

        Arguments:
            function: idempotent, as the server may have executed the statements of the first call, or still
                will.
        """
        with self.use() as connection:
            try:
                return function(connection)
            except psycopg.OperationalError:
                if not connection.broken:
                    raise
        with self.use() as connection:
            return function(connection)

    def close(self) -> None:
        """Close the connection permanently; idempotent."""
        with self._lock:
            self._closed = True
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class AsyncReconnecting:
    """A connection for asyncio; the next use replaces one that was lost, or ended outside a transaction.

    Arguments:
        open_: opens and configures a connection.
    """

    def __init__(self, open_: Callable[[], Awaitable[AsyncConnection]]) -> None:
        self._open = open_
        self._opening = asyncio.Lock()
        self._connection: AsyncConnection | None = None

    async def connected(self) -> AsyncConnection:
        """Return the connection, which may have been opened for this call."""
        async with self._opening:
            if self._connection is not None and has_ended(self._connection):
                await self.close()
            if self._connection is None:
                self._connection = await self._open()
            return self._connection

    async def close(self) -> None:
        """Close the connection until its next use; idempotent."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()


@contextmanager
def closing_on_failure(connection: Closable) -> Iterator[None]:
    """Close a connection if its use fails."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def identity(url: str) -> str:
    """Return server, database and schema of a URL, the same for all spellings of this host."""
    parameters = _parameters(url)
    hosts = str(parameters.get("host") or os.environ.get("PGHOST", "")).split(",")
    is_local = all(host in _LOCAL_HOSTS or host.startswith("/") for host in hosts)
    port = parameters.get("port") or os.environ.get("PGPORT") or 5_432
    user = parameters.get("user") or os.environ.get("PGUSER", "")
    database = parameters.get("dbname") or os.environ.get("PGDATABASE") or user
    schema = f" {schema_of(url)}" if schema_of(url) else ""
    return f"postgresql {'local' if is_local else ','.join(hosts)} {port} {database}{schema}"


@contextmanager
def unavailable(url: str) -> Iterator[None]:
    """Raise `Unavailable`, without the password, in place of a database error."""
    try:
        yield
    except psycopg.Error as error:
        raise describe(error, url) from error


def describe(error: psycopg.Error, url: str) -> Unavailable:
    """Return a database error as `Unavailable`, in one sentence."""
    message = error.diag.message_primary or str(error).partition("\n")[0]
    reason = " ".join(message.removeprefix("connection failed:").split()).rstrip(".") or type(error).__name__
    if _is_refused(error, message):
        return UnusableServer(
            f"The database {shown(url)} refuses the connection: {reason}. Check user, password and "
            "database of its URL."
        )
    if is_lost(error):
        return Unavailable(
            f"The database {shown(url)} can't be reached: {reason}. Check its URL and that the server runs."
        )
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return UnusableServer(
            f"The database {shown(url)} denies a privilege that Postroom needs: {reason}; grant it to the "
            "user."
        )
    if error.sqlstate is None:
        return Unavailable(f"A statement can't be sent to the database {shown(url)}: {reason}.")
    return Unavailable(f"The database {shown(url)} refused a statement: {reason}.")


def is_lost(error: psycopg.Error) -> bool:
    """Return whether an error means that there is no connection to the server, or none any more."""
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError)
    return error.sqlstate.startswith(_NO_CONNECTION)


def _is_refused(error: psycopg.Error, message: str) -> bool:
    """Return whether a server refused the user or the database of a connection, as it would again.

    libpq reports no SQLSTATE for these; their texts are those of a server with English messages.
    """
    if error.sqlstate is not None:
        return error.sqlstate.startswith(_REFUSED)
    return "FATAL:" in message and any(text in message for text in _REFUSAL_TEXTS)


def _arguments(url: str, name: str) -> dict[str, Any]:
    shortened = name.encode()[:NAME_BYTES].decode("utf-8", "ignore")
    return _DEFAULTS | _parameters(url) | {"application_name": shortened, "client_encoding": "UTF8"}


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
        raise _refuse_pooler(url, session_for)
    connection.prepare_threshold = None  # the next transaction may be in another session
    connection.local_settings = tuple(
        # The defaults of transactions come too late for the one that sets them.
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


def _silent(url: str, seconds: float) -> Unavailable:
    return Unavailable(f"The database {shown(url)} did not answer within {seconds:g} s; check the server.")


def _refuse_pooler(url: str, session_for: str) -> InvalidRequest:
    return InvalidRequest(
        f"{shown(url)} is a transaction pooler; name the server itself, as {session_for} needs a session of "
        "its own."
    )


def _begins_transaction(connection: _Connection | _AsyncConnection) -> bool:
    """Return whether the next statement begins a transaction that has settings to set."""
    return (
        bool(connection.local_settings)
        and connection.pgconn.transaction_status == TransactionStatus.IDLE
        and not connection.pgconn.pipeline_status
    )


def _parameters(url: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    with suppress(psycopg.Error):  # its message may contain part of the password
        parameters = conninfo_to_dict(without_schema(url))
    ports = str(parameters.get("port", "0")).replace(",", "")
    # An unescaped @ or / in the password ends it early, and the rest is parsed as host and database.
    is_ambiguous = (
        "@" in f"{parameters.get('host', '')}{parameters.get('dbname', '')}" or not ports.isdecimal()
    )
    if not parameters or is_ambiguous or not is_url(url):
        raise InvalidRequest(
            "The PostgreSQL URL is malformed; write postgresql://user:password@host:port/database, with "
            "special characters of the password as %XX."
        )
    return parameters
