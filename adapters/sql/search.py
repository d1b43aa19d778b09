"""Search as SQL: which way an `EventFilter` is answered quickly, and the statements for it.

A page is the first rows, in search order, of those that satisfy every condition. One condition leads: its
index gives the rows in search order, and the others are checked on each row until the page is full. That is
quick when either the leading condition holds for few rows or all conditions together hold for many; so what
leads is the condition that holds for the fewest, found by counting up to a bound. Indexes of text and words
know no order: they lead only where they find few, by the ids of what they find.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    FromClause,
    Select,
    Table,
    func,
    literal,
    select,
    tuple_,
    union_all,
)

from postroom.adapters.sql.tables import ReadModelTables
from postroom.domain.message import Status
from postroom.domain.search import EventFilter, Order
from postroom.domain.words import Word

MAX_BRANCHES = 32
"""Values of one condition that are looked up side by side, each in search order."""

_EQUAL_FIELDS = ("message_id", "correlation_id", "trace_id", "mailbox", "namespace")


class Dialect(Protocol):
    """What each database spells in its own way."""

    @property
    def text(self) -> Any:
        """Return the column type of text."""

    def equals(self, column: ColumnElement[Any], value: str) -> ColumnElement[bool]:
        """Return the condition that a column has a value, as its index looks it up."""

    def among(self, column: ColumnElement[Any], values: Sequence[str]) -> ColumnElement[bool]:
        """Return the condition that a column has one of many values, as one parameter."""

    def is_any(self, column: ColumnElement[Any], ids: Sequence[int]) -> ColumnElement[bool]:
        """Return the condition that a column is one of many ids, as one parameter."""

    def with_parts(self, tables: ReadModelTables, parts: Sequence[str]) -> Select[Any] | None:
        """Return the ids of messages among which are all that have these parts of text; None for no idea."""

    def with_words(self, tables: ReadModelTables, words: Sequence[Word]) -> Select[Any]:
        """Return the ids of messages that have these words."""


class Branch(NamedTuple):
    """Rows that an index holds in search order: of a table with `timestamp` and `id`, by conditions."""

    table: Table
    conditions: tuple[ColumnElement[bool], ...]


class Lead(NamedTuple):
    """A condition that may lead, as branches that together hold the rows it is true for.

    Arguments:
        field: the filter's field, whose condition needs no checking on the rows found.
    """

    field: str
    branches: list[Branch]


class Candidates(NamedTuple):
    """A condition that may lead when it is true for few messages, whose ids come in no order.

    Arguments:
        field: the filter's field, whose condition needs no checking on the rows found.
    """

    field: str
    ids: Select[Any]


class SearchQuery:
    """Build the statements that answer one filter from one version of the read models.

    Arguments:
        topics: the topics that the filter's names and globs stand for; None when it has none.
    """

    def __init__(
        self, wanted: EventFilter, tables: ReadModelTables, topics: Sequence[str] | None, dialect: Dialect
    ) -> None:
        self._wanted = wanted
        self._tables = tables
        self._messages = tables.mailbox
        self._dialect = dialect
        self._words = wanted.words
        self._values: dict[str, tuple[str, ...]] = {
            name: (value,) for name in _EQUAL_FIELDS if (value := getattr(wanted, name)) is not None
        }
        if topics is not None:
            self._values["topic"] = tuple(topics)
        if wanted.principals:
            self._values["principal"] = tuple(dict.fromkeys(wanted.principals))
        if wanted.statuses:
            self._values["status"] = tuple(dict.fromkeys(_standings(wanted.statuses)))

    def leads(self) -> list[Lead | Candidates]:
        """Return the conditions that may lead, those that are likelier to hold for few rows first."""
        leads: list[Lead | Candidates] = [
            Lead(f"header:{name}", [Branch(header, self._is_header(header, name, value))])
            for header in [self._tables.header]
            for name, value in self._wanted.headers.items()
        ]
        if self._words:
            leads.append(Candidates("match", self._dialect.with_words(self._tables, self._words)))
        if (with_parts := self._dialect.with_parts(self._tables, self._wanted.parts)) is not None:
            leads.append(Candidates("candidates", with_parts))
        fields = (*_EQUAL_FIELDS[:3], "principal", "topic", "status", *_EQUAL_FIELDS[3:])
        leads += [self._column_lead(field, self._values[field]) for field in fields if field in self._values]
        return leads

    @property
    def by_time(self) -> Lead:
        """The lead that is always possible: all messages, in search order."""
        return Lead("time", [Branch(self._messages, ())])

    def by_id(self, field: str, ids: Sequence[int]) -> Lead:
        """Return the lead of a field whose condition is true for just these messages."""
        return Lead(field, [Branch(self._messages, (self._dialect.is_any(self._messages.c.id, ids),))])

    def count(self, lead: Lead, most: int) -> Select[Any]:
        """Return the statement that counts a lead's rows within the filter's times, but not beyond `most`."""
        counted = [
            select(branch.table.c.id)
            .where(*branch.conditions, *self._times(branch.table))
            .limit(most)
            .subquery()
            for branch in lead.branches
        ]
        rows = union_all(*(select(each.c.id) for each in counted)).limit(most).subquery()
        return select(func.count()).select_from(rows)

    def page(self, lead: Lead) -> Select[Any]:
        """Return the statement for the page and one row more, which tells whether another page follows."""
        wanted = self._wanted
        size = wanted.limit + 1 + wanted.offset
        branches = [self._branch(lead, branch, size) for branch in lead.branches]
        found = union_all(*(select(each.c.timestamp, each.c.id) for each in branches)).subquery("found")
        page = self._sorted(select(found.c.id), found).limit(wanted.limit + 1).offset(wanted.offset)
        return self._sorted(select(self._messages).where(self._messages.c.id.in_(page)), self._messages)

    def everything(self, lead: Lead) -> Select[Any]:
        """Return the statement for all matching rows at once, in search order."""
        messages = self._messages
        if [branch.table for branch in lead.branches] == [messages]:
            conditions = (*lead.branches[0].conditions, *self._times(messages), *self._checks(lead))
        else:
            branches = [self._branch(lead, branch, None) for branch in lead.branches]
            conditions = (messages.c.id.in_(union_all(*(select(each.c.id) for each in branches))),)
        return self._sorted(select(messages).where(*conditions), messages)

    def _branch(self, lead: Lead, branch: Branch, size: int | None) -> FromClause:
        table, messages = branch.table, self._messages
        rows = select(table.c.timestamp, table.c.id)
        checks = list(self._checks(lead))
        if table is not messages and checks:
            rows = rows.join(messages, messages.c.id == table.c.id)
        rows = rows.where(*branch.conditions, *self._times(table), *self._after(table), *checks)
        return self._sorted(rows, table).limit(size).subquery()

    def _column_lead(self, field: str, values: tuple[str, ...]) -> Lead | Candidates:
        column = self._messages.c[field]
        if len(values) <= MAX_BRANCHES:
            equals = self._dialect.equals
            return Lead(field, [Branch(self._messages, (equals(column, value),)) for value in values])
        return Candidates(field, select(self._messages.c.id).where(self._dialect.among(column, values)))

    def _checks(self, lead: Lead) -> Iterator[ColumnElement[bool]]:
        """Yield the conditions that the rows of a lead still have to satisfy."""
        messages, text = self._messages, self._tables.text
        for field, values in self._values.items():
            if field != lead.field:
                # Joined with nothing, the column can't tempt the planner to let its index lead instead.
                column = messages.c[field].concat("")
                yield column == values[0] if len(values) == 1 else self._dialect.among(column, values)
        for name, value in self._wanted.headers.items():
            if lead.field != f"header:{name}":
                header = self._tables.header.alias()
                yield (
                    select(header.c.id)
                    .where(*self._is_header(header, name, value))
                    .where(header.c.timestamp == messages.c.timestamp, header.c.id == messages.c.id)
                    .exists()
                )
        conditions = [text.c.text.contains(part, autoescape=True) for part in self._wanted.parts]
        if lead.field != "match":
            conditions += [text.c.words.contains(_in_words(word), autoescape=True) for word in self._words]
        if conditions:
            yield select(text.c.id).where(text.c.id == messages.c.id, *conditions).exists()

    def _is_header(self, header: FromClause, name: str, value: str) -> tuple[ColumnElement[bool], ...]:
        return self._dialect.equals(header.c.name, name), self._dialect.equals(header.c.value, value)

    def _times(self, table: FromClause) -> Iterator[ColumnElement[bool]]:
        if self._wanted.start_time is not None:
            yield table.c.timestamp >= self._wanted.start_time
        if self._wanted.end_time is not None:
            yield table.c.timestamp <= self._wanted.end_time

    def _after(self, table: FromClause) -> Iterator[ColumnElement[bool]]:
        after = self._wanted.after
        if after is None:
            return
        keys = (table.c.timestamp, table.c.id)
        row, last = tuple_(*keys), tuple_(literal(after.timestamp, BigInteger), literal(after.id, BigInteger))
        yield row < last if self._wanted.order == Order.NEWEST_FIRST else row > last

    def _sorted(self, rows: Select[Any], table: FromClause) -> Select[Any]:
        keys = (table.c.timestamp, table.c.id)
        return rows.order_by(
            *(key.desc() for key in keys) if self._wanted.order == Order.NEWEST_FIRST else keys
        )


def _in_words(word: Word) -> str:
    """Return what a text of words, each between blanks, contains where it has a word."""
    return f" {word.text}" if word.is_prefix else f" {word.text} "


def _standings(statuses: Sequence[Status]) -> Iterator[str]:
    for status in statuses:
        yield status.name.lower()
        if status == Status.READY:
            yield "delayed"
