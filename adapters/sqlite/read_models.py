"""The read models port over the SQLite file that `projections/rebuild.py` writes beside the store."""

import fcntl
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Text,
    column,
    create_engine,
    func,
    literal_column,
    select,
    table,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from postroom.adapters.sql.read_models import SqlReadModels
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.tables import ReadModelTables
from postroom.adapters.sqlite.database import connect_reader
from postroom.application.ports.read_models import rebuild_lock_path, views_path
from postroom.domain.errors import Unavailable

TRIGRAM = 3
"""Characters a word needs for the text index to know it."""

_SQL = statements("postroom.adapters.sqlite", "views.sql")
_encode_json = msgspec.json.Encoder().encode


class SqliteReadModels(SqlReadModels):
    """Answer searches from a SQLite read-model file.

    Arguments:
        store: path of the SQLite store whose read models these are.
    """

    def __init__(self, store: str | Path) -> None:
        super().__init__(str(store), _SqliteDialect())
        self._store = Path(store)
        self._path = views_path(store)
        # AUTOCOMMIT hands transactions over to us: readers must see the version and its tables at one moment.
        self._engine = create_engine(
            "sqlite+pysqlite://",
            creator=lambda: connect_reader(self._path),
            poolclass=QueuePool,
            isolation_level="AUTOCOMMIT",
        )

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._engine.dispose()

    def _is_there(self) -> bool:
        return self._path.exists()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as db:
                db.exec_driver_sql("BEGIN")
                try:
                    yield db
                finally:
                    db.exec_driver_sql("ROLLBACK")
        except (DBAPIError, sqlite3.Error) as error:
            reason = error.orig if isinstance(error, DBAPIError) else error
            raise Unavailable(
                f"The read models {self._path} can't be read: {reason}; rebuild them."
            ) from error

    def _be_patient(self, db: Connection) -> None:
        """Do nothing: no statement is ever interrupted."""

    def _size(self, db: Connection) -> int:
        return self._path.stat().st_size

    def _heads(self) -> list[tuple[str, int]]:
        if not self._store.exists():
            return []
        with closing(connect_reader(self._store)) as log:
            return log.execute(_SQL["heads"]).fetchall()

    def _is_rebuild_running(self) -> bool:
        with suppress(FileNotFoundError), open(rebuild_lock_path(self._store), "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


class _SqliteDialect:
    """How SQLite looks values up in one parameter, and words in its trigram index."""

    text = Text

    def equals(self, column_: ColumnElement[Any], value: str) -> ColumnElement[bool]:
        return column_ == value

    def among(self, column_: ColumnElement[Any], values: Sequence[str]) -> ColumnElement[bool]:
        each = func.json_each(_encode_json(values).decode()).table_valued("value")
        return column_.in_(select(each.c.value))

    def text_candidates(self, tables: ReadModelTables, words: Sequence[str]) -> ColumnElement[bool] | None:
        # The index knows which three-letter pieces occur in a message, not where: it narrows, the text
        # decides.
        pieces = {word[at : at + TRIGRAM] for word in words for at in range(len(word) - TRIGRAM + 1)}
        if not pieces:
            return None
        query = " AND ".join('"' + piece.replace('"', '""') + '"' for piece in sorted(pieces))
        index = table(tables.name("text_index"), column("rowid"))
        return tables.mailbox.c.id.in_(
            select(index.c.rowid).where(literal_column(index.name).op("MATCH")(query))
        )
