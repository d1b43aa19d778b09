"""ADBC connections to PostgreSQL.

ADBC reads the catalog of types when it opens a database, which takes ten times as long as to connect. So a
process opens each database once; without connections, it holds nothing of the server.
"""

import os
from functools import lru_cache
from typing import Any


def adbc_database(url: str) -> Any:
    """Return the ADBC handle of a database, which has no connection of its own."""
    return _database(url, os.getpid())


def adbc_connection(url: str) -> Any:
    """Return a DB-API connection, which begins a transaction with its first statement."""
    from adbc_driver_manager import AdbcConnection
    from adbc_driver_manager.dbapi import Connection

    database = adbc_database(url)
    return Connection(_SharedHandle(database), AdbcConnection(database))  # type: ignore[arg-type]  # closable


@lru_cache(maxsize=4)
def _database(url: str, process: int) -> Any:
    """Return the handle of a process: a fork must not use that of its parent."""
    from adbc_driver_postgresql import connect

    return connect(url)


class _SharedHandle:
    """A database handle that a connection keeps, but does not close, because others use it."""

    def __init__(self, database: Any) -> None:
        self._database = database

    def close(self) -> None:
        """Do nothing."""
