"""Comparison of rows recomputed from the log with the stored ones."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import polars as pl

from postroom.projections.ports.read_model_store import RowReader
from postroom.projections.projection import Projection

IDS_PER_STATEMENT = 10_000
MAX_CHARS = 200
"""Maximum length of a value in a report."""


class Difference(msgspec.Struct, frozen=True):
    """A stored row that differs from the recomputed one.

    Arguments:
        key: key columns of the row.
        column: the first column that differs; None when the whole row is missing or extra.
        stored, recomputed: the values of the column, or `a row` and `no row`.
    """

    key: dict[str, Any]
    column: str | None
    stored: str
    recomputed: str


class Comparison(msgspec.Struct, frozen=True):
    """Result of comparing the rows of a model.

    Arguments:
        rows: number of recomputed rows.
        missing, extra, different: number of rows that are not stored, stored but not recomputed, and stored
            with other values.
        first: first difference in the order of the key.
    """

    rows: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    first: Difference | None = None

    def plus(self, other: "Comparison") -> "Comparison":
        """Return the combined result."""
        firsts = [each.first for each in (self, other) if each.first is not None]
        return Comparison(
            self.rows + other.rows,
            self.missing + other.missing,
            self.extra + other.extra,
            self.different + other.different,
            min(firsts, key=lambda first: tuple(first.key.values()), default=None),
        )


def rows_by_id(reader: RowReader, projection: Projection, ids: Sequence[int]) -> pl.DataFrame:
    """Return the stored rows of messages with these ids."""
    chunks = (ids[at : at + IDS_PER_STATEMENT] for at in range(0, len(ids), IDS_PER_STATEMENT))
    frames = [reader.rows(projection, f"id IN ({', '.join(map(str, chunk))})") for chunk in chunks]
    return pl.concat([pl.DataFrame(schema=projection.schema), *frames])


def compare_rows(
    projection: Projection, recomputed_rows: pl.DataFrame, stored_rows: pl.DataFrame
) -> Comparison:
    """Compare stored rows with recomputed rows; in both, a key occurs at most once."""
    if recomputed_rows.height == stored_rows.height and recomputed_rows.sort(*projection.key).equals(
        stored_rows.sort(*projection.key)
    ):
        return Comparison(recomputed_rows.height)
    key = projection.key
    others = [name for name in projection.schema if name not in key]
    is_missing, is_extra = pl.col("is_stored").is_null(), pl.col("is_recomputed").is_null()
    differs = [pl.col(name).ne_missing(pl.col(f"{name}_stored")) for name in others]
    pairs = recomputed_rows.with_columns(is_recomputed=1).join(
        stored_rows.with_columns(is_stored=1), key, "full", suffix="_stored", coalesce=True
    )
    differences = pairs.filter(pl.any_horizontal(is_missing, is_extra, *differs)).sort(*key)
    missing, extra = differences.filter(is_missing).height, differences.filter(is_extra).height
    first = _difference(key, others, differences.row(0, named=True)) if differences.height else None
    return Comparison(recomputed_rows.height, missing, extra, differences.height - missing - extra, first)


def describe_changes(
    projection: Projection, added: int, removed: int, changed: int, first: Sequence[object], version: int
) -> str:
    """Return a sentence about the rows of a model that differ from those of another version.

    Arguments:
        first: key of the first one.
        version: the other version.
    """
    key = ", ".join(f"{column} {value}" for column, value in zip(projection.key, first, strict=True))
    rows = f"{added:,} added, {removed:,} removed and {changed:,} changed"
    return f"{projection.name}: {rows} since version {version}; the first row has {key}"


def _difference(key: Iterable[str], others: Iterable[str], row: dict[str, Any]) -> Difference:
    key_values = {name: row[name] for name in key}
    if row["is_stored"] is None:
        return Difference(key_values, None, "no row", "a row")
    if row["is_recomputed"] is None:
        return Difference(key_values, None, "a row", "no row")
    column = next(name for name in others if row[name] != row[f"{name}_stored"])
    return Difference(key_values, column, _abbreviate(row[f"{column}_stored"]), _abbreviate(row[column]))


def _abbreviate(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."
