"""Comparing: what was recomputed from the log, held against the rows that are served."""

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import polars as pl

from postroom.adapters.postgres.url import is_url
from postroom.application.ports.read_models import views_path
from postroom.projections.projection import Projection
from postroom.projections.sinks import Served

IDS_PER_STATEMENT = 10_000
MAX_CHARS = 200
"""Of a value that is shown."""


class Difference(msgspec.Struct, frozen=True):
    """Say where a served row is not what the log amounts to.

    Arguments:
        key: of the row, its columns by name.
        column: which; None when the whole row is missing or too many.
        served, recomputed: the column's values, or whether the row is there.
    """

    key: dict[str, Any]
    column: str | None
    served: str
    recomputed: str


class Finding(msgspec.Struct, frozen=True):
    """Say what comparing rows of a model showed.

    Arguments:
        rows: how many were recomputed.
        missing, extra, different: how many of them are not served, are served without being recomputed, and
            are served with other values.
        first: by the order of the key.
    """

    rows: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    first: Difference | None = None

    def plus(self, other: "Finding") -> "Finding":
        """Return what both show."""
        firsts = [each.first for each in (self, other) if each.first is not None]
        return Finding(
            self.rows + other.rows,
            self.missing + other.missing,
            self.extra + other.extra,
            self.different + other.different,
            min(firsts, key=lambda first: tuple(first.key.values()), default=None),
        )


class Reader(Protocol):
    """Read the rows of a version from Spark's tasks; it is sent to them, so it holds no connection."""

    def rows(self, projection: Projection, where: str = "") -> pl.DataFrame:
        """Return the rows of a model, or those for which an SQL condition holds."""


@dataclass(frozen=True)
class SqliteReader:
    """Read from the read-model file of a SQLite store; see `Reader`."""

    store: str
    served: Served

    def rows(self, projection: Projection, where: str = "") -> pl.DataFrame:
        """Return rows; see `Reader.rows`."""
        uri = f"{views_path(self.store).absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            rows = connection.execute(_select(projection, self.served, "", where)).fetchall()
        return pl.DataFrame(rows, schema=projection.schema, orient="row")


@dataclass(frozen=True)
class PostgresReader:
    """Read from a PostgreSQL store; see `Reader`. Its URL, which may hold a password, is not shown."""

    url: str = field(repr=False)
    served: Served

    def rows(self, projection: Projection, where: str = "") -> pl.DataFrame:
        """Return rows; see `Reader.rows`."""
        from postroom.projections.sinks.postgres import fetch

        return fetch(self.url, _select(projection, self.served, "postroom.", where), projection.schema)


def open_reader(store: str, served: Served) -> Reader:
    """Return what reads a version of a store's read models."""
    return PostgresReader(store, served) if is_url(store) else SqliteReader(store, served)


def of_ids(reader: Reader, projection: Projection, ids: Sequence[int]) -> pl.DataFrame:
    """Return the rows of messages with these ids, as far as they are served."""
    chunks = (ids[at : at + IDS_PER_STATEMENT] for at in range(0, len(ids), IDS_PER_STATEMENT))
    frames = [reader.rows(projection, f"id IN ({', '.join(map(str, chunk))})") for chunk in chunks]
    return pl.concat([pl.DataFrame(schema=projection.schema), *frames])


def compared(projection: Projection, recomputed: pl.DataFrame, served: pl.DataFrame) -> Finding:
    """Return how served rows differ from those that were recomputed; each has one row a key."""
    if recomputed.height == served.height and recomputed.sort(*projection.key).equals(
        served.sort(*projection.key)
    ):
        return Finding(recomputed.height)
    key = projection.key
    others = [name for name in projection.schema if name not in key]
    is_missing, is_extra = pl.col("is_served").is_null(), pl.col("is_recomputed").is_null()
    differs = [pl.col(name).ne_missing(pl.col(f"{name}_served")) for name in others]
    joined = recomputed.with_columns(is_recomputed=1).join(
        served.with_columns(is_served=1), key, "full", suffix="_served", coalesce=True
    )
    bad = joined.filter(pl.any_horizontal(is_missing, is_extra, *differs)).sort(*key)
    missing, extra = bad.filter(is_missing).height, bad.filter(is_extra).height
    first = _difference(key, others, bad.row(0, named=True)) if bad.height else None
    return Finding(recomputed.height, missing, extra, bad.height - missing - extra, first)


def _difference(key: Iterable[str], others: Iterable[str], row: dict[str, Any]) -> Difference:
    of = {name: row[name] for name in key}
    if row["is_served"] is None:
        return Difference(of, None, "no row", "a row")
    if row["is_recomputed"] is None:
        return Difference(of, None, "a row", "no row")
    column = next(name for name in others if row[name] != row[f"{name}_served"])
    return Difference(of, column, _shown(row[f"{column}_served"]), _shown(row[column]))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."


def _select(projection: Projection, served: Served, schema: str, where: str) -> str:
    table = f"{schema}{projection.name}_v{served.models[projection.name]}"
    return f"SELECT {', '.join(projection.schema)} FROM {table}{' WHERE ' if where else ''}{where}"
