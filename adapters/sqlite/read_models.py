"""The read models port over the read-model file of a SQLite store."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Text,
    and_,
    case,
    column,
    create_engine,
    func,
    literal_column,
    or_,
    select,
    table,
    union_all,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from postroom.adapters.files import is_file_locked
from postroom.adapters.sql.ddl import SQLITE
from postroom.adapters.sql.log_reader import envelopes_at
from postroom.adapters.sql.read_models import OpenArchive, SqlReadModels
from postroom.adapters.sql.search import IdList
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.tables import ReadModelTables, read_heads
from postroom.adapters.sqlite.database import connect_reader
from postroom.adapters.sqlite.read_model_file import (
    NUL,
    follow_lock_path,
    rebuild_lock_path,
    views_path,
)
from postroom.adapters.sqlite.store_file import has_file
from postroom.domain.errors import Unavailable
from postroom.domain.search import IDS, TEXT_HEADERS, WORD_HEADERS
from postroom.domain.tokenizer import Word, has_words, tokenize
from postroom.projections.incremental import Cursor, Head
from postroom.projections.search_text import LONG_TEXT, indexed_parts, is_part_of_id

FREQUENT = ("acked", "archived")
"""Statuses that the index of statuses leaves out."""
SAMPLE_ROWS = 200
"""Number of ids from which the number of all is extrapolated."""
DENSITY = 2
"""How many times denser than the average ids may be where messages were sent without pauses."""
TRIGRAM = 3
"""Minimum length of a part of text that the trigram index can find."""

_SQL = statements("postroom.adapters.sqlite", "views.sql")
_encode_json = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


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
            creator=self._connect,
            poolclass=QueuePool,
            isolation_level="AUTOCOMMIT",
        )

    def _connect(self) -> sqlite3.Connection:
        connection = connect_reader(self._path)
        connection.create_function("has_words", -1, _has_words, deterministic=True)
        return connection

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

    def log_envelopes(self, db: Connection | None, places: Sequence[int]) -> dict[int, bytes]:
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
    stream_text = SQLITE.stream_text

    def equals(self, column_: ColumnElement[Any], value: str) -> ColumnElement[bool]:
        is_equal = column_ == value
        if column_.key != "status" or value in FREQUENT:
            return is_equal
        # SQLite uses a partial index only if its condition is repeated exactly.
        return is_equal & column_.not_in([literal_column(f"'{each}'") for each in FREQUENT])

    def among(self, column_: ColumnElement[Any], values: Sequence[str]) -> ColumnElement[bool]:
        if any("\0" in each for each in values):
            return column_.in_(values)  # JSON functions read text no further than to a NUL
        each = func.json_each(_encode_json(values).decode()).table_valued("value")
        return column_.in_(select(each.c.value))

    def is_any(self, column_: ColumnElement[Any], ids: Sequence[int] | str) -> ColumnElement[bool]:
        text = ids if isinstance(ids, str) else _encode_json(ids).decode()
        return column_.in_(select(func.json_each(text).table_valued("value").c.value))

    def as_list(self, ids: ColumnElement[int]) -> ColumnElement[Any]:
        return func.json_group_array(ids)

    def contains(self, column_: ColumnElement[Any], text: str) -> ColumnElement[bool]:
        # LIKE would end at a NUL.
        return func.instr(func.lower(column_), func.lower(text)) > 0

    def with_parts(self, tables: ReadModelTables, parts: Sequence[str]) -> Select[Any] | None:
        # The index has no positions of trigrams: it returns candidates, which are checked against the text.
        indexed = indexed_parts(parts)
        texts = [part.replace("\0", NUL) for part in indexed]
        trigrams = {part[at : at + TRIGRAM] for part in texts for at in range(len(part) - TRIGRAM + 1)}
        if not trigrams:
            return None
        matches = _matches(tables, "text_index", " AND ".join(map(_quoted, sorted(trigrams))))
        if not is_part_of_id(indexed[0]):
            return matches
        # A separate statement for each column, because each reads the index of its column.
        messages, part = tables.mailbox.c, indexed[0]
        rows = [
            select(messages.id).where(_has_digits(messages.stream, part)),
            *(
                select(messages.id).where(messages[each].is_not(None), self.includes(messages[each], part))
                for each in IDS
            ),
        ]
        return select(union_all(matches, *rows).subquery().c.rowid)

    def few_with_words(
        self, db: Connection, tables: ReadModelTables, words: Sequence[Word], *, or_long: bool = False
    ) -> IdList:
        if any(word.is_prefix for word in words):
            # An index collects all entries of a prefix before it returns the first.
            return IdList(0)
        names = {each: tables.name(each) for each in ("mailbox", "word_index")}
        statement = _SQL["few_words"].format(**names, limit=SAMPLE_ROWS)
        sample = db.exec_driver_sql(statement, {"words": _query(words, or_long=or_long)}).one()
        rows, ids, first, last, end = sample
        if rows < SAMPLE_ROWS or end is None:
            return IdList(rows, ids)
        return IdList(rows * (end - first + 1) // (last - first + 1) // DENSITY)

    def must_scan(self, db: Connection, ids: Select[Any]) -> bool:
        return "UNION" in str(ids)

    def sortable(
        self, column_: ColumnElement[Any]
    ) -> tuple[ColumnElement[str], tuple[ColumnElement[bool], ...]]:
        return column_, ()

    def allow_unordered(self, db: Connection) -> None:
        """Do nothing: SQLite reads such indexes for the statements that need them."""

    def with_words(
        self, tables: ReadModelTables, words: Sequence[Word], *, or_long: bool = False
    ) -> Select[Any]:
        return _matches(tables, "word_index", _query(words, or_long=or_long))

    def includes(self, text: ColumnElement[Any], part: str) -> ColumnElement[bool]:
        return func.instr(text, part) > 0

    def has_part(self, tables: ReadModelTables, part: str) -> ColumnElement[bool]:
        messages = tables.mailbox.c
        conditions = [self.includes(func.lower(messages[name]), part) for name in TEXT_HEADERS]
        if is_part_of_id(part):
            conditions.append(
                and_(_has_digits(messages.stream, part), self.includes(tables.message_id, part))
            )
        # A part of the JSON may be punctuation. Text with a quotation mark is in the column `text`.
        pairs = func.substr(messages.custom_headers, 3, func.length(messages.custom_headers) - 4)
        for mark in ('":"', '","'):
            pairs = func.replace(pairs, mark, "\n")
        headers = (func.lower(each) for each in (messages.custom_headers, pairs))
        conditions.append(and_(*(self.includes(each, part) for each in headers)))
        return case((messages.text.is_not(None), self.includes(messages.text, part)), else_=or_(*conditions))

    def has_words(self, tables: ReadModelTables, words: Sequence[Word]) -> ColumnElement[bool]:
        messages, text = tables.mailbox.c, tables.text.c
        # Not by the index, which would read the entries of a frequent word for each row.
        query = " ".join(word.text + "*" * word.is_prefix for word in words)
        own = select(text.words).where(text.id == messages.id).correlate(tables.mailbox).scalar_subquery()
        columns = [messages[name] for name in WORD_HEADERS]
        # This excludes most messages without a call of Python: the words of a message without a text of its
        # own are parts of its headers, with ASCII letters in lower case.
        headers: ColumnElement[str] = func.coalesce(messages.custom_headers, "")
        for column_ in columns:
            headers = headers.concat(" ").concat(func.coalesce(column_, ""))
        lower = func.lower(headers)
        lacks = or_(*(func.instr(lower, word.text) == 0 for word in words))
        return case(
            (and_(messages.text.is_(None), lacks, own.is_(None)), False),
            else_=func.has_words(query, own, messages.custom_headers, *columns) == 1,
        )


def _has_digits(stream: ColumnElement[bytes], part: str) -> ColumnElement[bool]:
    """Return whether a stream id may have a part, by the bytes of its digits at both alignments."""
    digits = part.replace("-", "")
    whole = {bytes.fromhex(digits[at : at + (len(digits) - at) // 2 * 2]) for at in (0, 1)}
    return or_(*(func.instr(stream, each) > 0 for each in sorted(whole)))


def _has_words(query: str, words: str | None, custom_headers: str | None, *headers: str | None) -> bool:
    """Return whether a message has words: among the stored ones, or else among the words of its headers."""
    if words is None:
        custom = _decode_headers(custom_headers) if custom_headers else {}
        words = " ".join(tokenize("\n".join(filter(None, (*headers, *custom, *custom.values())))))
    return has_words({*words.split()}, _parse_query(query))


@lru_cache(maxsize=64)
def _parse_query(query: str) -> tuple[Word, ...]:
    return tuple(Word(each.rstrip("*"), each.endswith("*")) for each in query.split())


def _matches(tables: ReadModelTables, name: str, query: str) -> Select[Any]:
    index = table(tables.name(name), column("rowid"))
    return select(index.c.rowid).where(literal_column(index.name).op("MATCH")(query))


def _query(words: Sequence[Word], *, or_long: bool) -> str:
    query = " AND ".join(_quoted(word.text) + (" *" if word.is_prefix else "") for word in words)
    return f"({query}) OR {_quoted(LONG_TEXT)}" if or_long else query


def _quoted(term: str) -> str:
    return '"' + term.replace('"', '""') + '"'
