"""Queries on backlog and activity with keyset pagination, and the distinct values of an indexed column."""

from collections.abc import Collection, Iterator
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, FromClause, Select, and_, func, literal, or_, select, tuple_

from postroom.adapters.sql.search import Dialect
from postroom.adapters.sql.tables import ReadModelTables
from postroom.application.ports.dead_letters import DeadLetterFilter
from postroom.application.ports.read_models import (
    ActivityCursor,
    ActivityFilter,
    BacklogCursor,
    BacklogFilter,
)


def backlog_page(
    filter_: BacklogFilter, tables: ReadModelTables, topics: Collection[str] | None, dialect: Dialect
) -> Select[Any]:
    """Return the statement for a page of the backlog plus one row."""
    table = tables.backlog
    key = (table.c.mailbox, table.c.topic, table.c.shard)
    rows = select(table).where(*common_conditions(filter_, table, topics, dialect)).order_by(*key)
    if filter_.cursor is not None:
        after = BacklogCursor.decode(filter_.cursor)
        parts = zip(msgspec.structs.astuple(after), key, strict=True)
        rows = rows.where(tuple_(*key) > tuple_(*(literal(part, column.type) for part, column in parts)))
    return rows.limit(filter_.limit + 1)


def activity_page(
    filter_: ActivityFilter, tables: ReadModelTables, topics: Collection[str] | None, dialect: Dialect
) -> Select[Any]:
    """Return the statement for a page of activity over all mailboxes, newest first, plus one row."""
    table = tables.activity
    key = (table.c.starts_at, table.c.topic, table.c.event)
    sums = (func.sum(table.c.events), func.min(table.c.first_at), func.max(table.c.last_at))
    rows = select(*key, *sums).where(*common_conditions(filter_, table, topics, dialect))
    rows = rows.where(table.c.period == filter_.period).group_by(*key)
    rows = rows.order_by(table.c.starts_at.desc(), table.c.topic, table.c.event)
    if filter_.since is not None:
        rows = rows.where(table.c.starts_at >= filter_.since)
    if filter_.until is not None:
        rows = rows.where(table.c.starts_at < filter_.until)
    if filter_.cursor is not None:
        after = ActivityCursor.decode(filter_.cursor)
        starts_at, *others = (
            literal(part, column.type)
            for part, column in zip(msgspec.structs.astuple(after), key, strict=True)
        )
        same_period = and_(table.c.starts_at == starts_at, tuple_(*key[1:]) > tuple_(*others))
        rows = rows.where(or_(table.c.starts_at < starts_at, same_period))
    return rows.limit(filter_.limit + 1)


def common_conditions(
    filter_: ActivityFilter | BacklogFilter | DeadLetterFilter,
    table: FromClause,
    topics: Collection[str] | None,
    dialect: Dialect,
) -> Iterator[ColumnElement[bool]]:
    """Yield the conditions that all of these filters have."""
    if filter_.mailbox is not None:
        yield table.c.mailbox == filter_.mailbox
    if topics is not None:
        yield dialect.among(table.c.topic, list(topics))


def distinct_values(column: ColumnElement[Any], start: str, limit: int, dialect: Dialect) -> Select[Any]:
    """Return the statement for the first distinct values of an indexed column from a text on.

    Each step finds the next value in the index, however many rows have the same.
    """
    value, conditions = dialect.sortable(column)

    def following(condition: ColumnElement[bool]) -> Any:
        return select(value).where(condition, *conditions).order_by(value).limit(1).scalar_subquery()

    step = select(following(value >= start).label("value"), literal(1).label("number"))
    values = step.cte("distinct_values", recursive=True)
    values = values.union_all(
        select(following(value > values.c.value), values.c.number + 1).where(
            values.c.value.is_not(None), values.c.number < limit
        )
    )
    return select(values.c.value).where(values.c.value.is_not(None))
