"""Projections: what a read model is made of, and where all of them are found.

A projection is one file under `projections/models`, or a module named in `POSTROOM_PROJECTIONS`, that defines
`PROJECTION`: its columns, its fold over frames of log records or of messages, and the same fold once more in
plain Python, which tests hold the first to.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal, NamedTuple

import polars as pl

from postroom.domain.errors import InvalidRequest
from postroom.domain.record import Record
from postroom.projections.cut import MailboxCut

MODULES = "POSTROOM_PROJECTIONS"
"""The environment variable that names further modules, separated by commas."""

Type = Literal["int", "text", "bytes"]
Merge = Literal["key", "sum", "min", "max", "replace"]
Row = dict[str, Any]

POLARS: dict[Type, pl.DataType] = {"int": pl.Int64(), "text": pl.String(), "bytes": pl.Binary()}


class Column(NamedTuple):
    """Describe a column of a read model.

    Arguments:
        merge: `key` names the row; rows of one key become one by the `sum`, `min` or `max` of this column, or
            the later row's value replaces the earlier one's.
        required: it is never null; keys and sums never are.
    """

    name: str
    type: Type = "text"
    merge: Merge = "replace"
    required: bool = False


@dataclass(frozen=True)
class Projection:
    """Describe a read model: the name of its table, its columns, and which of them are indexed together."""

    name: str
    columns: tuple[Column, ...]
    indexes: tuple[tuple[str, ...], ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """Return the columns that name a row."""
        return tuple(column.name for column in self.columns if column.merge == "key")

    @property
    def schema(self) -> dict[str, pl.DataType]:
        """Return the columns' names and types, as polars has them."""
        return {column.name: POLARS[column.type] for column in self.columns}


@dataclass(frozen=True)
class EventProjection(Projection):
    """A read model of log records, whose rows merge: those of any split of a log amount to those of the whole.

    Arguments:
        reads: which columns of the log `fold` sees (see `projections/source.py`). What followed a message's
            sending has the `topic` and the `shard` of the sending.
        fold: takes records, and returns rows, one a key.
        reference: takes one record with its mailbox's cut, and returns rows, to be merged.
    """

    reads: tuple[str, ...] = ()
    fold: Callable[[pl.DataFrame], pl.DataFrame] = lambda records: records
    reference: Callable[[MailboxCut, Record], Iterable[Row]] = lambda cut, record: ()


@dataclass(frozen=True)
class MessageProjection(Projection):
    """A read model of the messages that are not settled: ready, delayed, in flight or dead.

    Arguments:
        derive: takes rows of the `mailbox` table, and returns rows, one a key.
        reference: the same, of one row.
    """

    derive: Callable[[pl.DataFrame], pl.DataFrame] = lambda messages: messages
    reference: Callable[[Row], Iterable[Row]] = lambda message: ()


@lru_cache(maxsize=1)
def projections() -> dict[str, Projection]:
    """Return every projection there is by its name, the messages first.

    Raises: InvalidRequest when a module named in `POSTROOM_PROJECTIONS` is none.
    """
    from postroom.projections import models

    own = sorted(f"{models.__name__}.{module.name}" for module in iter_modules(models.__path__))
    others = [name.strip() for name in os.environ.get(MODULES, "").split(",") if name.strip()]
    found = [_load(name) for name in (*own, *others)]
    found.sort(key=lambda projection: isinstance(projection, EventProjection | MessageProjection))
    by_name = {projection.name: projection for projection in found}
    if len(by_name) < len(found):
        names = sorted(projection.name for projection in found)
        twice = next(name for name, other in zip(names, names[1:], strict=False) if name == other)
        raise InvalidRequest(f"Two projections are named {twice}; rename the one in {MODULES}.")
    return by_name


def merge_rows(projection: Projection, rows: pl.DataFrame) -> pl.DataFrame:
    """Return one row a key, made of all rows with that key as the columns say.

    Arguments:
        rows: earlier ones before later ones.
    """
    how = {"sum": pl.Expr.sum, "min": pl.Expr.min, "max": pl.Expr.max, "replace": pl.Expr.last}
    merged = [how[each.merge](pl.col(each.name)) for each in projection.columns if each.merge != "key"]
    return rows.group_by(*projection.key).agg(*merged).select(*projection.schema)


def merge_reference(projection: Projection, rows: Iterable[Row]) -> list[Row]:
    """Return one row a key, in the order of the keys; what `merge_rows` does, in plain Python."""
    merged: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in projection.key)
        known = merged.get(key)
        merged[key] = row if known is None else _merge(projection.columns, known, row)
    return [merged[key] for key in sorted(merged)]


def _merge(columns: Sequence[Column], known: Row, row: Row) -> Row:
    return {column.name: _merged(column, known[column.name], row[column.name]) for column in columns}


def _merged(column: Column, known: Any, value: Any) -> Any:
    if column.merge in ("key", "replace"):
        return value
    if known is None or value is None:
        return value if known is None else known
    if column.merge == "sum":
        return known + value
    return min(known, value) if column.merge == "min" else max(known, value)


def _load(name: str) -> Projection:
    try:
        projection = import_module(name).PROJECTION
    except (ImportError, AttributeError) as error:
        raise InvalidRequest(
            f"The projection {name} can't be loaded: {error}. {MODULES} names modules that Python finds "
            "and that define PROJECTION."
        ) from error
    if not isinstance(projection, Projection):
        raise InvalidRequest(f"PROJECTION of the module {name} is no Projection; make it one.")
    return projection
