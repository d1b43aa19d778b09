"""Conditions on stored columns of the log, which readers translate into SQL or Arrow.

As in SQL, a condition on a null is neither true nor false, and neither is its negation: such records do not
match.
"""

from dataclasses import dataclass
from typing import Literal

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
