"""Conditions on columns of the log, which readers apply to commits; a null meets none."""

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow.compute as pc


@dataclass(frozen=True)
class IsIn:
    """Condition: the column has one of these values, of which there is at least one."""

    column: str
    values: tuple[int | str, ...]


@dataclass(frozen=True)
class Bucket:
    """Condition: the last byte of a 16-byte id (practically random) is at least `low` and below `high`."""

    column: str
    low: int
    high: int


Condition = IsIn | Bucket


def may_match(where: Iterable[Condition], event: str | None) -> bool:
    """Return whether events of a type can meet conditions.

    Arguments:
        event: name of the type; None if it differs from event to event.
    """
    types = [each.values for each in where if isinstance(each, IsIn) and each.column == "event"]
    return event is None or all(event in values for values in types)


def to_arrow(condition: Condition) -> pc.Expression:
    """Return a condition as an Arrow expression."""
    field = pc.field(condition.column)
    match condition:
        case IsIn(_, values):
            return field.isin(list(values))
        case Bucket(_, low, high):
            last = pc.binary_slice(field.cast("binary"), 15, 16)
            within = last >= bytes([low])
            return within & (last < bytes([high])) if high < 256 else within
