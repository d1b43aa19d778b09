"""ADBC connections to PostgreSQL.

ADBC reads the catalog of types when it opens a database, which takes ten times as long as to connect. So a
process opens each database once; without connections, it holds nothing of the server.
"""

import os
from contextlib import closing
from functools import lru_cache
from typing import Any

from psycopg.conninfo import make_conninfo

from postroom.adapters.postgres.database import Settings, connect, is_pooled, server_parameters, shown
from postroom.domain.errors import Unavailable


def adbc_database(url: str, name: str, settings: Settings) -> Any | None:
    """Return the ADBC handle of a database, which has no connection of its own.

    None without the driver, and at a pooler: the driver sets up its sessions outside of transactions.

    Arguments:
        name: application name of its connections.
        settings: settings of the server for its connections.
    """
    return _database(url, name, tuple(settings.items()), os.getpid())


def adbc_connection(database: Any) -> Any:
    """Return a DB-API connection of a handle, which begins a transaction with its first statement."""
    from adbc_driver_manager import AdbcConnection
    from adbc_driver_manager.dbapi import Connection

    return Connection(_SharedHandle(database), AdbcConnection(database))  # type: ignore[arg-type]  # closable


@lru_cache(maxsize=8)
def _database(url: str, name: str, settings: tuple[tuple[str, str], ...], process: int) -> Any | None:
    """Return the handle of a process: a fork must not use that of its parent."""
    try:
        from adbc_driver_postgresql import connect as open_database
    except ImportError:
        return None
    with closing(connect(url, name)) as connection:
        if is_pooled(connection):
            return None
    from adbc_driver_manager import Error

    try:
        return open_database(make_conninfo(**server_parameters(url, name, dict(settings))))
    except Error as error:
        reason = str(error).replace(url, shown(url)).partition("\n")[0]
        raise Unavailable(f"The database {shown(url)} can't be read: {reason}") from None


class _SharedHandle:
    """A database handle that a connection keeps, but does not close, because others use it."""

    def __init__(self, database: Any) -> None:
        self._database = database

    def close(self) -> None:
        """Do nothing."""
