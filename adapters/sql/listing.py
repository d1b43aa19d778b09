"""Backlog and dead letters as SQL, in keyset pages."""

from collections.abc import Iterator
from typing import Any

import msgspec
from sqlalchemy import BigInteger, ColumnElement, Select, Table, literal, select, tuple_

from postroom.adapters.sql.search import Dialect
from postroom.adapters.sql.tables import ReadModelTables
from postroom.application.ports.read_models import BacklogFilter, DeadLetterFilter, Place
from postroom.domain.search import Cursor


def backlog_page(
    wanted: BacklogFilter, tables: ReadModelTables, topics: list[str] | None, dialect: Dialect
) -> Select[Any]:
    """Return the statement for a page of backlog and one row more."""
    table = tables.backlog
    key = (table.c.mailbox, table.c.topic, table.c.shard)
    rows = select(table).where(*_common(wanted, table, topics, dialect)).order_by(*key)
    if wanted.cursor is not None:
        after = Place.decode(wanted.cursor)
        parts = zip(msgspec.structs.astuple(after), key, strict=True)
        rows = rows.where(tuple_(*key) > tuple_(*(literal(part, column.type) for part, column in parts)))
    return rows.limit(wanted.limit + 1)


def dead_letter_page(
    wanted: DeadLetterFilter, tables: ReadModelTables, topics: list[str] | None, dialect: Dialect
) -> Select[Any]:
    """Return the statement for a page of dead letters, those that died last first, and one row more."""
    table = tables.dead_letters
    key = (table.c.last_seen, table.c.id)
    rows = select(table).where(*_common(wanted, table, topics, dialect))
    rows = rows.order_by(*(part.desc() for part in key))
    if wanted.reason is not None:
        rows = rows.where(table.c.reason == wanted.reason)
    if wanted.fingerprint is not None:
        rows = rows.where(table.c.fingerprint == wanted.fingerprint)
    if wanted.cursor is not None:
        after = Cursor.decode(wanted.cursor)
        rows = rows.where(
            tuple_(*key) < tuple_(literal(after.timestamp, BigInteger), literal(after.id, BigInteger))
        )
    return rows.limit(wanted.limit + 1)


def _common(
    wanted: BacklogFilter | DeadLetterFilter, table: Table, topics: list[str] | None, dialect: Dialect
) -> Iterator[ColumnElement[bool]]:
    if wanted.mailbox is not None:
        yield table.c.mailbox == wanted.mailbox
    if topics is not None:
        yield dialect.among(table.c.topic, topics)
