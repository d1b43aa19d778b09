"""Backlog, dead letters and activity as SQL, in keyset pages."""

from collections.abc import Iterator
from typing import Any

import msgspec
from sqlalchemy import BigInteger, ColumnElement, Select, Table, and_, func, literal, or_, select, tuple_

from postroom.adapters.sql.search import Dialect
from postroom.adapters.sql.tables import ReadModelTables
from postroom.application.ports.read_models import (
    ActivityFilter,
    ActivityPlace,
    BacklogFilter,
    DeadLetterFilter,
    Place,
)
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


def activity_page(
    wanted: ActivityFilter, tables: ReadModelTables, topics: list[str] | None, dialect: Dialect
) -> Select[Any]:
    """Return the statement for a page of activity over all mailboxes, the latest first, and one row more."""
    table = tables.activity
    key = (table.c.starts_at, table.c.topic, table.c.event)
    counted = (func.sum(table.c.events), func.min(table.c.first_at), func.max(table.c.last_at))
    rows = select(*key, *counted).where(*_common(wanted, table, topics, dialect))
    rows = rows.where(table.c.period == wanted.period).group_by(*key)
    rows = rows.order_by(table.c.starts_at.desc(), table.c.topic, table.c.event)
    if wanted.since is not None:
        rows = rows.where(table.c.starts_at >= wanted.since)
    if wanted.until is not None:
        rows = rows.where(table.c.starts_at < wanted.until)
    if wanted.cursor is not None:
        after = ActivityPlace.decode(wanted.cursor)
        starts_at, *others = (
            literal(part, column.type)
            for part, column in zip(msgspec.structs.astuple(after), key, strict=True)
        )
        later_in_it = and_(table.c.starts_at == starts_at, tuple_(*key[1:]) > tuple_(*others))
        rows = rows.where(or_(table.c.starts_at < starts_at, later_in_it))
    return rows.limit(wanted.limit + 1)


def _common(
    wanted: ActivityFilter | BacklogFilter | DeadLetterFilter,
    table: Table,
    topics: list[str] | None,
    dialect: Dialect,
) -> Iterator[ColumnElement[bool]]:
    if wanted.mailbox is not None:
        yield table.c.mailbox == wanted.mailbox
    if topics is not None:
        yield dialect.among(table.c.topic, topics)
