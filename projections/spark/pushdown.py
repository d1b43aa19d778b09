"""Spark's filters, translated into conditions on records and bounds on the ranges to read."""

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

from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.projections.log_columns import COLUMNS, EVENT_COLUMNS
from postroom.projections.log_conditions import (
    Compare,
    Condition,
    IsIn,
    IsNull,
    Not,
    Operator,
    StartsWith,
    Value,
)
from postroom.projections.log_extent import LogExtent, Range

_OPERATORS: dict[type[Filter], Operator] = {
    LessThan: "<",
    LessThanOrEqual: "<=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
}
_MAILBOX_COLUMNS = ("mailbox", "mailbox_id")
_NEVER_NULL = (*_MAILBOX_COLUMNS, "position", "place", "event", "as_of")


@dataclass
class Pushdown:
    """The filters that the data source applies itself.

    Arguments:
        where: conditions on records for `LogReader.read`.
    """

    where: list[Condition] = field(default_factory=list)
    _mailboxes: list[Condition] = field(default_factory=list)
    _positions: list[Condition] = field(default_factory=list)

    def accept(self, filters: Iterable[Filter]) -> list[Filter]:
        """Accept filters, and return those that Spark has to apply."""
        return [filter_ for filter_ in filters if not self._accepts(to_condition(filter_))]

    def ranges(self, extents: Iterable[LogExtent]) -> list[Range]:
        """Return the ranges of mailboxes that may contain matching records."""
        candidates = [extent for extent in extents if all(_holds(each, extent) for each in self._mailboxes)]
        ranges = (Range(extent, *self._bounds(extent)) for extent in candidates)
        return [range_ for range_ in ranges if range_.first <= range_.last]

    def _accepts(self, condition: Condition | None) -> bool:
        """Accept a condition if possible; tell whether it is applied exactly, so that Spark need not."""
        match condition:
            case None:
                return False
            case Not(IsNull(column)) if column in _NEVER_NULL:
                return True
            case _ if condition.column in _MAILBOX_COLUMNS:
                self._mailboxes.append(condition)
                return True
            case Compare("position" | "place") | IsIn("position" | "place"):
                self._positions.append(condition)
                return isinstance(condition, Compare) or len(condition.values) == 1
            case _ if condition.column in EVENT_COLUMNS:
                self.where.append(condition)
                return True
        return False

    def _bounds(self, extent: LogExtent) -> tuple[int, int]:
        first, last = extent.first, extent.last
        for condition in self._positions:
            before = extent.place(0) if condition.column == "place" else 0
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
                    within = [position for position in positions if 0 < position < POSITIONS_PER_MAILBOX]
                    first, last = max(first, min(within, default=first)), min(last, max(within, default=0))
        return first, last


def to_condition(filter_: Filter) -> Condition | None:
    """Return a filter as a condition, or None when a reader can't apply it exactly."""
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
    """Tell whether readers compare a column with these values as Spark does."""
    if not values or name not in COLUMNS:
        return False
    kind = {"bigint": int, "string": str}.get(COLUMNS[name].spark, ())
    return all(isinstance(value, kind) for value in values)


def _holds(condition: Condition, extent: LogExtent) -> bool:
    """Tell whether a condition on the mailbox holds."""
    value: Value = extent.name if condition.column == "mailbox" else extent.id
    match condition:
        case IsIn(_, values):
            return value in values
        case StartsWith(_, prefix):
            return str(value).startswith(prefix)
        case Compare(_, operator, than):
            sign = (value > than) - (value < than)  # type: ignore[operator]
            return sign in {"<": (-1,), "<=": (-1, 0), ">": (1,), ">=": (0, 1)}[operator]
        case Not(inner):
            return not _holds(inner, extent)
    return False
