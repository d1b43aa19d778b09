"""Search in SQL: the access paths for an `EventFilter`, and its statements.

A page has the first rows, in search order, that satisfy all conditions. One condition is the access path: its
index returns rows in search order, and the others are filters on each row until the page is full. That is
fast if the first condition is selective, or if many rows satisfy all; `access_path` compares access paths.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    FromClause,
    Select,
    and_,
    func,
    literal,
    select,
    tuple_,
    union_all,
)

from postroom.adapters.sql.tables import ReadModelTables
from postroom.domain.message import Status
from postroom.domain.names import UUID_TEXT
from postroom.domain.search import EventFilter, Order, topic_matches
from postroom.domain.tokenizer import Word
from postroom.projections.search_text import header_words

_encode_json = msgspec.json.Encoder().encode
MAX_BRANCHES = 32
"""Limit on the values of one condition that are looked up separately, each in search order."""

_EQUAL_FIELDS = ("message_id", "correlation_id", "trace_id", "mailbox", "namespace")


class Dialect(Protocol):
    """The expressions that differ between databases."""

    @property
    def text(self) -> Any:
        """Return the column type of text."""

    @property
    def stream_text(self) -> str | None:
        """Return the expression of the UUID of a stream; see `ReadModelTables`."""

    def equals(self, column: ColumnElement[Any], value: str) -> ColumnElement[bool]:
        """Return the condition that a column has a value, in a form that its index supports."""

    def among(self, column: ColumnElement[Any], values: Sequence[str]) -> ColumnElement[bool]:
        """Return the condition that a column has one of many values, as one parameter."""

    def is_any(self, column: ColumnElement[Any], ids: Sequence[int] | str) -> ColumnElement[bool]:
        """Return the condition that a column is one of many ids, as one parameter; text is from `as_list`."""

    def as_list(self, ids: ColumnElement[int]) -> ColumnElement[Any]:
        """Return the aggregate of ids that `is_any` takes, which the client need not decode."""

    def contains(self, column: ColumnElement[Any], text: str) -> ColumnElement[bool]:
        """Return the condition that a column contains a text, whatever the case of ASCII letters."""

    def with_parts(self, tables: ReadModelTables, parts: Sequence[str]) -> Select[Any] | None:
        """Return the ids of messages that may contain parts of text, at least one; None if no index helps."""

    def with_words(
        self, tables: ReadModelTables, words: Sequence[Word], *, or_long: bool = False
    ) -> Select[Any]:
        """Return the ids of messages that have these words.

        Arguments:
            or_long: add the messages some of whose words may not be indexed.
        """

    def few_with_words(
        self, db: Connection, tables: ReadModelTables, words: Sequence[Word], *, or_long: bool = False
    ) -> "IdList":
        """Return the ids of `with_words` if they are few, or about how many there are, at little cost."""

    def includes(self, text: ColumnElement[Any], part: str) -> ColumnElement[bool]:
        """Return the condition that a text includes a part."""

    def has_part(self, tables: ReadModelTables, part: str) -> ColumnElement[bool]:
        """Return the condition that the searchable text of a message includes a part."""

    def has_words(self, tables: ReadModelTables, words: Sequence[Word]) -> ColumnElement[bool]:
        """Return the condition that a message has these words."""

    def must_scan(self, db: Connection, ids: Select[Any]) -> bool:
        """Return whether no index has the parts of a text, so that all texts are read to find them."""

    def sortable(
        self, column: ColumnElement[Any]
    ) -> tuple[ColumnElement[str], tuple[ColumnElement[bool], ...]]:
        """Return how an index sorts a column of text, and the condition of the index."""

    def allow_unordered(self, db: Connection) -> None:
        """Let the statements of this transaction read indexes that return rows in no order."""


class IdList(NamedTuple):
    """Ids as `is_any` takes them, and their number; or only about how many there are."""

    rows: int
    ids: Sequence[int] | str | None = None


class Branch(NamedTuple):
    """Rows that an index returns in search order: a table with `timestamp` and `id`, and conditions."""

    table: FromClause
    conditions: tuple[ColumnElement[bool], ...]


class Lead(NamedTuple):
    """An access path in search order: the union of its branches satisfies one condition.

    Arguments:
        field: the filter's field, whose condition needs no check on these rows.
        rows: the number of rows, or None if it must be counted.
        is_by_id: whether it selects messages by a list of ids.
        is_sorted: whether its rows are in order, or so few that all columns are read before they are sorted.
    """

    field: str
    branches: list[Branch]
    rows: int | None = None
    is_by_id: bool = False
    is_sorted: bool = True


class Candidates(NamedTuple):
    """An unordered access path, usable if few messages satisfy its condition.

    Arguments:
        field: the filter's field, whose condition needs no check on these rows.
        ids: returns the statement for the ids of its messages.
        few: returns these if they are few, or about how many there are; None if that is not known at little
            cost.
    """

    field: str
    ids: Callable[[], Select[Any]]
    few: Callable[[Connection], IdList] | None = None


class SearchQuery:
    """The statements for one filter on one version of the read models.

    Arguments:
        topics: the topics that match the filter's names and globs, each with its number of messages if that
            is known; None when it has none.
    """

    def __init__(
        self,
        filter_: EventFilter,
        tables: ReadModelTables,
        topics: Mapping[str, int | None] | None,
        dialect: Dialect,
    ) -> None:
        self.filter = filter_
        self._tables = tables
        self._messages = tables.mailbox
        self.dialect = dialect
        self._words = filter_.words
        self._values: dict[str, tuple[str, ...]] = {
            name: (value,) for name in _EQUAL_FIELDS if (value := getattr(filter_, name)) is not None
        }
        if topics is not None:
            self._values["topic"] = tuple(topics)
        self._topics = topics or {}
        if filter_.principals:
            self._values["principal"] = tuple(dict.fromkeys(filter_.principals))
        if filter_.statuses:
            self._values["status"] = tuple(dict.fromkeys(_status_names(filter_.statuses)))

    def leads(self) -> list[Lead | Candidates]:
        """Return the possible access paths, those that are probably selective first."""
        leads: list[Lead | Candidates] = [
            self._with_words(f"header:{name}", words, or_long=True)
            for name, value in self.filter.headers.items()
            if (words := header_words(name, value))
        ]
        if self._words:
            leads.append(self._with_words("match", self._words))
        parts = self.filter.parts
        if parts and (with_parts := self.dialect.with_parts(self._tables, parts)) is not None:
            leads.append(Candidates("candidates", lambda: with_parts))
        fields = (*_EQUAL_FIELDS[:3], "principal", "topic", "status", *_EQUAL_FIELDS[3:])
        leads += [self._column_lead(field, self._values[field]) for field in fields if field in self._values]
        return leads

    @property
    def by_time(self) -> Lead:
        """Return the access path without a condition: all messages, in search order."""
        return Lead("time", [Branch(self._messages, ())])

    def list_ids(self, db: Connection, candidates: Candidates, limit: int) -> IdList:
        """Return the messages of a condition up to a limit."""
        self.dialect.allow_unordered(db)
        (ids,) = candidates.ids().limit(limit).subquery().c
        rows, list_ = db.execute(select(func.count(), self.dialect.as_list(ids))).one()
        return IdList(rows, list_ if rows else ())

    def by_id(self, field: str, ids: Sequence[int] | str, *, is_short: bool = False) -> Lead:
        """Return the access path of a field whose condition only these messages satisfy.

        Arguments:
            is_short: whether they are few.
        """
        branch = Branch(self._messages, (self.dialect.is_any(self._messages.c.id, ids),))
        return Lead(field, [branch], is_by_id=True, is_sorted=is_short)

    def count(self, lead: Lead, limit: int) -> Select[Any]:
        """Return the statement that counts the rows of a lead within the filter's times, up to `limit`."""
        ids = [
            select(branch.table.c.timestamp)
            .where(*branch.conditions, *self._times(branch.table))
            .limit(limit)
            .subquery()
            for branch in lead.branches
        ]
        rows = union_all(*(select(each.c.timestamp) for each in ids)).limit(limit).subquery()
        return select(func.count()).select_from(rows)

    def first_rows(self, lead: Lead, limit: int) -> Lead:
        """Return a lead with one branch limited to its first rows, and to rows with the time of the last."""
        ((table, conditions),) = lead.branches
        bounds = (*self._times(table), *self._after(table))
        is_newest_first = self.filter.order == Order.NEWEST_FIRST
        # Not by id as well, which PostgreSQL's index does not have.
        in_order = table.c.timestamp.desc() if is_newest_first else table.c.timestamp
        first = select(table.c.timestamp).where(*conditions, *bounds).order_by(in_order).limit(limit)
        timestamp = first.subquery().c.timestamp
        if is_newest_first:
            bound = table.c.timestamp >= select(func.min(timestamp)).scalar_subquery()
        else:
            bound = table.c.timestamp <= select(func.max(timestamp)).scalar_subquery()
        return Lead(lead.field, [Branch(table, (*conditions, bound))])

    def page(self, lead: Lead) -> Select[Any]:
        """Return the statement for the page plus one row, which shows whether another page follows."""
        filter_ = self.filter
        if (
            lead.is_sorted
            and not filter_.offset
            and [branch.table for branch in lead.branches] == [self._messages]
        ):
            return self.all_rows(lead).limit(filter_.limit + 1)
        size = filter_.limit + 1 + filter_.offset
        branches = [self._branch(lead, branch, size) for branch in lead.branches]
        matches = union_all(*(select(each.c.timestamp, each.c.id) for each in branches)).subquery("matches")
        page = self._sort_rows(select(matches.c.id), matches).limit(filter_.limit + 1).offset(filter_.offset)
        return self._sort_rows(self._tables.rows.where(self._messages.c.id.in_(page)), self._messages)

    def all_rows(self, lead: Lead) -> Select[Any]:
        """Return the statement for all matching rows after the cursor, in search order."""
        return self._sort_rows(self._tables.rows.where(*self.is_match(lead)), self._messages)

    def is_match(self, lead: Lead) -> tuple[ColumnElement[bool], ...]:
        """Return the conditions that a message matches, and follows the cursor."""
        messages = self._messages
        if [branch.table for branch in lead.branches] == [messages]:
            bounds = (*self._times(messages), *self._after(messages))
            return (*lead.branches[0].conditions, *bounds, *self._checks(lead))
        branches = [self._branch(lead, branch, None) for branch in lead.branches]
        return (messages.c.id.in_(union_all(*(select(each.c.id) for each in branches))),)

    def is_match_among(self, lead: Lead, rows: int) -> tuple[ColumnElement[bool], ...]:
        """Return the conditions that a message matches and is one of the first `rows` rows of a lead."""
        firsts = []
        for branch in lead.branches:
            table = branch.table
            first = select(table.c.timestamp, table.c.id).where(*branch.conditions, *self._times(table))
            firsts.append(self._sort_rows(first, table).limit(rows).subquery())
        merged = union_all(*(select(each.c.timestamp, each.c.id) for each in firsts)).subquery()
        ids = self._sort_rows(select(merged.c.id), merged).limit(rows)
        return (self._messages.c.id.in_(ids), *self._checks(lead))

    def edge(self, lead: Lead, *, is_first: bool) -> Select[Any]:
        """Return the statement for `timestamp` and `id` of the earliest row of a lead, or the latest."""
        edges = []
        for branch in lead.branches:
            table = branch.table
            rows = select(table.c.timestamp, table.c.id).where(*branch.conditions, *self._times(table))
            edges.append(rows.order_by(*_by_time(table, is_first)).limit(1).subquery())
        merged = union_all(*(select(each.c.timestamp, each.c.id) for each in edges)).subquery()
        return select(merged.c.timestamp, merged.c.id).order_by(*_by_time(merged, is_first)).limit(1)

    def _branch(self, lead: Lead, branch: Branch, size: int | None) -> FromClause:
        table, messages = branch.table, self._messages
        checks = list(self._checks(lead))
        if table is not messages and checks:
            # Not a join: PostgreSQL overestimates the selectivity of several checks, and would scan all
            # messages.
            message = select(and_(*checks)).where(messages.c.id == table.c.id)
            checks = [message.correlate(table).scalar_subquery()]
        rows = select(table.c.timestamp, table.c.id)
        rows = rows.where(*branch.conditions, *self._times(table), *self._after(table), *checks)
        return self._sort_rows(rows, table).limit(size).subquery()

    def _column_lead(self, field: str, values: tuple[str, ...]) -> Lead | Candidates:
        column = self._messages.c[field]
        if len(values) <= MAX_BRANCHES:
            equals, messages = self.dialect.equals, self._messages
            branches = [Branch(messages, (equals(column, value),)) for value in values]
            if field == "message_id" and UUID_TEXT.match(values[0]):
                is_stream = messages.c.stream == bytes.fromhex(values[0].replace("-", ""))
                branches.append(Branch(messages, (is_stream, column.is_(None))))
            return Lead(field, branches, self._rows_of_topics() if field == "topic" else None)
        ids = select(self._messages.c.id).where(self.dialect.among(column, values))
        return Candidates(field, lambda: ids)

    def _with_words(self, field: str, words: Sequence[Word], *, or_long: bool = False) -> Candidates:
        tables, dialect = self._tables, self.dialect
        return Candidates(
            field,
            lambda: dialect.with_words(tables, words, or_long=or_long),
            lambda db: dialect.few_with_words(db, tables, words, or_long=or_long),
        )

    def _rows_of_topics(self) -> int | None:
        """Return the number of messages of the topics; None if it is unknown, or the times exclude some."""
        has_times = self.filter.start_time is not None or self.filter.end_time is not None
        counts = [count for count in self._topics.values() if count is not None]
        return None if has_times or len(counts) < len(self._topics) else sum(counts)

    def _checks(self, lead: Lead) -> Iterator[ColumnElement[bool]]:
        """Yield the conditions to check on the rows of a lead."""
        messages, dialect = self._messages, self.dialect
        for field, values in self._values.items():
            if field != lead.field:
                column = self._tables.message_id if field == "message_id" else messages.c[field]
                # Concatenation with '' prevents the planner from using this column's index.
                column = column.concat("")
                yield column == values[0] if len(values) == 1 else self.dialect.among(column, values)
        for name, value in self.filter.headers.items():
            pair = f"{_encode_json(name).decode()}:{_encode_json(value).decode()}"
            yield dialect.includes(messages.c.custom_headers, pair)
        for part in self.filter.parts:
            yield dialect.has_part(self._tables, part)
        if self._words and lead.field != "match":
            yield dialect.has_words(self._tables, self._words)

    def _times(self, table: FromClause) -> Iterator[ColumnElement[bool]]:
        if self.filter.start_time is not None:
            yield table.c.timestamp >= self.filter.start_time
        if self.filter.end_time is not None:
            yield table.c.timestamp <= self.filter.end_time

    def _after(self, table: FromClause) -> Iterator[ColumnElement[bool]]:
        after = self.filter.after
        if after is None:
            return
        keys = (table.c.timestamp, table.c.id)
        row, last = tuple_(*keys), tuple_(literal(after.timestamp, BigInteger), literal(after.id, BigInteger))
        yield row < last if self.filter.order == Order.NEWEST_FIRST else row > last

    def _sort_rows(self, rows: Select[Any], table: FromClause) -> Select[Any]:
        return rows.order_by(*_by_time(table, self.filter.order != Order.NEWEST_FIRST))


def _by_time(table: FromClause, oldest_first: bool) -> list[ColumnElement[Any]]:
    keys = (table.c.timestamp, table.c.id)
    return [key if oldest_first else key.desc() for key in keys]


def matching_topics(
    db: Connection, tables: ReadModelTables, patterns: Sequence[str]
) -> dict[str, int | None] | None:
    """Return the topics that match names or globs; None when there are no patterns.

    The value of a topic is its number of messages, or None if that was not read.
    """
    if not patterns:
        return None
    if not any("*" in pattern for pattern in patterns):
        return dict.fromkeys(patterns)
    topics = db.execute(select(tables.topic.c.topic, tables.topic.c.messages)).all()
    return {
        topic: messages
        for topic, messages in topics
        if any(topic_matches(pattern, topic) for pattern in patterns)
    }


def word_substring(word: Word) -> str:
    """Return a word as a substring of the column `words`, in which each word is between blanks."""
    return f" {word.text}" if word.is_prefix else f" {word.text} "


def _status_names(statuses: Sequence[Status]) -> Iterator[str]:
    for status in statuses:
        yield status.name.lower()
        if status == Status.READY:
            yield "delayed"
