"""SQLAlchemy on ClickHouse: types, an engine, and searches by one scan of the columns.

ClickHouse has no index in search order, and reads a column of all messages quickly: one scan checks all
conditions, and is the only access path.
"""

from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import Any

from clickhouse_connect import dbapi
from clickhouse_connect.cc_sqlalchemy.datatypes.sqltypes import Nullable, String
from clickhouse_connect.cc_sqlalchemy.dialect import ClickHouseDialect
from clickhouse_connect.cc_sqlalchemy.sql.compiler import ChStatementCompiler
from clickhouse_connect.dbapi.connection import Connection as DriverConnection
from sqlalchemy import ColumnElement, Engine, LargeBinary, TypeDecorator, func, make_url, select
from sqlalchemy.pool import QueuePool

from postroom.adapters.clickhouse.database import Client
from postroom.adapters.sql.search import Branch, Lead, SearchQuery

ALL = "all"
"""Field of the access path whose conditions are all those of the filter."""


class NullableText(TypeDecorator[str]):
    """Text or NULL: types of ClickHouse exclude NULL unless they say otherwise."""

    impl = Nullable(String)
    cache_ok = True


class Blob(TypeDecorator[bytes]):
    """Bytes, read in base64, because the driver decodes strings as text."""

    impl = LargeBinary
    cache_ok = True

    def column_expression(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return the expression that is selected."""
        return func.base64Encode(column, type_=self)

    def result_processor(self, dialect: object, coltype: object) -> Callable[[str | None], bytes | None]:
        """Return the function that decodes a value."""
        return lambda value: None if value is None else b64decode(value)


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
        messages, header = self._messages.c, self._tables.header.c
        for field, values in self._values.items():
            yield self.dialect.among(messages[field], values)
        for name, value in self._filter.headers.items():
            yield messages.id.in_(select(header.id).where(header.name == name, header.value == value))
        with_parts = self.dialect.with_parts(self._tables, self._filter.parts)
        if with_parts is not None:
            yield messages.id.in_(with_parts)
        if self._words:
            yield messages.id.in_(self.dialect.with_words(self._tables, self._words))
