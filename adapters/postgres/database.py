"""Connections to a PostgreSQL database, and errors about it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, Protocol

import psycopg
from psycopg.conninfo import conninfo_to_dict

from postroom.adapters.postgres.url import is_url
from postroom.domain.errors import InvalidRequest, Unavailable, UnusableServer

Connection = psycopg.Connection[tuple[Any, ...]]
AsyncConnection = psycopg.AsyncConnection[tuple[Any, ...]]


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
_LOCAL_HOSTS = ("", "localhost", "127.0.0.1", "::1")
_NO_CONNECTION = ("08", "28", "3D", "53300", "57P")
"""Prefixes of the SQLSTATE of connections that failed, were refused, or were ended by the server."""
_REFUSED = ("28", "3D")
_REFUSAL_TEXTS = ("authentication failed", "no pg_hba.conf entry", "does not exist", "permission denied")
NAME_BYTES = 63
"""Limit of an application name; the server truncates longer ones."""


def shown(url: str) -> str:
    """Return the URL for messages: without the password and all options.

    Raises: InvalidRequest for a malformed URL.
    """
    parameters = _parameters(url)
    user = f"{parameters['user']}@" if "user" in parameters else ""
    port = f":{parameters['port']}" if "port" in parameters else ""
    return f"postgresql://{user}{parameters.get('host', '')}{port}/{parameters.get('dbname', '')}"


def follow_lock(target: str) -> str:
    """Return the name of the lock of the process that follows.

    Arguments:
        target: name of the target that it follows into, empty for the store's own read models.
    """
    return f"postroom follow{f' into {target}' if target else ''}"


def connect(url: str, name: str) -> Connection:
    """Open a connection in autocommit mode.

    Arguments:
        url: `postgresql://user:password@host:port/database`; its options override the defaults.
        name: the connection's application name, which the server shows.

    Raises: Unavailable when the server can't be reached or refuses, InvalidRequest for a malformed URL.
    """
    with unavailable(url):
        return psycopg.Connection.connect(**_arguments(url, name), autocommit=True)


async def connect_async(url: str, name: str) -> AsyncConnection:
    """Open a connection as `connect` does, for use from asyncio."""
    with unavailable(url):
        return await psycopg.AsyncConnection.connect(**_arguments(url, name), autocommit=True)


async def connect_replication(url: str, name: str, options: str, encoding: str) -> AsyncConnection:
    """Open a connection for logical replication from the database at a URL.

    Arguments:
        options: settings of the session, as `-c name=value`.
        encoding: PostgreSQL's name of the encoding of texts.

    Raises: Unavailable when the server can't be reached or refuses, InvalidRequest for a malformed URL.
    """
    arguments = _arguments(url, name)
    arguments |= {
        "replication": "database",
        "options": f"{arguments.get('options', '')} {options}".strip(),
        "client_encoding": encoding,
    }
    with unavailable(url):
        return await psycopg.AsyncConnection.connect(**arguments, autocommit=True)


class Reconnecting:
    """A connection that one thread at a time uses; it is reopened at the next use after it was lost.

    Arguments:
        open_: opens and configures a connection.
    """

    def __init__(self, open_: Callable[[], Connection]) -> None:
        self._open = open_
        self._lock = Lock()
        self._connection: Connection | None = None
        self._closed = False

    @property
    def is_connected(self) -> bool:
        """Return whether there is a connection that is not known to be lost."""
        return self._connection is not None

    @contextmanager
    def use(self) -> Iterator[Connection]:
        """Use the connection exclusively while the context lasts.

        Raises: Unavailable after `close`.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("The connection to the database was closed; open the store again.")
            if self._connection is None:
                self._connection = self._open()
            try:
                yield self._connection
            finally:
                if self._connection.broken:
                    self._connection.close()
                    self._connection = None

    def close(self) -> None:
        """Close the connection permanently; idempotent."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None


@contextmanager
def closing_on_failure(connection: Closable) -> Iterator[None]:
    """Close a connection if what is done with it fails."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def identity(url: str) -> str:
    """Return server and database of a URL, the same for all spellings of this host."""
    parameters = _parameters(url)
    hosts = str(parameters.get("host") or os.environ.get("PGHOST", "")).split(",")
    is_local = all(host in _LOCAL_HOSTS or host.startswith("/") for host in hosts)
    port = parameters.get("port") or os.environ.get("PGPORT") or 5_432
    user = parameters.get("user") or os.environ.get("PGUSER", "")
    database = parameters.get("dbname") or os.environ.get("PGDATABASE") or user
    return f"postgresql {'local' if is_local else ','.join(hosts)} {port} {database}"


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


def _parameters(url: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    with suppress(psycopg.Error):  # its message may contain part of the password
        parameters = conninfo_to_dict(url)
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
