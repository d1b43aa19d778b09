"""The read models port over a database of ClickHouse (RFC-037's ClickHouse phase)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from clickhouse_connect import dbapi
from clickhouse_connect.cc_sqlalchemy.datatypes.sqltypes import Nullable, String
from clickhouse_connect.cc_sqlalchemy.dialect import ClickHouseDialect
from clickhouse_connect.cc_sqlalchemy.sql.compiler import ChStatementCompiler
from clickhouse_connect.dbapi.connection import Connection as DriverConnection
from clickhouse_connect.driver.exceptions import ClickHouseError
from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    FromClause,
    Select,
    TypeDecorator,
    create_engine,
    func,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool, StaticPool

from postroom.adapters.clickhouse.database import (
    SQL,
    ClickHouseDatabase,
    Client,
    ended,
    read_frames,
)
from postroom.adapters.files import is_file_locked
from postroom.adapters.sql.access_path import choose
from postroom.adapters.sql.read_models import AnyRow, QueriedLog, SqlReadModels
from postroom.adapters.sql.search import Branch, IdList, Lead, SearchQuery, word_substring
from postroom.adapters.sql.statistics import AccessPath, facet_values
from postroom.adapters.sql.tables import MESSAGE_COLUMNS, ReadModelTables
from postroom.application.ports.facets import FACET_VALUES, FacetField
from postroom.application.ports.read_models import ContextBacklog
from postroom.domain.errors import NotFound, Unavailable
from postroom.domain.search import EventFilter
from postroom.domain.tokenizer import Word
from postroom.projections.fold import MESSAGES
from postroom.projections.incremental import Cursor, Head
from postroom.projections.models.messages import PROJECTION
from postroom.projections.projection import load_projections

ALL = "all"
"""Field of the access path that covers all conditions of the filter."""


class NullableText(TypeDecorator[str]):
    """Text or NULL: types of ClickHouse exclude NULL unless they say otherwise."""

    impl = Nullable(String)
    cache_ok = True


class _Compiler(ChStatementCompiler):
    def visit_floordiv_binary(self, binary: Any, operator: object, **options: Any) -> str:
        left, right = (self.process(each, **options) for each in (binary.left, binary.right))
        return f"intDiv({left}, {right})"  # `/` divides floating-point numbers


class _Dialect(ClickHouseDialect):
    statement_compiler = _Compiler
    supports_statement_cache = False


class _Connection(DriverConnection):
    """A connection of the DB-API over a client that exists."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.timezone = client.server_tz


def open_engine(connect: Callable[[], Client]) -> Engine:
    """Return an engine with a client for each connection.

    Arguments:
        connect: returns a client.
    """

    def create() -> Any:
        return _Connection(connect())

    dialect = _Dialect(dbapi=dbapi)
    pool = QueuePool(create, dialect=dialect)
    return Engine(pool, dialect, make_url("clickhousedb://"))


class ScanQuery(SearchQuery):
    """The statements for one filter, whose only access path has all conditions."""

    def leads(self) -> list[Any]:
        """Return the access path with all conditions."""
        return [Lead(ALL, [Branch(self._messages, tuple(self._conditions()))])]

    def _checks(self, lead: Lead) -> Iterator[ColumnElement[bool]]:
        if lead.field != ALL:
            yield from self._conditions()

    def _conditions(self) -> Iterator[ColumnElement[bool]]:
        messages, tables = self._messages.c, self._tables
        header = tables.header.c
        for field, values in self._values.items():
            yield self.dialect.among(messages[field], values)
        for name, value in self.filter.headers.items():
            yield messages.id.in_(select(header.id).where(header.name == name, header.value == value))
        yield from (self.dialect.has_part(tables, part) for part in self.filter.parts)
        if self._words:
            yield self.dialect.has_words(tables, self._words)


SCAN_PAGE_ROWS = 500
_SCANNED = {name: PROJECTION.schema[name] for name in MESSAGE_COLUMNS}
_SNAPSHOT = "snapshot"


class _Snapshot(NamedTuple):
    """The rows that one call reads.

    Arguments:
        catalog: the catalog of versions.
        tables: the names of all tables.
    """

    catalog: Connection
    revision: int
    tables: frozenset[str]


class ClickHouseReadModels(SqlReadModels):
    """Queries on a database of ClickHouse; each call reads one revision of one version.

    Arguments:
        log: the logs of the store, and the backlog of the contexts.
    """

    def __init__(self, database: ClickHouseDatabase, log: QueriedLog) -> None:
        super().__init__(database.where, _SearchDialect(), log.open_archive)
        self._database = database
        self._log = log
        self._engine = open_engine(database.connect)

    def close(self) -> None:
        """Close the clients; idempotent."""
        self._engine.dispose()
        self._log.close()

    def contexts(self) -> tuple[ContextBacklog, ...]:
        """Return the backlog of the contexts; see `ReadModels.contexts`."""
        return self._log.contexts()

    def log_heads(self, cursors: Mapping[int, Cursor]) -> list[Head]:
        """Return the ends of the mailbox logs of the store; see `SqlReadModels.log_heads`."""
        return self._log.log_heads(cursors)

    def log_envelopes(self, db: Connection | None, places: Sequence[int]) -> dict[int, bytes]:
        """Return the envelopes that the log of the store has; see `SqlReadModels.log_envelopes`."""
        return self._log.log_envelopes(None, places)

    def log_time_after(self, mailbox: str, position: int) -> int | None:
        """Return the log time of a record; see `SqlReadModels.log_time_after`."""
        return self._log.log_time_after(mailbox, position)

    def _not_built(self) -> NotFound:
        return NotFound(
            f"There are no read models in {self._shown}; build them with `postroom views rebuild --into "
            f"{self._database.address}`."
        )

    def _exists(self) -> bool:
        return self._database.may_exist()

    @contextmanager
    def _connect(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as db:
                yield db
        except (DBAPIError, ClickHouseError) as error:
            reason = error.orig if isinstance(error, DBAPIError) else error
            raise self._database.unavailable(reason) from error

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self._connect() as db:
            tables = frozenset(db.scalars(text(SQL["names"]), {"database": self._database.name}))
            catalog = self._database.read_catalog(_client(db), tables)
            engine = create_engine("sqlite://", creator=lambda: catalog.connection, poolclass=StaticPool)
            try:
                with engine.connect() as connection:
                    db.info[_SNAPSHOT] = _Snapshot(connection, catalog.revision, tables)
                    yield db
            finally:
                engine.dispose()

    def _catalog(self, db: Connection) -> Connection:
        return _snapshot(db).catalog

    def _query(
        self, filter_: EventFilter, tables: ReadModelTables, topics: Mapping[str, int | None] | None
    ) -> ScanQuery:
        return ScanQuery(filter_, tables, topics, self._dialect)

    def _tables(self, db: Connection, version: int, models: str) -> ReadModelTables:
        snapshot = _snapshot(db)
        make = partial(self._rows, snapshot.revision)
        tables = ReadModelTables(version, models, NullableText, None, make)
        for model, number in tables.models.items():
            if ended(f"{model}_v{number}") not in snapshot.tables:
                raise Unavailable(
                    f"Version {version} of the read models {self._shown} was built by an earlier release; "
                    f"rebuild them with `postroom views rebuild --into {self._database.address}`."
                )
        return tables

    def _rows(self, revision: int, name: str, columns: Sequence[Column[Any]]) -> FromClause:
        """Return the rows of a table at a revision."""
        names = [column.name for column in columns]
        model, _, number = name.rpartition("_v")
        if model == "topic":
            messages = self._database.live(
                f"{MESSAGES}_v{number}", load_projections()[MESSAGES], revision=revision
            )
            query = SQL["topics"].format(rows=messages)
        elif model in load_projections():
            query = self._database.live(name, load_projections()[model], revision=revision, columns=names)
        else:
            query = SQL["all"].format(table=self._database.table(name), columns=", ".join(names))
        return text(query).columns(*columns).subquery(model)

    def _distinct(self, column: ColumnElement[Any], start: str, limit: int) -> Select[Any]:
        return select(column).where(column >= start).distinct().order_by(column).limit(limit)

    def _count_facets(
        self,
        db: Connection,
        path: AccessPath,
        tables: ReadModelTables,
        fields: Sequence[FacetField],
        cap: int,
    ) -> Iterator[Sequence[Any]]:
        """Yield rows of field, value and count by two scans, instead of two for each field."""
        values = facet_values(path, tables, fields, cap).subquery("matches")
        count = func.count().label("count")
        columns = [values.c[field.value] for field in fields]
        total, *distinct = db.execute(select(count, *map(func.uniqExact, columns))).one()
        yield "", None, total
        yield from ((field, None, number) for field, number in zip(fields, distinct, strict=True))
        pairs = (func.tuple(field.value, column) for field, column in zip(fields, columns, strict=True))
        pair = select(func.arrayJoin(func.array(*pairs)).label("pair")).subquery().c.pair
        field = func.tupleElement(pair, 1).label("field")
        value = func.tupleElement(pair, 2, type_=NullableText).label("value")
        top = select(field, value, count).where(value.is_not(None)).group_by(field, value)
        yield from db.execute(
            top.order_by(count.desc(), value).suffix_with(text(f"LIMIT {FACET_VALUES} BY field"))
        )

    def _prepare_scan(self, db: Connection) -> None:
        """Do nothing: statements have no timeout."""

    def _row_pages(self, db: Connection, query: SearchQuery) -> Iterator[Sequence[AnyRow]]:
        statement = query.all_rows(choose(db, query))
        compiled = statement.compile(dialect=db.dialect, compile_kwargs={"render_postcompile": True})
        # The driver's cursor would read the whole result before the first row.
        for rows in read_frames(_client(db), str(compiled), _SCANNED, compiled.params, SCAN_PAGE_ROWS):
            yield rows.rows()

    def _size(self, db: Connection) -> int:
        return int(db.scalar(text(SQL["size"]), {"database": self._database.name}) or 0)

    def is_following(self, target: str = "") -> bool:
        """Return whether a follower holds its lock; see `SqlReadModels.is_following`."""
        return self._log.is_following(target or self._database.where)

    def _is_rebuild_running(self) -> bool:
        return is_file_locked(self._database.staging.with_name(f"{self._database.staging.name}-lock"))


def _client(db: Connection) -> Client:
    return db.connection.dbapi_connection.client  # type: ignore[union-attr]


def _snapshot(db: Connection) -> _Snapshot:
    snapshot: _Snapshot = db.info[_SNAPSHOT]
    return snapshot


class _SearchDialect:
    """Conditions on columns; see `Dialect`."""

    text = NullableText
    stream_text = None

    def equals(self, column: ColumnElement[Any], value: str) -> ColumnElement[bool]:
        return column == value

    def among(self, column: ColumnElement[Any], values: Sequence[str]) -> ColumnElement[bool]:
        return column.in_(values)

    def is_any(self, column: ColumnElement[Any], ids: Sequence[int] | str) -> ColumnElement[bool]:
        return column.in_(ids)

    def as_list(self, ids: ColumnElement[int]) -> ColumnElement[Any]:
        return func.groupArray(ids)

    def contains(self, column: ColumnElement[Any], text: str) -> ColumnElement[bool]:
        return func.position(func.lower(column), func.lower(text)) > 0

    def with_parts(self, tables: ReadModelTables, parts: Sequence[str]) -> Select[Any]:
        return _with_texts(tables, tables.text.c.text, parts)

    def with_words(
        self, tables: ReadModelTables, words: Sequence[Word], *, or_long: bool = False
    ) -> Select[Any]:
        return _with_texts(tables, tables.text.c.words, map(word_substring, words))

    def includes(self, text: ColumnElement[Any], part: str) -> ColumnElement[bool]:
        return func.position(text, part) > 0

    def has_part(self, tables: ReadModelTables, part: str) -> ColumnElement[bool]:
        return tables.mailbox.c.id.in_(self.with_parts(tables, [part]))

    def has_words(self, tables: ReadModelTables, words: Sequence[Word]) -> ColumnElement[bool]:
        return tables.mailbox.c.id.in_(self.with_words(tables, words))

    def few_with_words(
        self, db: Connection, tables: ReadModelTables, words: Sequence[Word], *, or_long: bool = False
    ) -> IdList:
        return IdList(0)

    def must_scan(self, db: Connection, ids: Select[Any]) -> bool:
        return False

    def sortable(
        self, column: ColumnElement[Any]
    ) -> tuple[ColumnElement[str], tuple[ColumnElement[bool], ...]]:
        return column, ()

    def allow_unordered(self, db: Connection) -> None:
        """Do nothing: a scan has no order."""


def _with_texts(tables: ReadModelTables, column: ColumnElement[Any], texts: Iterable[str]) -> Select[Any]:
    return select(tables.text.c.id).where(*(func.position(column, each) > 0 for each in texts))
