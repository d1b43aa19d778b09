"""Projections: what a read model is made of, and where all of them are found.

A projection is one file under `projections/models`, or a module named in `POSTROOM_PROJECTIONS`, that defines
`PROJECTION`: its columns, its fold over frames of log records or of messages, and the same fold once more in
plain Python, which tests hold the first to.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from pkgutil import iter_modules
from typing import Any, Literal, NamedTuple

import polars as pl

from postroom.domain.errors import BrokenProjection, InvalidRequest
from postroom.domain.record import Record
from postroom.projections.cut import MailboxCut
from postroom.projections.logs.columns import COLUMNS

MODULES = "POSTROOM_PROJECTIONS"
"""The environment variable that names further modules, separated by commas."""

Type = Literal["int", "text", "bytes"]
Merge = Literal["key", "sum", "min", "max", "replace"]
Row = dict[str, Any]

POLARS: dict[Type, pl.DataType] = {"int": pl.Int64(), "text": pl.String(), "bytes": pl.Binary()}
_PYTHON: dict[Type, type] = {"int": int, "text": str, "bytes": bytes}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}\Z")
_TAKEN = ("header", "pieces", "projection", "text", "topic", "word")
"""Beginnings of the names of tables that belong to no projection."""


class Column(NamedTuple):
    """Describe a column of a read model.

    Arguments:
        merge: `key` names the row; rows of one key become one by the `sum`, `min` or `max` of this column, or
            the later row's value replaces the earlier one's, which is for rows of single messages only.
        required: it is never null; keys and sums never are.
    """

    name: str
    type: Type = "text"
    merge: Merge = "replace"
    required: bool = False

    @property
    def is_required(self) -> bool:
        """Return whether it is never null."""
        return self.required or self.merge in ("key", "sum")


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
    """A read model of log records, whose rows merge: those of any split of a log amount to the whole's.

    Arguments:
        reads: which columns of the log `fold` sees (see `projections/source.py`). What followed a message's
            sending has the `topic` and the `shard` of the sending.
        fold: takes records, and returns rows; those of one key are merged.
        reference: takes one record with its mailbox's cut, and returns rows, to be merged.
    """

    reads: tuple[str, ...] = ()
    fold: Callable[[pl.DataFrame], pl.DataFrame] = lambda records: records
    reference: Callable[[MailboxCut, Record], Iterable[Row]] = lambda cut, record: ()


@dataclass(frozen=True)
class MessageProjection(Projection):
    """A read model of the messages that are not settled: ready, delayed, in flight or dead.

    A column of its key that is named as one of the messages' has the message's value.

    Arguments:
        derive: takes rows of the `mailbox` table, and returns rows; those of one key are merged.
        reference: the same, of one row.
    """

    derive: Callable[[pl.DataFrame], pl.DataFrame] = lambda messages: messages
    reference: Callable[[Row], Iterable[Row]] = lambda message: ()


def projections() -> dict[str, Projection]:
    """Return every projection there is by its name, the messages first.

    Raises: InvalidRequest when a module named in `POSTROOM_PROJECTIONS` is none.
    """
    return dict(_projections(os.environ.get(MODULES, "")))


@lru_cache(maxsize=8)
def _projections(modules: str) -> dict[str, Projection]:
    models = import_module(f"{__package__}.models")
    own = sorted(f"{models.__name__}.{module.name}" for module in iter_modules(models.__path__))
    others = [name.strip() for name in modules.split(",") if name.strip()]
    found = [_load(name) for name in (*own, *others)]
    found.sort(key=lambda projection: isinstance(projection, EventProjection | MessageProjection))
    by_name = {projection.name: projection for projection in found}
    if len(by_name) < len(found):
        names = sorted(projection.name for projection in found)
        twice = next(name for name, other in pairwise(names) if name == other)
        raise InvalidRequest(f"Two projections are named {twice}; rename the one in {MODULES}.")
    return by_name


def checked(
    projection: Projection, fold: Callable[[pl.DataFrame], pl.DataFrame], frame: pl.DataFrame
) -> pl.DataFrame:
    """Return what a projection's fold makes of a frame, one row a key.

    Raises: BrokenProjection when it fails, or when its rows are not what the projection declares.
    """
    try:
        rows = fold(frame)
        if problem := _problem(projection, rows):
            raise _broken(projection, f"returned {problem}", _declared(projection))
        return merge_rows(projection, rows.select(*projection.schema).cast(pl.Schema(projection.schema)))
    except BrokenProjection:
        raise
    except Exception as error:
        raise _broken(projection, f"failed with {type(error).__name__}: {error}") from error


def checked_reference(projection: Projection, reference: Callable[..., Iterable[Row]], *of: Any) -> list[Row]:
    """Return what a projection's reference fold makes of a record or a message.

    Raises: BrokenProjection when it fails, or when its rows are not what the projection declares.
    """
    try:
        rows = list(reference(*of))
        for row in rows:
            if row.keys() != projection.schema.keys() or not all(
                isinstance(
                    row[each.name], _PYTHON[each.type] if each.is_required else _PYTHON[each.type] | None
                )
                for each in projection.columns
            ):
                raise _broken(projection, f"returned {row!r}", _declared(projection))
    except BrokenProjection:
        raise
    except Exception as error:
        raise _broken(projection, f"failed with {type(error).__name__}: {error}") from error
    return rows


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


def _problem(projection: Projection, rows: object) -> str | None:
    if not isinstance(rows, pl.DataFrame):
        return f"a {type(rows).__name__}, no polars DataFrame"
    if set(rows.columns) != set(projection.schema):
        return f"the columns {', '.join(rows.columns)}"
    for column in projection.columns:
        type_ = rows.schema[column.name]
        if not _fits(type_, column.type):
            return f"the column {column.name} as {type_}"
        if column.is_required and rows[column.name].null_count():
            return f"nulls in the column {column.name}"
    return None


def _fits(found: pl.DataType, declared: Type) -> bool:
    if found == pl.Null or found == POLARS[declared]:
        return True
    # pl.len() is unsigned, and texts of few values may be categories: both say the same.
    return (
        found.is_integer() if declared == "int" else found in (pl.Categorical, pl.Enum) and declared == "text"
    )


def _declared(projection: Projection) -> str:
    columns = ", ".join(
        f"{each.name} ({each.type}{', never null' if each.is_required else ''})"
        for each in projection.columns
    )
    return f"make it return {columns}"


def _broken(
    projection: Projection, what: str, remedy: str = "mend it, and run this again"
) -> BrokenProjection:
    return BrokenProjection(f"The fold of the projection {projection.name} {what}; {remedy}.")


def _load(name: str) -> Projection:
    try:
        projection = import_module(name).PROJECTION
    except Exception as error:  # it may be anybody's module
        raise InvalidRequest(
            f"The projection {name} can't be loaded: {error}. {MODULES} names modules that Python finds "
            "and that define PROJECTION."
        ) from error
    if not isinstance(projection, Projection):
        raise InvalidRequest(f"PROJECTION of the module {name} is no Projection; make it one.")
    if problem := _flaw(projection):
        raise InvalidRequest(f"The projection of the module {name} {problem}.")
    return projection


def _flaw(projection: Projection) -> str | None:
    """Return what keeps a projection from being one, if anything does."""
    names = [column.name for column in projection.columns]
    wrong = next((name for name in (projection.name, *names) if not _NAME.match(name)), None)
    if wrong is not None:
        return f"has the name {wrong!r}; write up to 40 lower-case letters, digits and _"
    if projection.name.split("_")[0] in _TAKEN:
        return f"is named {projection.name}, as tables of Postroom are; rename it"
    if len(set(names)) < len(names):
        return "has two columns of one name; rename one"
    if not projection.key:
        return "has no key; give at least one column merge='key'"
    unknown = {name for index in projection.indexes for name in index} - set(names)
    if unknown:
        return f"indexes {', '.join(sorted(unknown))}, which it has no column for; add one"
    if isinstance(projection, EventProjection):
        unknown = set(projection.reads) - COLUMNS.keys()
        if unknown:
            return f"reads {', '.join(sorted(unknown))}, which the log has not; it has {', '.join(COLUMNS)}"
        if any(column.merge == "replace" for column in projection.columns):
            return "has columns without merge; say key, sum, min or max, as its rows come in any order"
    return None
