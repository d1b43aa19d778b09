"""The read models port over the tables of a PostgreSQL store."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import psycopg
from sqlalchemy import (
    ClauseElement,
    ColumnElement,
    Connection,
    Executable,
    Select,
    Text,
    TypeDecorator,
    and_,
    any_,
    cast,
    create_engine,
    event,
    func,
    literal,
    literal_column,
    or_,
    select,
    type_coerce,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY, TSQUERY
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.types import UserDefinedType

from postroom.adapters.postgres.columns import ESCAPE, INDEXED_BYTES, INDEXED_CHARS, escape, unescape
from postroom.adapters.postgres.database import connect, follow_lock, lock_name, set_locally
from postroom.adapters.postgres.errors import describe, is_lost, shown
from postroom.adapters.postgres.url import DEFAULT_SCHEMA, schema_of
from postroom.adapters.sql.ddl import POSTGRES
from postroom.adapters.sql.log_reader import envelopes_at
from postroom.adapters.sql.read_models import OpenArchive, SqlReadModels
from postroom.adapters.sql.search import IdList, word_substring
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.tables import ReadModelTables, read_heads
from postroom.domain.errors import Unavailable, UnusableServer
from postroom.domain.search import IDS
from postroom.domain.tokenizer import Word
from postroom.projections.incremental import Cursor, Head
from postroom.projections.plan import FORMAT
from postroom.projections.search_text import LONG_TEXT, indexed_parts, is_part_of_id

_SETTINGS = {
    "statement_timeout": "60s",
    # Custom plans use the values of each query, and cost little.
    "plan_cache_mode": "force_custom_plan",
    # Estimates of combined conditions are rough: without this, all rows of an index may be read and sorted
    # for a page.
    "enable_bitmapscan": "off",
    # Joins of sorted or hashed tables may read all rows of a table before the page begins.
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    # Workers start as late as most searches end.
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
}
INDEXED_BY_PREFIX = ("name", "value")
"""Columns whose text may exceed the size of an index entry, and is indexed by its first characters."""
INDEXED_IF_SHORT = ("principal", "correlation_id", "trace_id", "namespace")
"""Columns whose text may exceed the size of an index entry, and is in a B-tree if it does not."""

_ACTIVE = "active version"
"""Where a pooled connection has the row of the version that is active in its transaction."""
_PLANNED_ROWS = re.compile(r"rows=(\d+)")

_SQL = statements("postroom.adapters.postgres", "read_models.sql", format=FORMAT)


class PostgresReadModels(SqlReadModels):
    """Queries on a PostgreSQL database; each call reads one snapshot, and the first one connects.

    Arguments:
        url: URL of the store's database.

    Raises: InvalidRequest for a malformed URL.
    """

    def __init__(self, url: str, open_archive: OpenArchive | None = None) -> None:
        super().__init__(shown(url), _PostgresDialect(), open_archive)
        self._url = url
        engine = create_engine("postgresql+psycopg://", creator=self._connect)
        event.listen(engine, "checkout", self._begin)
        self._engine = engine.execution_options(schema_translate_map={None: schema_of(url) or DEFAULT_SCHEMA})

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._engine.dispose()

    def _connect(self) -> "psycopg.Connection[tuple[Any, ...]]":
        return connect(self._url, "postroom search", _SETTINGS)

    def _begin(self, connection: "psycopg.Connection[tuple[Any, ...]]", record: Any, _: object) -> None:
        """Begin a transaction by reading the active version, in one round trip.

        Raises: DisconnectionError when the server ended an idle connection, which then is replaced.
        """
        is_idle = _ACTIVE in record.info
        try:
            with connection.pipeline():
                connection.execute(_SQL["begin"])
                set_locally(connection)
                version = connection.execute(_SQL["active"])
        except psycopg.OperationalError as error:
            if is_idle and is_lost(error):
                raise DisconnectionError from error
            raise
        record.info[_ACTIVE] = version.fetchone()

    def _exists(self) -> bool:
        return True

    def _active(self, db: Connection) -> tuple[int, str | None] | None:
        version: tuple[int, str | None] | None = db.info[_ACTIVE]
        return version

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as db:
                yield db
        except DBAPIError as error:
            raise self._unavailable(error.orig) from error
        except psycopg.Error as error:
            raise self._unavailable(error) from error

    def _prepare_scan(self, db: Connection) -> None:
        db.exec_driver_sql(_SQL["prepare_scan"])

    def _unavailable(self, error: object) -> Unavailable:
        assert isinstance(error, psycopg.Error)
        is_cursor = isinstance(error, psycopg.errors.UndefinedColumn) and "projection_cursor" in str(error)
        if is_cursor or isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName):
            return UnusableServer(
                f"The database {self._shown} lacks tables of this version of Postroom; run "
                "`postroom migrate --store URL` as a user who may create tables."
            )
        if isinstance(error, psycopg.errors.UndefinedColumn):
            return Unavailable(
                f"The read models {self._shown} were built by an earlier version of Postroom; rebuild them "
                "with `postroom views rebuild`."
            )
        return describe(error, self._url)

    def _size(self, db: Connection) -> int:
        return int(db.exec_driver_sql(_SQL["size"]).scalar_one())

    def log_heads(self, cursors: Mapping[int, Cursor]) -> list[Head]:
        """Return the ends of the mailbox logs; see `SqlReadModels.log_heads`."""
        tables = {"log": "postroom.log", "mailbox_names": "postroom.mailbox_names"}
        with self._transaction() as db:
            return read_heads(lambda statement: [*map(tuple, db.exec_driver_sql(statement))], tables, cursors)

    def log_envelopes(self, db: Connection | None, places: Sequence[int]) -> dict[int, bytes]:
        """Return the envelopes that the log has; see `SqlReadModels.log_envelopes`."""
        with self._transaction() if db is None else nullcontext(db) as reading:
            rows = reading.exec_driver_sql(_SQL["commits"], {"places": [*places]})
            return envelopes_at(places, map(tuple, rows))

    def log_time_after(self, mailbox: str, position: int) -> int | None:
        """Return the log time of a record; see `SqlReadModels.log_time_after`."""
        with self._transaction() as db:
            after = {"mailbox": escape(mailbox), "position": position}
            at = db.exec_driver_sql(_SQL["at"], after).scalar_one_or_none()
            return None if at is None else int(at)

    def is_following(self, target: str = "") -> bool:
        """Return whether a follower holds its lock; see `SqlReadModels.is_following`."""
        return self._is_locked(follow_lock(self._url, target))

    def _is_rebuild_running(self) -> bool:
        return self._is_locked(lock_name(self._url, "rebuild"))

    def _is_locked(self, lock: str) -> bool:
        with self._transaction() as db:
            return bool(db.exec_driver_sql(_SQL["is_locked"], {"lock": lock}).scalar_one())


class StoredText(TypeDecorator[str]):
    """Text with the characters escaped that PostgreSQL can't store."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: object) -> str | None:
        """Return escaped text."""
        return None if value is None else escape(value)

    def result_processor(self, dialect: object, coltype: object) -> Callable[[str | None], str | None]:
        """Return the function that unescapes text; a page has more than a thousand values."""
        return _unescape_value


class _Integers(UserDefinedType[Any]):
    """An array, which the client sends as a list, or as the text that the server returned."""

    cache_ok = True
    render_bind_cast = True

    def get_col_spec(self, **_: Any) -> str:
        return "BIGINT[]"

    def bind_processor(self, dialect: object) -> Callable[[Any], list[int] | str]:
        return lambda ids: ids if isinstance(ids, str) else list(ids)


class _Explain(Executable, ClauseElement):
    """The statement that returns the plan of a query."""

    inherit_cache = False

    def __init__(self, statement: Select[Any]) -> None:
        self.statement = statement


@compiles(_Explain)
def _compile_explain(element: _Explain, compiler: SQLCompiler, **options: Any) -> str:
    return f"EXPLAIN {compiler.process(element.statement, **options)}"


class _PostgresDialect:
    """Lookups by arrays, and text search by indexes of trigrams and of words; see `Dialect`."""

    text = StoredText
    stream_text = POSTGRES.stream_text

    def equals(self, column: ColumnElement[Any], value: str) -> ColumnElement[bool]:
        if column.key in INDEXED_IF_SHORT and _fits(value):
            return (column == value) & _is_short(column)
        if column.key not in INDEXED_BY_PREFIX:
            return column == value
        stored = escape(value)
        starts = _indexed_prefix(column) == stored[:INDEXED_CHARS]
        return starts if len(stored) < INDEXED_CHARS else starts & (column == value)

    def among(self, column: ColumnElement[Any], values: Sequence[str]) -> ColumnElement[bool]:
        is_any: ColumnElement[bool] = column == any_(literal(list(values), ARRAY(StoredText)))
        is_indexed = column.key in INDEXED_IF_SHORT and all(map(_fits, values))
        return is_any & _is_short(column) if is_indexed else is_any

    def is_any(self, column: ColumnElement[Any], ids: Sequence[int] | str) -> ColumnElement[bool]:
        has_id: ColumnElement[bool] = column == any_(literal(ids, _Integers()))
        return has_id

    def as_list(self, ids: ColumnElement[int]) -> ColumnElement[Any]:
        return cast(func.array_agg(ids), Text)

    def contains(self, column: ColumnElement[Any], text: str) -> ColumnElement[bool]:
        # Columns have the collation C, in which only ASCII letters have a case.
        part = literal(text, StoredText).collate("C")
        return func.strpos(func.lower(column, type_=Text), func.lower(part, type_=Text)) > 0

    def with_parts(self, tables: ReadModelTables, parts: Sequence[str]) -> Select[Any]:
        # By the trigram index if pg_trgm is installed, else by a scan of the narrow table `text`.
        text, indexed = tables.text.c, indexed_parts(parts)
        matches = select(text.id).where(*(text.text.contains(part, autoescape=True) for part in indexed))
        if not is_part_of_id(indexed[0]):
            return matches
        messages, part = tables.mailbox.c, indexed[0]
        in_stream = func.strpos(func.encode(messages.stream, "hex"), part.replace("-", "")) > 0
        rows = select(messages.id).where(
            or_(in_stream, *(self.includes(messages[each], part) for each in IDS))
        )
        return select(union_all(matches, rows).subquery().c.id)

    def few_with_words(
        self, db: Connection, tables: ReadModelTables, words: Sequence[Word], *, or_long: bool = False
    ) -> IdList:
        query = {"words": _lexemes(words, or_long=or_long)}
        plan = db.exec_driver_sql(_SQL["plan_of_words"].format(text=tables.name("text")), query).scalar()
        rows = _PLANNED_ROWS.search(str(plan))
        return IdList(int(rows[1]) if rows else 0)

    def must_scan(self, db: Connection, ids: Select[Any]) -> bool:
        self.allow_unordered(db)
        return any("Seq Scan" in line for line in db.scalars(_Explain(ids)))

    def sortable(
        self, column: ColumnElement[Any]
    ) -> tuple[ColumnElement[str], tuple[ColumnElement[bool], ...]]:
        if column.key in INDEXED_BY_PREFIX:
            return type_coerce(_indexed_prefix(column), StoredText), ()
        return column, (_is_short(column),) if column.key in INDEXED_IF_SHORT else ()

    def allow_unordered(self, db: Connection) -> None:
        db.exec_driver_sql(_SQL["allow_bitmap_scans"])

    def with_words(
        self, tables: ReadModelTables, words: Sequence[Word], *, or_long: bool = False
    ) -> Select[Any]:
        # A cast instead of to_tsquery, which would parse and stem words.
        text = tables.text.c
        lexemes = func.array_to_tsvector(
            func.array_remove(func.string_to_array(text.words, literal_column("' '")), literal_column("''"))
        )
        return select(text.id).where(lexemes.op("@@")(cast(_lexemes(words, or_long=or_long), TSQUERY)))

    def includes(self, text: ColumnElement[Any], part: str) -> ColumnElement[bool]:
        return func.strpos(text, literal(part, StoredText)) > 0

    def has_part(self, tables: ReadModelTables, part: str) -> ColumnElement[bool]:
        is_in_ids = self.includes(self._ids(tables), part)
        is_in_text = self._of_text(tables, self.includes(tables.text.c.text, part))
        return is_in_ids | is_in_text if is_part_of_id(part) else is_in_text

    def has_words(self, tables: ReadModelTables, words: Sequence[Word]) -> ColumnElement[bool]:
        column = tables.text.c.words
        return self._of_text(tables, and_(*(self.includes(column, word_substring(word)) for word in words)))

    def _of_text(self, tables: ReadModelTables, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        # Not EXISTS, which a database may turn into a join that begins with a scan of all texts.
        is_match = select(condition).where(tables.text.c.id == tables.mailbox.c.id)
        return is_match.correlate(tables.mailbox).scalar_subquery()

    def _ids(self, tables: ReadModelTables) -> ColumnElement[str]:
        ids = (tables.mailbox.c[name] for name in IDS[1:])
        return func.concat_ws("\n", tables.message_id, *ids, type_=StoredText)


def _lexemes(words: Sequence[Word], *, or_long: bool) -> str:
    query = " & ".join(f"'{word.text}'{':*' if word.is_prefix else ''}" for word in words)
    return f"({query}) | '{LONG_TEXT}'" if or_long else query


def _unescape_value(value: str | None) -> str | None:
    return unescape(value) if value is not None and ESCAPE in value else value


def _fits(value: str) -> bool:
    return len(escape(value).encode()) <= INDEXED_BYTES


def _is_short(column: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition of the partial indexes on a column, as their definition spells it."""
    return func.octet_length(column) <= literal_column(str(INDEXED_BYTES))


def _indexed_prefix(column: ColumnElement[Any]) -> ColumnElement[str]:
    return func.left(column, literal_column(str(INDEXED_CHARS)), type_=Text)
