"""Reading the commits of logs by SQL in any database."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa

from postroom.application.mailbox.compression import decompress
from postroom.domain.commit import Commit
from postroom.projections.commit_columns import to_batches
from postroom.projections.log_conditions import Condition
from postroom.projections.log_extent import Range, split
from postroom.projections.ports.log_reader import POSITIONS_PER_READ

Driver = Literal["auto", "adbc", "python"]
"""ADBC or the database's ordinary Python driver; `auto` uses ADBC if it is installed and safe."""

Rows = Iterator[tuple[Any, ...]]
Select = Callable[[Range, str], Rows]
"""A function that selects the commits of a range in a transaction of its own.

It yields `first`, `last`, `epoch`, `at`, `chain`, `events` and an expression: the column `envelopes`, or `''`.
"""


def read_commits(
    select: Select, ranges: Iterable[Range], columns: Sequence[str], where: Sequence[Condition]
) -> Iterator[pa.RecordBatch]:
    """Yield records of ranges in the order of their positions, by several short statements.

    Arguments:
        columns, where: as for `LogReader.read`.
    """
    envelopes = "envelopes" if "envelope" in columns else "''"
    for range_ in split(ranges, POSITIONS_PER_READ):
        commits = map(_commit, select(range_, envelopes))
        extent, first, last = range_
        yield from _one_ahead(to_batches(commits, extent, columns, where, first=first, last=last))


def _commit(row: tuple[Any, ...]) -> Commit:
    first, last, epoch, at, chain, events, envelopes = row
    envelopes = decompress(envelopes, first) if envelopes else b""
    return Commit(first, last, epoch, at, chain, decompress(events, first), envelopes)


def _one_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield each batch after reading the next one, and the last one after the transaction has ended.

    However slow the consumer is, no cursor, lock or transaction stays open between statements.
    """
    previous = next(batches, None)
    for batch in batches:
        yield previous
        previous = batch
    if previous is not None:
        yield previous


def rows_of(batches: Iterable[pa.RecordBatch]) -> Rows:
    """Yield the rows of batches."""
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
