"""As much of the `sqlite3` module as the SQLite adapter uses, over apsw: only apsw can use our VFS."""

from collections.abc import Iterable, Iterator
from typing import Any

import apsw

from tests.integration.power_cut.disk import Disk

Error = apsw.Error
OperationalError = apsw.SQLError


class Connection:
    """What `sqlite3.connect(isolation_level=None)` returns."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def executemany(self, statement: str, values: Iterable[Any]) -> None:
        for each in values:
            self.execute(statement, each)

    def execute(self, statement: str, values: Any = None) -> "Cursor":
        return Cursor(self._connection, self._connection.execute(statement, values))

    def executescript(self, script: str) -> None:
        for _ in self._connection.execute(script):
            pass

    def close(self) -> None:
        self._connection.close()


class Cursor:
    """The rows of one statement."""

    def __init__(self, connection: apsw.Connection, rows: apsw.Cursor) -> None:
        self._rows = rows
        self.rowcount = connection.changes()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def close(self) -> None:
        self._rows.close()

    def fetchone(self) -> Any:
        return self._rows.fetchone()

    def fetchall(self) -> list[Any]:
        return self._rows.fetchall()


def connect(path: Any, *, uri: bool = False, **settings: Any) -> Connection:
    """Open a file of the power-cut disk; what `settings` say of caching and threads makes no difference."""
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | (apsw.SQLITE_OPEN_URI if uri else 0)
    return Connection(apsw.Connection(str(path), flags=flags, vfs=Disk.NAME))
