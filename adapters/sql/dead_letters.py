"""Lists from the read models in pages: dead letters and their groups, backlog, activity."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Select,
    and_,
    func,
    literal,
    or_,
    select,
    tuple_,
)

from postroom.adapters.sql.search import Dialect
from postroom.adapters.sql.tables import ReadModelTables
from postroom.application.page import Page
from postroom.application.ports import dead_letters as port
from postroom.application.ports.dead_letters import (
    GROUP_FIELDS,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    DeadLetterGroupFilter,
    DeadLetterGroupPage,
    DeadLettering,
    GroupCursor,
)
from postroom.application.ports.read_models import (
    ActivityCursor,
    ActivityFilter,
    BacklogCursor,
    BacklogFilter,
)
from postroom.domain.search import Cursor


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


_decode_lineage = msgspec.json.Decoder(tuple[DeadLettering, ...]).decode

Key = tuple[str, ...]
"""The values that the dead letters of a group have in common."""


class _Extent(NamedTuple):
    """The log times, in µs, of the first and the last dead-lettering that is read.

    Arguments:
        is_whole: whether no earlier one is left out.
    """

    first: int
    last: int
    is_whole: bool


class DeadLetterQuery:
    """The statements for one filter of dead letters on one version of the read models.

    Arguments:
        topics: the topics that match the filter's names and globs; None when it has none.
    """

    def __init__(
        self,
        filter_: DeadLetterFilter,
        tables: ReadModelTables,
        topics: Collection[str] | None,
        dialect: Dialect,
    ) -> None:
        self._filter = filter_
        self._table = tables.dead_letters
        self._topics = topics
        self._dialect = dialect

    def read_page(self, db: Connection) -> Page[DeadLetter]:
        """Return a page of dead letters, newest first."""
        limit, table = self._filter.limit, self._table
        statement = self._newest_first(select(table).where(*self._conditions()))
        if self._filter.cursor is not None:
            after = Cursor.decode(self._filter.cursor)
            last = tuple_(literal(after.timestamp, BigInteger), literal(after.id, BigInteger))
            statement = statement.where(tuple_(table.c.last_seen, table.c.id) < last)
        rows = db.execute(statement.limit(limit + 1)).all()
        items = tuple(map(_dead_letter, rows[:limit]))
        more = len(rows) > limit
        return Page(items, Cursor(items[-1].last_seen, items[-1].id).encode() if more else None)

    def read_groups(self, db: Connection, filter_: DeadLetterGroupFilter) -> DeadLetterGroupPage:
        """Return a page of groups; see `DeadLetters.dead_letter_groups`."""
        after = None if filter_.cursor is None else GroupCursor.decode(filter_.cursor)
        extent = self._extent(db)
        if extent is None:
            return DeadLetterGroupPage(())
        rows = db.execute(self._groups(filter_, extent, after)).all()
        shown = rows[: filter_.limit]
        start = extent.first if filter_.since is None or not extent.is_whole else filter_.since
        end = extent.last + 1 if filter_.until is None else filter_.until
        width = max(1, -(-(end - start) // max(1, filter_.bars)))
        keys = [tuple(getattr(row, name) for name in filter_.by) for row in shown]
        trends = self._trends(db, filter_, extent, keys, start, width)
        samples = self._samples(db, [row.sample for row in shown])
        items = tuple(
            DeadLetterGroup(
                _common_value(row, "topic"),
                _common_value(row, "reason"),
                _common_value(row, "fingerprint"),
                row.letters,
                row.first_seen,
                row.last_seen,
                trends[key],
                samples[row.sample],
            )
            for row, key in zip(shown, keys, strict=True)
        )
        more = len(rows) > filter_.limit
        return DeadLetterGroupPage(
            items,
            letters=int(rows[0].all_letters) if rows else 0,
            groups=int(rows[0].all_groups) if rows else 0,
            since=None if extent.is_whole else extent.first,
            start=start,
            width=width,
            next_cursor=GroupCursor(shown[-1].rank, shown[-1].sample).encode() if more else None,
        )

    def _extent(self, db: Connection) -> _Extent | None:
        """Return the columns of the dead letters within the filter's times, or None without dead letters."""
        table = self._table
        times = self._newest_first(select(table.c.last_seen).where(*self._times()))
        last = db.scalar(times.limit(1))
        if last is None:
            return None
        most = port.MAX_GROUPED
        edge = db.scalars(times.offset(most - 1).limit(2)).all()
        if len(edge) == 2:
            return _Extent(edge[0], last, False)
        first = db.scalar(select(func.min(table.c.last_seen)).where(*self._times()))
        return _Extent(last if first is None else first, last, True)

    def _groups(
        self, filter_: DeadLetterGroupFilter, extent: _Extent, after: GroupCursor | None
    ) -> Select[Any]:
        """Return the statement for a page of groups plus one row."""
        c = self._table.c
        letters, last_seen = func.count(), func.max(c.last_seen)
        others = [c[name] for name in GROUP_FIELDS if name not in filter_.by]
        groups = (
            select(
                *(c[name] for name in filter_.by),
                *(func.min(column).label(f"{column.name}_min") for column in others),
                *(func.max(column).label(f"{column.name}_max") for column in others),
                letters.label("letters"),
                func.min(c.last_seen).label("first_seen"),
                last_seen.label("last_seen"),
                func.max(c.id).label("sample"),
                (last_seen if filter_.order == "latest" else letters).label("rank"),
                func.sum(letters).over().label("all_letters"),
                func.count().over().label("all_groups"),
            )
            .where(c.last_seen >= extent.first, *self._conditions())
            .group_by(*(c[name] for name in filter_.by))
            .subquery("groups")
        )
        key = (groups.c.rank, groups.c.sample)
        page = select(groups).order_by(*(part.desc() for part in key)).limit(filter_.limit + 1)
        if after is None:
            return page
        last = tuple_(literal(after.rank, BigInteger), literal(after.sample, BigInteger))
        return page.where(tuple_(*key) < last)

    def _trends(
        self,
        db: Connection,
        filter_: DeadLetterGroupFilter,
        extent: _Extent,
        keys: Sequence[Key],
        start: int,
        width: int,
    ) -> dict[Key, tuple[int, ...]]:
        counts = {key: [0] * filter_.bars for key in keys}
        if keys and filter_.bars:
            c = self._table.c
            columns = [c[name] for name in filter_.by]
            bar = ((c.last_seen - literal(start, BigInteger)) // literal(width, BigInteger)).label("bar")
            # Combinations of the page's values that are not among its groups are dropped below.
            among = [
                self._dialect.among(column, sorted({key[number] for key in keys}))
                for number, column in enumerate(columns)
            ]
            statement = (
                select(*columns, bar, func.count())
                .where(c.last_seen >= extent.first, *self._conditions(), *among)
                .group_by(*columns, bar)
            )
            for *key, number, letters in db.execute(statement):
                if (bars := counts.get(tuple(key))) is not None:
                    bars[number] = letters
        return {key: tuple(bars) for key, bars in counts.items()}

    def _samples(self, db: Connection, ids: Sequence[int]) -> dict[int, DeadLetter]:
        rows = db.execute(select(self._table).where(self._dialect.is_any(self._table.c.id, ids)))
        return {row.id: _dead_letter(row) for row in rows}

    def _newest_first(self, rows: Select[Any]) -> Select[Any]:
        return rows.order_by(self._table.c.last_seen.desc(), self._table.c.id.desc())

    def _conditions(self) -> Iterator[ColumnElement[bool]]:
        filter_, c = self._filter, self._table.c
        yield from common_conditions(filter_, self._table, self._topics, self._dialect)
        yield from self._times()
        if filter_.reason is not None:
            yield c.reason == filter_.reason
        if filter_.fingerprint is not None:
            yield c.fingerprint == filter_.fingerprint
        if filter_.text is not None:
            yield self._dialect.contains(c.last_error, filter_.text)

    def _times(self) -> Iterator[ColumnElement[bool]]:
        if self._filter.since is not None:
            yield self._table.c.last_seen >= self._filter.since
        if self._filter.until is not None:
            yield self._table.c.last_seen < self._filter.until


def _common_value(row: Row[Any], name: str) -> str | None:
    """Return the value that all dead letters of a group have, or None if they differ."""
    fields = row._mapping
    if name in fields:
        return str(fields[name])
    first = fields[f"{name}_min"]
    return str(first) if first == fields[f"{name}_max"] else None


def _dead_letter(row: Row[Any]) -> DeadLetter:
    lineage = _decode_lineage(row.lineage) if row.lineage else ()
    return DeadLetter(**row._asdict() | {"lineage": lineage})
