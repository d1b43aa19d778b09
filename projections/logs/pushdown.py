"""Filters that Spark hands to the data source, as conditions on what is read and as bounds of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)
from pyspark.sql.datasource import IsNull as NullFilter
from pyspark.sql.datasource import Not as NotFilter

from postroom.projections.cut import PLACES, MailboxCut, Range
from postroom.projections.logs.columns import COLUMNS, STORED
from postroom.projections.logs.conditions import (
    Compare,
    Condition,
    IsIn,
    IsNull,
    Not,
    Operator,
    StartsWith,
    Value,
)

_OPERATORS: dict[type[Filter], Operator] = {
    LessThan: "<",
    LessThanOrEqual: "<=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
}
_OF_THE_MAILBOX = ("mailbox", "mailbox_id")
_NEVER_NULL = (*_OF_THE_MAILBOX, "position", "place", "event", "cut_at")
_ALTERED = "\x00\x1a"
"""Characters that a store may hold in another form (see `adapters/postgres/columns.py`)."""


@dataclass
class Pushdown:
    """What filters say about what is to be read.

    Arguments:
        where: conditions on records, as `Log.read` takes them.
    """

    where: list[Condition] = field(default_factory=list)
    _mailboxes: list[Condition] = field(default_factory=list)
    _positions: list[Condition] = field(default_factory=list)

    def take(self, filters: Iterable[Filter]) -> list[Filter]:
        """Take filters in, and return those that Spark has to apply itself."""
        return [filter_ for filter_ in filters if not self._takes(to_condition(filter_))]

    def ranges(self, cuts: Iterable[MailboxCut]) -> list[Range]:
        """Return which ranges of mailboxes may hold what is wanted."""
        chosen = [cut for cut in cuts if all(_holds(each, cut) for each in self._mailboxes)]
        bounded = (Range(cut, *self._bounds(cut)) for cut in chosen)
        return [range_ for range_ in bounded if range_.first <= range_.last]

    def _takes(self, condition: Condition | None) -> bool:
        """Take a condition in; tell whether nothing is left to do for it."""
        match condition:
            case None:
                return False
            case Not(IsNull(column)) if column in _NEVER_NULL:
                return True
            case _ if condition.column in _OF_THE_MAILBOX:
                self._mailboxes.append(condition)
                return True
            case Compare("position" | "place") | IsIn("position" | "place"):
                self._positions.append(condition)
                return isinstance(condition, Compare) or len(condition.values) == 1
            case _ if condition.column in STORED and condition.column != "place":
                self.where.append(condition)
                return True
        return False

    def _bounds(self, cut: MailboxCut) -> tuple[int, int]:
        first, last = cut.first, cut.last
        for condition in self._positions:
            before = cut.place(0) if condition.column == "place" else 0
            match condition:
                case Compare(_, "<", value):
                    last = min(last, value - before - 1)
                case Compare(_, "<=", value):
                    last = min(last, value - before)
                case Compare(_, ">", value):
                    first = max(first, value - before + 1)
                case Compare(_, ">=", value):
                    first = max(first, value - before)
                case IsIn(_, values):
                    positions = [int(value) - before for value in values]
                    within = [position for position in positions if 0 < position < PLACES]
                    first, last = max(first, min(within, default=first)), min(last, max(within, default=0))
        return first, last


def to_condition(filter_: Filter) -> Condition | None:
    """Return the condition that a filter is, or None when a store can't tell it exactly."""
    match filter_:
        case NotFilter(EqualTo((name,), value)) if _is_exact(name, [value]):
            return Not(IsIn(name, (value,)))
        case NotFilter(In((name,), values)) if _is_exact(name, values):
            return Not(IsIn(name, tuple(values)))
        case NotFilter(StringStartsWith((name,), prefix)) if _is_exact(name, [prefix]):
            return Not(StartsWith(name, prefix))
        case EqualTo((name,), value) if _is_exact(name, [value]):
            return IsIn(name, (value,))
        case In((name,), values):
            present = tuple(value for value in values if value is not None)  # nothing equals null
            return IsIn(name, present) if _is_exact(name, present) else None
        case StringStartsWith((name,), prefix) if _is_exact(name, [prefix]):
            return StartsWith(name, prefix)
        case LessThan() | LessThanOrEqual() | GreaterThan() | GreaterThanOrEqual():
            (name, *inner), value = filter_.attribute, filter_.value
            is_number = not inner and isinstance(value, int) and _is_exact(name, [value])
            return Compare(name, _OPERATORS[type(filter_)], value) if is_number else None
        case NullFilter((name,)):
            return IsNull(name)
        case IsNotNull((name,)):
            return Not(IsNull(name))
    return None


def _is_exact(name: str, values: Sequence[Value | None]) -> bool:
    """Tell whether stores compare a column with these values as Spark does."""
    if not values or name not in COLUMNS:
        return False
    kind = {"bigint": int, "string": str}.get(COLUMNS[name].spark, ())
    return all(
        isinstance(value, kind) and not (isinstance(value, str) and any(c in value for c in _ALTERED))
        for value in values
    )


def _holds(condition: Condition, cut: MailboxCut) -> bool:
    """Tell whether a condition on the mailbox holds."""
    value: Value = cut.name if condition.column == "mailbox" else cut.id
    match condition:
        case IsIn(_, values):
            return value in values
        case StartsWith(_, prefix):
            return str(value).startswith(prefix)
        case Compare(_, operator, than):
            sign = (value > than) - (value < than)  # type: ignore[operator]
            return sign in {"<": (-1,), "<=": (-1, 0), ">": (1,), ">=": (0, 1)}[operator]
        case Not(inner):
            return not _holds(inner, cut)
    return False
