"""Facets, timeline and suggestions in SQL (ADR 0084).

Each statement reads a bounded number of rows: the first rows of an access path, whose other conditions are
then checked, or a sample.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, Text, case, cast, func, null, select, union_all

from postroom.adapters.sql.access_path import fewest_rows
from postroom.adapters.sql.dead_letters import distinct_values
from postroom.adapters.sql.search import Dialect, Lead, SearchQuery, matching_topics
from postroom.adapters.sql.tables import ReadModelTables, projection_cursor
from postroom.application.ports.facets import (
    BARS,
    CAP,
    DAY_MS,
    FACET_VALUES,
    HOUR_MS,
    SUGGESTIONS,
    Facet,
    FacetField,
    Facets,
    FacetValue,
    SearchStatistics,
    SuggestionField,
    Timeline,
    bar_width,
    check_bars,
    check_cap,
    check_suggestions,
    make_timeline,
)
from postroom.domain.arguments import check_text
from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.domain.search import EventFilter, Order, parse_status

SAMPLE = 6_000
"""Number of places in the log at which messages are sampled; there may be other events."""
JITTER = 40_503
MAX_ACTIVITY_ROWS = 50_000
"""Limit on the rows of activity that are read for a timeline."""
US_PER_MS = 1_000
AFTER = "\x01"
"""Suffix that makes a topic the next text after itself, as topics have no such character."""
_FILTER_FIELDS = {
    FacetField.TOPIC: "topics",
    FacetField.STATUS: "statuses",
    FacetField.PRINCIPAL: "principals",
    FacetField.NAMESPACE: "namespace",
}
"""The filter's fields that have an index in search order, by facet."""
_NO_CRITERIA = ("start_time", "end_time", "order", "limit", "offset", "cursor", "envelopes")


class AccessPath(NamedTuple):
    """An access path of a filter.

    Arguments:
        is_complete: whether it has no more rows than are counted.
    """

    query: SearchQuery
    lead: Lead
    is_complete: bool

    def conditions(self, cap: int) -> tuple[ColumnElement[bool], ...]:
        """Return the conditions of the matches that are counted."""
        if self.lead.is_by_id and self.is_complete:
            return self.query.is_match(self.lead)
        # Its order makes SQLite read the index even if most messages have the same value.
        return self.query.is_match_among(self.lead, cap)


class SqlStatistics(SearchStatistics):
    """The queries of `SearchStatistics` on SQL tables."""

    _dialect: Dialect

    @abstractmethod
    def _reading(self, model: str = "mailbox") -> AbstractContextManager[tuple[Connection, ReadModelTables]]:
        """Read the tables of the active version, which must have a model, in one snapshot."""

    @abstractmethod
    def _catalog(self, db: Connection) -> Connection:
        """Return the connection to the catalog of versions."""

    @abstractmethod
    def _query(
        self, filter_: EventFilter, tables: ReadModelTables, topics: Mapping[str, int | None] | None
    ) -> SearchQuery:
        """Return the statements for a filter; `topics` match its patterns, None if it has no patterns."""

    def _distinct(self, column: ColumnElement[Any], start: str, limit: int) -> Select[Any]:
        """Return the statement for the first distinct values of a column from a text on."""
        return distinct_values(column, start, limit, self._dialect)

    def _count_facets(
        self,
        db: Connection,
        path: AccessPath,
        tables: ReadModelTables,
        fields: Sequence[FacetField],
        cap: int,
    ) -> Iterable[Sequence[Any]]:
        """Return rows of field, value and count; see `_facets`."""
        return db.execute(_facets(path, tables, fields, cap))

    def facets(
        self, filter_: EventFilter, fields: Sequence[FacetField] = tuple(FacetField), *, cap: int = CAP
    ) -> Facets:
        check_cap(cap)
        with self._reading() as (db, tables):
            filter_ = _without_single_mailbox(self._catalog(db), tables, _without_paging(filter_))
            path = self._read_path(db, tables, filter_, cap)
            if path is None:
                return Facets(0, True, tuple(Facet(field, ()) for field in fields))
            messages, values, others = 0, {field: list[FacetValue]() for field in fields}, {}
            for field, value, count in self._count_facets(db, path, tables, fields, cap):
                if not field:
                    messages = count
                elif value is None:
                    others[field] = count
                else:
                    values[FacetField(field)].append(FacetValue(value, count, path.is_complete))
            facets = []
            for field in fields:
                shown = tuple(values[field])
                others_count = others[field] - len(shown)
                if not path.is_complete and _can_recount(filter_, field):
                    shown = tuple(self._recount(db, tables, filter_, field, shown, cap))
                facets.append(Facet(field, shown, others_count))
        return Facets(messages, path.is_complete, tuple(facets))

    def timeline(self, filter_: EventFilter, bars: int = BARS, *, cap: int = CAP) -> Timeline:
        check_cap(cap)
        check_bars(bars)
        with self._reading() as (db, tables):
            filter_ = _without_single_mailbox(self._catalog(db), tables, _without_paging(filter_))
            path = self._read_path(db, tables, filter_, cap)
            if path is None:
                return make_timeline((), bars, "messages")
            if path.is_complete:
                return make_timeline(_times(db, path, tables, cap), bars, "messages")
            timeline = self._timeline_of_activity(db, tables, filter_, path, bars)
            return timeline or self._timeline_of_sample(db, tables, filter_, bars)

    def suggest(
        self,
        field: SuggestionField,
        start: str,
        limit: int = SUGGESTIONS,
        *,
        mailbox: str | None = None,
        covers: Callable[[str], bool] = lambda value: True,
    ) -> tuple[str, ...]:
        check_text("start", start)
        check_suggestions(limit)
        with self._reading() as (db, tables):
            own = _without_single_mailbox(self._catalog(db), tables, EventFilter(mailbox=mailbox))
            if own.mailbox is not None:
                recent = self._suggest_recent(db, tables, own, field, start)
                return tuple(islice(filter(covers, recent), limit))
            columns: dict[SuggestionField, ColumnElement[Any]] = {
                SuggestionField.TOPIC: tables.topic.c.topic,
                SuggestionField.PRINCIPAL: tables.mailbox.c.principal,
                SuggestionField.NAMESPACE: tables.mailbox.c.namespace,
                SuggestionField.HEADER: tables.header.c.name,
            }
            suggestions: list[str] = []
            values, after = [start], start
            while len(suggestions) < limit and values and values[-1].startswith(start):
                # They are sorted as bytes: those that begin with the text come first.
                values = list(db.scalars(self._distinct(columns[field], after, limit)))
                suggestions += [each for each in values if each.startswith(start) and covers(each)]
                if len(values) < limit:
                    break
                after = values[-1] + AFTER
            return tuple(suggestions[:limit])

    def _suggest_recent(
        self,
        db: Connection,
        tables: ReadModelTables,
        filter_: EventFilter,
        field: SuggestionField,
        start: str,
    ) -> tuple[str, ...]:
        if field == SuggestionField.HEADER:
            return ()
        query = self._query(filter_, tables, None)
        (lead,) = query.leads()
        assert isinstance(lead, Lead)
        value = tables.mailbox.c[field.value]
        values = select(value).where(*query.is_match_among(lead, CAP), value >= start)
        rows = db.scalars(values.distinct().order_by(value))
        return tuple(each for each in rows if each.startswith(start))

    def _read_path(
        self, db: Connection, tables: ReadModelTables, filter_: EventFilter, rows: int
    ) -> AccessPath | None:
        """Return the access path with the fewest rows; None if no topic matches."""
        topics = matching_topics(db, tables, filter_.topics)
        if topics == {}:
            return None
        query = self._query(filter_, tables, topics)
        return AccessPath(query, *fewest_rows(db, query, rows))

    def _recount(
        self,
        db: Connection,
        tables: ReadModelTables,
        filter_: EventFilter,
        field: FacetField,
        values: Sequence[FacetValue],
        cap: int,
    ) -> Iterator[FacetValue]:
        """Yield the values with the number of all their messages, up to the cap."""
        name = _FILTER_FIELDS[field]
        for each in values:
            value: object = parse_status(each.value) if field == FacetField.STATUS else each.value
            only = msgspec.structs.replace(
                filter_, **{name: value if field == FacetField.NAMESPACE else (value,)}
            )
            topics = {each.value: None} if field == FacetField.TOPIC else None
            query = self._query(only, tables, topics)
            (lead,) = query.leads()
            if isinstance(lead, Lead):
                count = int(db.execute(query.count(lead, cap + 1)).scalar_one())
                yield FacetValue(each.value, min(count, cap), count <= cap)

    def _timeline_of_activity(
        self, db: Connection, tables: ReadModelTables, filter_: EventFilter, path: AccessPath, bars: int
    ) -> Timeline | None:
        """Return the timeline of recorded sends; None if the filter has criteria that activity lacks."""
        has_others = _criteria(filter_) - {"topics", "mailbox"}
        if has_others or "activity" not in tables.models:
            return None
        first, last = (
            db.execute(path.query.edge(path.lead, is_first=is_first)).one() for is_first in (True, False)
        )
        width = bar_width(first.timestamp, last.timestamp, bars)
        if width < HOUR_MS:
            return None
        period, length = ("day", DAY_MS) if width % DAY_MS == 0 else ("hour", HOUR_MS)
        activity = tables.activity.c
        conditions = [activity.period == period]
        if filter_.start_time is not None:
            conditions.append(activity.starts_at >= filter_.start_time // length * length * US_PER_MS)
        if filter_.end_time is not None:
            conditions.append(activity.starts_at <= filter_.end_time * US_PER_MS)
        read = select(activity.starts_at).where(*conditions).limit(MAX_ACTIVITY_ROWS + 1).subquery()
        if int(db.execute(select(func.count()).select_from(read)).scalar_one()) > MAX_ACTIVITY_ROWS:
            return None
        if filter_.mailbox is not None:
            conditions.append(activity.mailbox == filter_.mailbox)
        topics = matching_topics(db, tables, filter_.topics)
        if topics is not None:
            conditions.append(self._dialect.among(activity.topic, list(topics)))
        rows = db.execute(
            select(activity.starts_at, func.sum(activity.events))
            .where(*conditions, activity.event == "MessageSent")
            .group_by(activity.starts_at)
        )
        times = [(starts_at // US_PER_MS, int(events)) for starts_at, events in rows]
        if not times:
            return None
        # Log time may reach further than the timestamps of messages.
        span = bar_width(min(times)[0], max(times)[0], bars)
        return make_timeline(times, bars, "events", width=max(width, span))

    def _timeline_of_sample(
        self, db: Connection, tables: ReadModelTables, filter_: EventFilter, bars: int
    ) -> Timeline:
        places: list[int] = []
        for first, last, size in self._sampled_places(db, tables, filter_):
            step = max(1, (last - first + 1) // size)
            # Not at equal distances, which may coincide with a period in the log, and not at random.
            steps = enumerate(range(first, last + 1, step))
            places += (place + number * JITTER % step for number, place in steps)
        topics = matching_topics(db, tables, filter_.topics)
        query = self._query(filter_, tables, topics)
        path = AccessPath(query, query.by_id("sample", places), is_complete=True)
        is_sampled = self._dialect.is_any(tables.mailbox.c.id, places)
        sample = db.scalar(select(func.count()).select_from(tables.mailbox).where(is_sampled))
        return make_timeline(_times(db, path, tables, SAMPLE), bars, "sample", sample=int(sample or 0))

    def _sampled_places(
        self, db: Connection, tables: ReadModelTables, filter_: EventFilter
    ) -> list[tuple[int, int, int]]:
        """Return the first and last place in the log of each mailbox, and its share of the sample."""
        cursor = projection_cursor.c
        conditions = [cursor.version == tables.version, cursor.position > 0]
        if filter_.mailbox is not None:
            conditions.append(cursor.mailbox == filter_.mailbox)
        catalog = self._catalog(db)
        rows = catalog.execute(select(cursor.mailbox_id, cursor.position).where(*conditions)).all()
        total = sum(row.position for row in rows)
        places = []
        for mailbox_id, position in rows:
            base = mailbox_id * POSITIONS_PER_MAILBOX
            places.append((base + 1, base + position, max(1, SAMPLE * position // total)))
        if len(places) == 1 and (filter_.start_time is not None or filter_.end_time is not None):
            scope = EventFilter(
                mailbox=filter_.mailbox, start_time=filter_.start_time, end_time=filter_.end_time
            )
            query = self._query(scope, tables, None)
            lead = next((each for each in query.leads() if isinstance(each, Lead)), query.by_time)
            edges = [db.execute(query.edge(lead, is_first=each)).one_or_none() for each in (True, False)]
            ids = [edge.id for edge in edges if edge is not None]
            return [(min(ids), max(ids), SAMPLE)] if ids else []
        return places


def _without_paging(filter_: EventFilter) -> EventFilter:
    return msgspec.structs.replace(filter_, order=Order.NEWEST_FIRST, offset=0, cursor=None)


def _without_single_mailbox(
    catalog: Connection, tables: ReadModelTables, filter_: EventFilter
) -> EventFilter:
    """Return a filter without its mailbox if the version has no other one."""
    if filter_.mailbox is None:
        return filter_
    cursor = projection_cursor.c
    own = select(cursor.mailbox).where(cursor.version == tables.version, cursor.position > 0)
    return (
        msgspec.structs.replace(filter_, mailbox=None)
        if [*catalog.scalars(own)] == [filter_.mailbox]
        else filter_
    )


def _criteria(filter_: EventFilter) -> set[str]:
    """Return the names of the fields that are set, without times and paging."""
    fields = msgspec.structs.asdict(filter_).items()
    return {name for name, value in fields if name not in _NO_CRITERIA and value not in (None, (), {})}


def _can_recount(filter_: EventFilter, field: FacetField) -> bool:
    """Return whether an index has the messages of each value of a field."""
    return field in _FILTER_FIELDS and not _criteria(filter_)


def facet_values(
    path: AccessPath, tables: ReadModelTables, fields: Sequence[FacetField], cap: int
) -> Select[Any]:
    """Return the statement for the values of fields of each match that is counted."""
    messages, letters = tables.mailbox, tables.dead_letters
    columns: dict[FacetField, ColumnElement[Any]] = {
        field: messages.c[field.value] for field in FacetField if field != FacetField.REASON
    }
    columns[FacetField.STATUS] = case((messages.c.status == "delayed", "ready"), else_=messages.c.status)
    source: Any = messages
    columns[FacetField.REASON] = cast(null(), tables.text_type)
    if "dead_letters" in tables.models and FacetField.REASON in fields:
        source = messages.outerjoin(letters, letters.c.id == messages.c.id)
        columns[FacetField.REASON] = letters.c.reason
    return (
        select(*(columns[field].label(field.value) for field in fields), messages.c.id)
        .select_from(source)
        .where(*path.conditions(cap))
    )


def _facets(path: AccessPath, tables: ReadModelTables, fields: Sequence[FacetField], cap: int) -> Select[Any]:
    """Return the statement for rows of field, value and count.

    A row without a field has the number of all messages; a row without a value has the number of the field's
    values.
    """
    matches = facet_values(path, tables, fields, cap).cte("matches")
    text = tables.text_type
    counts = [
        select(
            cast("", Text).label("field"), cast(null(), text).label("value"), func.count().label("count")
        ).select_from(matches)
    ]
    for field in fields:
        value, name = matches.c[field.value], cast(field.value, Text)
        count = func.count().label("count")
        groups = select(value.label("value"), count).where(value.is_not(None)).group_by(value)
        top = groups.order_by(count.desc(), value).limit(FACET_VALUES).subquery()
        counts.append(select(name, top.c.value, top.c.count))
        counts.append(select(name, cast(null(), text), func.count(value.distinct())).select_from(matches))
    return select(union_all(*counts).subquery())


def _times(db: Connection, path: AccessPath, tables: ReadModelTables, cap: int) -> list[tuple[int, int]]:
    """Return the times of matches, each with its number of messages."""
    time = tables.mailbox.c.timestamp
    rows = select(time, func.count()).where(*path.conditions(cap)).group_by(time)
    return [(timestamp, count) for timestamp, count in db.execute(rows)]
