"""The read models port over the read-model file of a SQLite store."""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
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

from postroom.adapters.files.durable import is_file_locked
from postroom.adapters.sql.log_reader import envelopes_at
from postroom.adapters.sql.read_models import OpenArchive, SqlReadModels
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.tables import ReadModelTables, read_heads
from postroom.adapters.sqlite.database import connect_reader
from postroom.adapters.sqlite.read_model_file import (
    follow_lock_path,
    rebuild_lock_path,
    views_path,
)
from postroom.adapters.sqlite.store_file import has_file
from postroom.domain.errors import Unavailable
from postroom.domain.tokenizer import Word
from postroom.projections.incremental.cursors import Cursor, Head

TRIGRAM = 3
"""Minimum length of a part of text that the trigram index can find."""

_SQL = statements("postroom.adapters.sqlite", "views.sql")
_encode_json = msgspec.json.Encoder().encode


class SqliteReadModels(SqlReadModels):
    """Queries on a SQLite read-model file.

    Arguments:
        store: path of the SQLite store.
    """

    def __init__(self, store: str | Path, open_archive: OpenArchive | None = None) -> None:
        super().__init__(str(store), _SqliteDialect(), open_archive)
        self._store = Path(store)
        self._path = views_path(store)
        # AUTOCOMMIT disables SQLAlchemy's transactions: ours read a version and its tables in one snapshot.
        self._engine = create_engine(
            "sqlite+pysqlite://",
            creator=lambda: connect_reader(self._path),
            poolclass=QueuePool,
            isolation_level="AUTOCOMMIT",
        )

    def close(self) -> None:
        """Close the file; idempotent."""
        self._engine.dispose()

    def _exists(self) -> bool:
        return has_file(self._path)

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

    def _prepare_scan(self, db: Connection) -> None:
        """Do nothing: statements have no timeout."""

    def _size(self, db: Connection) -> int:
        return self._path.stat().st_size

    def log_heads(self, cursors: Mapping[int, Cursor]) -> list[Head]:
        """Return the ends of the mailbox logs; see `SqlReadModels.log_heads`."""
        if not has_file(self._store):
            return []
        tables = {"log": "log", "mailbox_names": "mailbox_names"}
        with closing(connect_reader(self._store)) as log:
            return read_heads(lambda statement: log.execute(statement).fetchall(), tables, cursors)

    def log_envelopes(self, places: Sequence[int]) -> dict[int, bytes]:
        """Return the envelopes that the log has; see `SqlReadModels.log_envelopes`."""
        if not has_file(self._store):
            return {}
        with closing(connect_reader(self._store)) as log:
            return envelopes_at(places, log.execute(_SQL["commits"], {"places": _encode_json(places)}))

    def log_time_after(self, mailbox: str, position: int) -> int | None:
        """Return the log time of a record; see `SqlReadModels.log_time_after`."""
        with closing(connect_reader(self._store)) as log:
            row = log.execute(_SQL["at"], {"mailbox": mailbox, "position": position}).fetchone()
        return None if row is None else int(row[0])

    def is_following(self, target: str = "") -> bool:
        """Return whether a follower holds its lock; see `SqlReadModels.is_following`."""
        return is_file_locked(follow_lock_path(self._store, target))

    def _is_rebuild_running(self) -> bool:
        return is_file_locked(rebuild_lock_path(self._store))


class _SqliteDialect:
    """Lookups by JSON arrays, and text search by FTS5 indexes of trigrams and of words; see `Dialect`."""

    text = Text

    def equals(self, column_: ColumnElement[Any], value: str) -> ColumnElement[bool]:
        return column_ == value

    def among(self, column_: ColumnElement[Any], values: Sequence[str]) -> ColumnElement[bool]:
        each = func.json_each(_encode_json(values).decode()).table_valued("value")
        return column_.in_(select(each.c.value))

    def is_any(self, column_: ColumnElement[Any], ids: Sequence[int]) -> ColumnElement[bool]:
        each = func.json_each(_encode_json(ids).decode()).table_valued("value")
        return column_.in_(select(each.c.value))

    def contains(self, column_: ColumnElement[Any], text: str) -> ColumnElement[bool]:
        # LIKE would end at a NUL.
        return func.instr(func.lower(column_), func.lower(text)) > 0

    def with_parts(self, tables: ReadModelTables, parts: Sequence[str]) -> Select[Any] | None:
        # The index has no positions of trigrams: it returns candidates, which are checked against the text.
        trigrams = {part[at : at + TRIGRAM] for part in parts for at in range(len(part) - TRIGRAM + 1)}
        return _matches(tables, "text_index", map(_quoted, sorted(trigrams))) if trigrams else None

    def expected_rows(self, db: Connection, ids: Select[Any]) -> int | None:
        return None

    def must_scan(self, db: Connection, ids: Select[Any]) -> bool:
        return False

    def sortable(
        self, column_: ColumnElement[Any]
    ) -> tuple[ColumnElement[str], tuple[ColumnElement[bool], ...]]:
        return column_, ()

    def allow_unordered(self, db: Connection) -> None:
        """Do nothing: SQLite reads them for the statements that need them."""

    def with_words(self, tables: ReadModelTables, words: Sequence[Word]) -> Select[Any]:
        terms = (_quoted(word.text) + (" *" if word.is_prefix else "") for word in words)
        return _matches(tables, "word_index", terms)


def _matches(tables: ReadModelTables, name: str, terms: Iterable[str]) -> Select[Any]:
    index = table(tables.name(name), column("rowid"))
    return select(index.c.rowid).where(literal_column(index.name).op("MATCH")(" AND ".join(terms)))


def _quoted(term: str) -> str:
    return '"' + term.replace('"', '""') + '"'
