"""Conditions on columns of the log, which readers apply to commits.

As in SQL, a condition on a null is neither true nor false, and neither is its negation: such records do not
match.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import pyarrow.compute as pc

Value = int | str
Operator = Literal["<", "<=", ">", ">="]


@dataclass(frozen=True)
class IsIn:
    """Condition: the column has one of these values, of which there is at least one."""

    column: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class StartsWith:
    """Condition: the text of the column begins with a prefix, compared character by character."""

    column: str
    prefix: str


@dataclass(frozen=True)
class Compare:
    """Condition: the number in the column is less or greater than a value."""

    column: str
    operator: Operator
    value: int


@dataclass(frozen=True)
class IsNull:
    """Condition: the column is null."""

    column: str


@dataclass(frozen=True)
class Not:
    """Negation of a condition."""

    condition: "IsIn | StartsWith | Compare | IsNull"

    @property
    def column(self) -> str:
        """Return the column of the condition."""
        return self.condition.column


@dataclass(frozen=True)
class Bucket:
    """Condition: the last byte of a 16-byte id (practically random) is at least `low` and below `high`."""

    column: str
    low: int
    high: int


Condition = IsIn | StartsWith | Compare | IsNull | Not | Bucket


def may_match(where: Iterable[Condition], event: str | None) -> bool:
    """Return whether events of a type can meet conditions.

    Arguments:
        event: name of the type; None if it differs from event to event.
    """
    return event is None or all(_holds(each, event) for each in where if each.column == "event")


def _holds(condition: Condition, event: str) -> bool:
    match condition:
        case IsIn(_, values):
            return event in values
        case StartsWith(_, prefix):
            return event.startswith(prefix)
        case IsNull():
            return False
        case Not(inner):
            return not _holds(inner, event)
    return True


def to_arrow(condition: Condition) -> pc.Expression:
    """Return a condition as an Arrow expression."""
    field = pc.field(condition.column)
    match condition:
        case IsIn(_, values):
            return field.is_valid() & field.isin(list(values))  # Arrow's isin is false for null, not null
        case StartsWith(_, prefix):
            return pc.starts_with(field, prefix)
        case Compare(_, "<", value):
            return field < value
        case Compare(_, "<=", value):
            return field <= value
        case Compare(_, ">", value):
            return field > value
        case Compare(_, ">=", value):
            return field >= value
        case IsNull():
            return field.is_null()
        case Not(IsNull()):
            return field.is_valid()
        case Not(inner):
            return field.is_valid() & ~to_arrow(inner)
        case Bucket(_, low, high):
            last = pc.binary_slice(field.cast("binary"), 15, 16)
            within = last >= bytes([low])
            return within & (last < bytes([high])) if high < 256 else within
