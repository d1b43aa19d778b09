"""What Spark's tasks do: read a part of the log, fold it in frames, and hand it to the sink.

Spark schedules, distributes and retries them; no row goes through its JVM.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl
import pyarrow as pa

from postroom.projections.fold import MESSAGES, Folded, columns_read, fold_pieces, fold_range
from postroom.projections.logs import Log
from postroom.projections.logs.columns import arrow_schema
from postroom.projections.models.messages import Parked
from postroom.projections.parking import parking
from postroom.projections.projection import Projection
from postroom.projections.sinks import Part, Plan, Writer


class Work(NamedTuple):
    """What tasks did: records read, rows written, and seconds taken, each summed over all tasks."""

    records: int = 0
    rows: int = 0
    read: float = 0.0
    fold: float = 0.0
    write: float = 0.0

    def plus(self, other: "Work") -> "Work":
        """Return the work of both."""
        return Work(
            self.records + other.records,
            self.rows + other.rows,
            self.read + other.read,
            self.fold + other.fold,
            self.write + other.write,
        )


@dataclass(frozen=True)
class Folding:
    """How tasks fold; it is sent to them, where nothing shows it.

    Arguments:
        log: of the store.
        wanted: the projections that are folded.
    """

    log: Log
    plan: Plan
    wanted: Mapping[str, Projection]

    def read(self, part: Part) -> pl.DataFrame:
        """Return the records of ranges of the log, as far as they are folded."""
        columns = columns_read(parking(self.wanted, []))
        batches = self.log.read(part.ranges, columns)
        records = pl.from_arrow(pa.Table.from_batches(batches, arrow_schema(columns)))
        assert isinstance(records, pl.DataFrame)
        return records

    def fold(self, part: Part, records: pl.DataFrame) -> Folded:
        """Return what ranges of the log tell."""
        parked: list[Parked] = []
        wanted = parking(self.wanted, parked)
        folded = fold_range(records, wanted, [each.cut for each in part.ranges])
        folded.parked += parked
        return folded

    def fold_rest(self, pieces: Mapping[str, pl.DataFrame]) -> Folded:
        """Return what all pieces of some messages tell.

        Messages whose records retention began to remove while the log was read are left out: their later
        events may have gone before they were read, so what was folded of them is not certain.
        """
        partials = pieces[MESSAGES]
        for before, after in self.plan.removed or ():
            partials = partials.filter(
                ~pl.col("id").is_between(before, after, closed="left").fill_null(False)
            )
        parked: list[Parked] = []
        folded = fold_pieces({**pieces, MESSAGES: partials}, parking(self.wanted, parked), self.plan.cuts)
        folded.parked += parked
        return folded


@dataclass(frozen=True)
class Job(Folding):
    """What the tasks of a rebuild do.

    Arguments:
        writer: of the version that is built.
    """

    writer: Writer

    def fold_part(self, part: Part) -> Work:
        """Fold ranges of the log and write what they tell, unless that was done before."""
        if self.writer.is_done(part.name):
            return Work()
        with _timed() as read:
            records = self.read(part)
        with _timed() as fold:
            folded = self.fold(part, records)
        return self._written(part, folded, Work(records.height, read=read[0], fold=fold[0]))

    def fold_bucket(self, part: Part) -> Work:
        """Fold what the ranges left over of a bucket's messages and write it, unless that was done before."""
        if self.writer.is_done(part.name):
            return Work()
        assert part.bucket is not None
        with _timed() as read:
            pieces = self.writer.pieces(part.bucket)
        with _timed() as fold:
            folded = self.fold_rest(pieces)
        return self._written(part, folded, Work(read=read[0], fold=fold[0]))

    def _written(self, part: Part, folded: Folded, work: Work) -> Work:
        with _timed() as write:
            rows = self.writer.write(part.name, folded)
        return work._replace(rows=rows, write=write[0])


@contextmanager
def _timed() -> Iterator[list[float]]:
    """Yield a list that has the seconds taken when the context is over."""
    seconds: list[float] = []
    began = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - began)
