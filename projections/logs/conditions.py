"""Conditions on stored columns of the log, for stores that speak SQL and for Parquet alike.

As in SQL, a condition on a null is neither true nor false, and so is its negation: such records are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pyarrow.compute as pc

Value = int | str
Operator = Literal["<", "<=", ">", ">="]


@dataclass(frozen=True)
class IsIn:
    """A column has one of these values; there is at least one."""

    column: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class StartsWith:
    """A text begins with a prefix, character by character."""

    column: str
    prefix: str


@dataclass(frozen=True)
class Compare:
    """A number stands so to a value."""

    column: str
    operator: Operator
    value: int


@dataclass(frozen=True)
class IsNull:
    """A column is absent."""

    column: str


@dataclass(frozen=True)
class Not:
    """A condition does not hold."""

    condition: "IsIn | StartsWith | Compare | IsNull"

    @property
    def column(self) -> str:
        """Return the column that it is about."""
        return self.condition.column


@dataclass(frozen=True)
class Bucket:
    """The last byte of a 16-byte id, which is as good as random, is at least `low` and below `high`."""

    column: str
    low: int
    high: int


Condition = IsIn | StartsWith | Compare | IsNull | Not | Bucket


def to_sql(condition: Condition, bytes_literal: Callable[[bytes], str]) -> str:
    """Return a condition in SQL, the same for SQLite and PostgreSQL but for how they write bytes."""
    match condition:
        case IsIn(column, values):
            return f"{column} IN ({', '.join(map(literal, values))})"
        case StartsWith(column, prefix):
            return f"substr({column}, 1, {len(prefix)}) = {literal(prefix)}"
        case Compare(column, operator, value):
            return f"{column} {operator} {literal(value)}"
        case IsNull(column):
            return f"{column} IS NULL"
        case Not(inner):
            return f"NOT ({to_sql(inner, bytes_literal)})"
        case Bucket(column, low, high):
            last = f"substr({column}, 16, 1)"
            below = f" AND {last} < {bytes_literal(bytes([high]))}" if high < 256 else ""
            return f"({last} >= {bytes_literal(bytes([low]))}{below})"


def to_arrow(condition: Condition) -> pc.Expression:
    """Return a condition as an Arrow expression."""
    field = pc.field(condition.column)
    match condition:
        case IsIn(_, values):
            return field.is_valid() & field.isin(list(values))  # Arrow finds that null is not among them
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


def literal(value: Value) -> str:
    """Return a number or text in SQL."""
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"
