"""Projections: definitions of read models, and how they are loaded.

A projection is one file under `projections/models`, or a module named in `POSTROOM_PROJECTIONS`, that defines
`PROJECTION`: the columns of a read model, and its fold over frames of log records or of messages.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from pkgutil import iter_modules
from typing import Any, Literal, NamedTuple

import polars as pl
import pyarrow as pa

from postroom.domain.errors import BrokenProjection, InvalidRequest
from postroom.domain.message import Headers

LONG, TEXT, BYTES = pa.int64(), pa.string(), pa.binary()

HEADER_COLUMNS: dict[str, pa.DataType] = {
    name: LONG if name == "timestamp" else TEXT for name in Headers.__struct_fields__
}
"""Headers of a `MessageSent`; `custom_headers` is a JSON object, null when it is empty."""

EVENT_COLUMNS: dict[str, pa.DataType] = {
    "stream": BYTES,
    "version": LONG,
    "epoch": LONG,
    "event": TEXT,
    "at": LONG,
    "chain": BYTES,
    "topic": TEXT,
    "shard": LONG,
    "attempt": LONG,
    "due": LONG,
    "expires_at": LONG,
    "reason": TEXT,
    "last_error": TEXT,
    "consumer": TEXT,
    "capability": TEXT,
    "priority": LONG,
    "size": LONG,
    "idem_key": TEXT,
    "sticky_key": TEXT,
    "unique_key": TEXT,
    "copy_of": TEXT,
    "note": TEXT,
    "result": BYTES,
    "result_type": TEXT,
    "traceback": BYTES,
    "payload_hash": BYTES,
    "hash_chain": BYTES,
    "envelope_hash": BYTES,
    **HEADER_COLUMNS,
    "envelope": BYTES,
}
"""The columns of an event, null where its type has no such field.

`event` is the name of its type; `epoch`, `at` and `chain` are its commit's; `envelope_hash` is the BLAKE3 of
the envelope. `principal` is the message's, or the consumer of a delivery.
"""

COLUMNS: dict[str, pa.DataType] = {
    "place": LONG,
    "position": LONG,
    "mailbox_id": LONG,
    "mailbox": TEXT,
    "as_of": LONG,
    "distance": LONG,
    **EVENT_COLUMNS,
}
"""All columns that can be read; `as_of` is the log time (µs) at the end of the mailbox's extent.

`distance` is how many positions before an event the previous one of its message is, or 0.
"""

SENT_COLUMNS = {
    "sent_position": ("position", LONG),
    "sent_at": ("at", LONG),
    "sent_message_id": ("message_id", TEXT),
    "event_topic": ("topic", TEXT),
    "event_shard": ("shard", LONG),
}
"""Columns with values of the `MessageSent` of an event's message: their sources and types.

Topic and shard of an event of the mailbox are its own, so that a reader can filter all events by them. Only
segments have these columns; see `LogReader.divide`.
"""
_TYPES = COLUMNS | {name: type_ for name, (_, type_) in SENT_COLUMNS.items()}


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of columns of `COLUMNS` and `SENT_COLUMNS`."""
    return pa.schema([(name, _TYPES[name]) for name in columns])


MODULES = "POSTROOM_PROJECTIONS"
"""The environment variable that names further modules, separated by commas."""

Type = Literal["int", "text", "bytes"]
Merge = Literal["key", "sum", "min", "max", "replace"]
Row = dict[str, Any]
Fold = Callable[[pl.DataFrame], pl.DataFrame]

POLARS: dict[Type, pl.DataType] = {"int": pl.Int64(), "text": pl.String(), "bytes": pl.Binary()}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}\Z")
_RESERVED = ("header", "pieces", "projection", "text", "topic", "word")
"""First words of the names of Postroom's own tables."""


class Column(NamedTuple):
    """A column of a read model.

    Arguments:
        name: letters, digits and `_`.
        type: of its values.
        merge: how rows with the same key are merged: `key` for key columns, else `sum`, `min`, `max`, or
            `replace` by the later row's value (not for `EventProjection`).
        required: whether the column is NOT NULL; keys and sums always are.
        in_sql: whether the tables of SQL databases have it; queries read other columns from the log.
    """

    name: str
    type: Type = "text"
    merge: Merge = "replace"
    required: bool = False
    in_sql: bool = True

    @property
    def is_required(self) -> bool:
        """Tell whether the column is NOT NULL."""
        return self.required or self.merge in ("key", "sum")


@dataclass(frozen=True)
class Projection:
    """A read model: the name of its table, its columns, and its indexes as tuples of columns."""

    name: str
    columns: tuple[Column, ...]
    indexes: tuple[tuple[str, ...], ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """Return the columns that identify a row."""
        return tuple(column.name for column in self.columns if column.merge == "key")

    @property
    def stored_schema(self) -> dict[str, pl.DataType]:
        """Return the columns of SQL databases, as `schema`."""
        return {column.name: POLARS[column.type] for column in self.columns if column.in_sql}

    @property
    def schema(self) -> dict[str, pl.DataType]:
        """Return the columns' names and polars types."""
        return {column.name: POLARS[column.type] for column in self.columns}


@dataclass(frozen=True)
class EventProjection(Projection):
    """A read model of log records; the merged rows do not depend on how the log is split.

    Arguments:
        columns: of its table; those of its key are merged by.
        indexes: columns of each index.
        reads: the columns of the log that `fold` reads (see `projections/projection.py`). Records of
            a message have the `topic` and `shard` of its `MessageSent`.
        fold: takes records and returns rows; rows with the same key are merged.
    """

    reads: tuple[str, ...] = ()
    fold: Fold = lambda records: records


@dataclass(frozen=True)
class MessageProjection(Projection):
    """A read model of the unsettled messages: ready, delayed, in flight or dead.

    A key column named like a column of `mailbox` must have the message's value.

    Arguments:
        columns: of its table.
        indexes: columns of each index.
        derive: takes their rows of the `mailbox` table without `envelope_blob`, which SQL databases do not
            store, and returns rows; rows with the same key are merged.
    """

    derive: Fold = lambda messages: messages


def load_projections() -> dict[str, Projection]:
    """Return all projections by name, messages first.

    Raises: InvalidRequest when a module named in `POSTROOM_PROJECTIONS` defines no valid projection.
    """
    return dict(_projections(os.environ.get(MODULES, "")))


@lru_cache(maxsize=8)
def _projections(modules: str) -> dict[str, Projection]:
    models = import_module(f"{__package__}.models")
    own = sorted(f"{models.__name__}.{module.name}" for module in iter_modules(models.__path__))
    others = [name.strip() for name in modules.split(",") if name.strip()]
    loaded_projections = [_load(name) for name in (*own, *others)]
    loaded_projections.sort(
        key=lambda projection: isinstance(projection, EventProjection | MessageProjection)
    )
    by_name = {projection.name: projection for projection in loaded_projections}
    if len(by_name) < len(loaded_projections):
        names = sorted(projection.name for projection in loaded_projections)
        duplicate = next(name for name, other in pairwise(names) if name == other)
        raise InvalidRequest(f"Two projections are named {duplicate}; rename the one in {MODULES}.")
    return by_name


def run_fold(projection: Projection, fold: Fold, frame: pl.DataFrame) -> pl.DataFrame:
    """Run a fold of a projection on a frame, and return its rows merged by key.

    Raises: BrokenProjection when it fails, or when its rows do not match the declared columns.
    """
    rows = run_checked(projection, fold, frame)
    try:
        return merge_rows(projection, rows)
    except Exception as error:
        raise _broken_projection(projection, f"failed with {type(error).__name__}: {error}") from error


def run_checked(projection: Projection, fold: Fold, frame: pl.DataFrame) -> pl.DataFrame:
    """Run a fold as `run_fold` does, without merging its rows."""
    try:
        rows = fold(frame)
        if problem := _problem(projection, rows):
            raise _broken_projection(projection, f"returned {problem}", _describe_columns(projection))
        if rows.schema == projection.schema:
            return rows
        return rows.select(*projection.schema).cast(pl.Schema(projection.schema))
    except BrokenProjection:
        raise
    except Exception as error:
        raise _broken_projection(projection, f"failed with {type(error).__name__}: {error}") from error


def merge_rows(projection: Projection, rows: pl.DataFrame) -> pl.DataFrame:
    """Return one row for each key, merged from all rows with that key.

    Arguments:
        rows: rows in order, earlier ones first.
    """
    if rows.height < 2:
        return rows if rows.schema == projection.schema else rows.select(*projection.schema)
    expressions = {"sum": pl.Expr.sum, "min": pl.Expr.min, "max": pl.Expr.max, "replace": pl.Expr.last}
    aggregates = [
        expressions[each.merge](pl.col(each.name)) for each in projection.columns if each.merge != "key"
    ]
    return rows.group_by(*projection.key).agg(*aggregates).select(*projection.schema)


def _problem(projection: Projection, rows: object) -> str | None:
    if not isinstance(rows, pl.DataFrame):
        return f"a {type(rows).__name__} instead of a polars DataFrame"
    types = rows.schema
    if types.keys() != projection.schema.keys():
        return f"the columns {', '.join(rows.columns)}"
    for column in projection.columns:
        type_ = types[column.name]
        if not _fits(type_, column.type):
            return f"the column {column.name} as {type_}"
        if column.is_required and rows[column.name].null_count():
            return f"nulls in the column {column.name}"
    return None


def _fits(actual: pl.DataType, declared: Type) -> bool:
    if actual == pl.Null or actual == POLARS[declared]:
        return True
    # pl.len() is unsigned, and text may be categorical: both convert without loss.
    return (
        actual.is_integer()
        if declared == "int"
        else actual in (pl.Categorical, pl.Enum) and declared == "text"
    )


def _describe_columns(projection: Projection) -> str:
    columns = ", ".join(
        f"{each.name} ({each.type}{', never null' if each.is_required else ''})"
        for each in projection.columns
    )
    return f"make it return {columns}"


def _broken_projection(
    projection: Projection, what: str, remedy: str = "fix it, and run this again"
) -> BrokenProjection:
    return BrokenProjection(f"The fold of the projection {projection.name} {what}; {remedy}.")


def _load(name: str) -> Projection:
    try:
        projection = import_module(name).PROJECTION
    except Exception as error:  # a user's module may raise anything
        raise InvalidRequest(
            f"The projection {name} can't be loaded: {error}. {MODULES} must name importable modules that "
            "define PROJECTION."
        ) from error
    if not isinstance(projection, Projection):
        raise InvalidRequest(f"PROJECTION of the module {name} is not a Projection; make it one.")
    if problem := _defect(projection):
        raise InvalidRequest(f"The projection of the module {name} {problem}.")
    return projection


def _defect(projection: Projection) -> str | None:
    """Return the problem of a projection, or None."""
    names = [column.name for column in projection.columns]
    invalid = next((name for name in (projection.name, *names) if not _NAME.match(name)), None)
    if invalid is not None:
        return f"has the name {invalid!r}; write up to 40 lower-case letters, digits and _"
    if projection.name.split("_")[0] in _RESERVED:
        return f"has the name {projection.name}, which is reserved for Postroom's own tables; rename it"
    if len(set(names)) < len(names):
        return "has two columns with the same name; rename one"
    if not projection.key:
        return "has no key; give at least one column merge='key'"
    unknown = {name for index in projection.indexes for name in index} - set(names)
    if unknown:
        return f"indexes {', '.join(sorted(unknown))}, which is not one of its columns; add it"
    if isinstance(projection, EventProjection):
        unknown = set(projection.reads) - COLUMNS.keys()
        if unknown:
            return f"reads {', '.join(sorted(unknown))}, but the log only has {', '.join(COLUMNS)}"
        if any(column.merge == "replace" for column in projection.columns):
            return "has columns without merge; use key, sum, min or max, because its rows come in any order"
    return None
