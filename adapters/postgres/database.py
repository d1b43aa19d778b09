"""A PostgreSQL database: how it is named, connected to, and what is said when it fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from postroom.adapters.postgres.url import is_url
from postroom.domain.errors import InvalidRequest, Unavailable

Connection = psycopg.Connection[tuple[Any, ...]]
AsyncConnection = psycopg.AsyncConnection[tuple[Any, ...]]

CONNECT_TIMEOUT_SECONDS = 5
_DEFAULTS: dict[str, Any] = {
    "connect_timeout": CONNECT_TIMEOUT_SECONDS,
    # A server that vanished without a word is noticed after 20 to 30 seconds, not after two hours.
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_NO_CONNECTION = ("08", "28", "3D", "53300", "57P")
"""Codes of connections that failed, were refused, or ended by the server."""
NAME_BYTES = 63
"""What the server keeps of a connection's name."""


def shown(url: str) -> str:
    """Return the URL as it may be shown: without the password and all options.

    Raises: InvalidRequest when it can't be read.
    """
    given = _parameters(url)
    user = f"{given['user']}@" if "user" in given else ""
    port = f":{given['port']}" if "port" in given else ""
    return f"postgresql://{user}{given.get('host', '')}{port}/{given.get('dbname', '')}"


def connect(url: str, name: str) -> Connection:
    """Open a connection whose every statement is a transaction by itself, unless one is opened explicitly.

    Arguments:
        url: `postgresql://user:password@host:port/database`; its options win over ours.
        name: what the server shows as the connection's application name.

    Raises: Unavailable when the server can't be reached or refuses, InvalidRequest for a malformed URL.
    """
    with unavailable(url):
        return psycopg.Connection.connect(**_arguments(url, name), autocommit=True)


async def connect_async(url: str, name: str) -> AsyncConnection:
    """Open a connection as `connect` does, for use from asyncio."""
    with unavailable(url):
        return await psycopg.AsyncConnection.connect(**_arguments(url, name), autocommit=True)


class Reconnecting:
    """A connection that several threads take turns with, made again by the next one when it was lost.

    Arguments:
        open_: makes the connection, ready for use.
    """

    def __init__(self, open_: Callable[[], Connection]) -> None:
        self._open = open_
        self._lock = Lock()
        self._connection: Connection | None = None
        self._closed = False

    @property
    def is_connected(self) -> bool:
        """Tell whether there is a connection that was not lost, as far as anybody knows."""
        return self._connection is not None

    @contextmanager
    def use(self) -> Iterator[Connection]:
        """Use the connection while the context lasts, alone.

        Raises: Unavailable when it was closed for good.
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
        """Close the connection for good; closing twice is fine."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None


@contextmanager
def closing_on_failure(connection: Connection) -> Iterator[None]:
    """Close a connection that could not be made ready for use."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


@contextmanager
def unavailable(url: str) -> Iterator[None]:
    """Raise `Unavailable` in one sentence, without a password, for any error of the database inside."""
    try:
        yield
    except psycopg.Error as error:
        raise describe(error, url) from error


def describe(error: psycopg.Error, url: str) -> Unavailable:
    """Return what an error of the database is to its user, in one sentence."""
    said = error.diag.message_primary or str(error).partition("\n")[0]
    reason = " ".join(said.removeprefix("connection failed:").split()).rstrip(".") or type(error).__name__
    if error.sqlstate is None or error.sqlstate.startswith(_NO_CONNECTION):
        return Unavailable(
            f"The database {shown(url)} can't be reached: {reason}. Check its URL and that the server runs."
        )
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return Unavailable(
            f"The database {shown(url)} forbids what Postroom needs: {reason}; grant it to the user."
        )
    return Unavailable(f"The database {shown(url)} refused a statement: {reason}.")


def _arguments(url: str, name: str) -> dict[str, Any]:
    shortened = name.encode()[:NAME_BYTES].decode("utf-8", "ignore")
    return _DEFAULTS | _parameters(url) | {"application_name": shortened, "client_encoding": "UTF8"}


def _parameters(url: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    with suppress(psycopg.Error):  # it repeats a piece of the URL, perhaps of the password
        given = conninfo_to_dict(url)
    ports = str(given.get("port", "0")).replace(",", "")
    # An @ or / of the password's own ends it early, and the rest of it would be taken for host and database.
    strays = "@" in f"{given.get('host', '')}{given.get('dbname', '')}" or not ports.isdecimal()
    if not given or strays or not is_url(url):
        raise InvalidRequest(
            "The PostgreSQL URL can't be read; write postgresql://user:password@host:port/database, with "
            "special characters of the password as %XX."
        )
    return given
