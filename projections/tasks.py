"""Tasks of a rebuild: read a part of the log, fold it in frames, and write the result.

A `TaskRunner` schedules, distributes and retries them; no rows pass through it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl
import pyarrow as pa

from postroom.application.telemetry import summarize
from postroom.projections.fold import (
    MESSAGES,
    FoldResult,
    columns_read,
    fold_pieces,
    fold_range,
    with_parking,
)
from postroom.projections.log_checks import (
    ENVELOPE_COLUMNS,
    check_chain,
    check_envelopes,
    check_positions,
)
from postroom.projections.log_reader import LogReader
from postroom.projections.models.messages import ParkedRecord
from postroom.projections.plan import Part, Plan
from postroom.projections.ports.read_model_store import PartWriter
from postroom.projections.ports.runner import Key, Pair, Stage
from postroom.projections.projection import Projection, arrow_schema


class Work(NamedTuple):
    """Work of tasks: records read, rows written, and seconds spent, each summed over all tasks."""

    records: int = 0
    rows: int = 0
    read: float = 0.0
    fold: float = 0.0
    write: float = 0.0

    def plus(self, other: "Work") -> "Work":
        """Return the sum."""
        return Work(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class FoldContext:
    """The log and the projections from which tasks fold parts; it is pickled and sent to them.

    Arguments:
        log: reader of the store's log.
        projections: projections to fold, by name.
    """

    log: LogReader
    plan: Plan
    projections: Mapping[str, Projection]

    @property
    def needs_envelopes(self) -> bool:
        """Return whether the rows of messages are computed from envelopes."""
        return False

    def read(self, part: Part) -> pl.DataFrame:
        """Return the log records of a part, with the columns that the projections need.

        Raises: BrokenLog when records are missing or, if the plan says so, were altered.
        """
        columns = columns_read(with_parking(self.projections, []), envelopes=self.needs_envelopes)
        with self.log.connected() as log:
            if self.plan.verify:
                check_chain(log, part.ranges)
                columns = tuple(dict.fromkeys((*columns, *ENVELOPE_COLUMNS)))
            batches = log.read(part.ranges, columns)
            records = pl.DataFrame(pa.Table.from_batches(batches, arrow_schema(columns)))
            if not self.plan.allow_gaps:
                check_positions(log, part.ranges, records["place"])
        if self.plan.verify:
            check_envelopes(part.ranges, records)
        return records

    def fold(self, part: Part, records: pl.DataFrame) -> FoldResult:
        """Fold the records of a part."""
        parked: list[ParkedRecord] = []
        projections = with_parking(self.projections, parked)
        result = fold_range(records, projections, [each.extent for each in part.ranges])
        result.parked += parked
        return result

    def fold_rest(self, pieces: Mapping[str, pl.DataFrame]) -> FoldResult:
        """Fold all pieces of some messages.

        Messages whose `MessageSent` retention removed while the log was read are left out: later events may
        have been removed before they were read.
        """
        partials = pieces[MESSAGES]
        for before, after in self.plan.truncated or ():
            partials = partials.filter(
                ~pl.col("id").is_between(before, after, closed="left").fill_null(False)
            )
        parked: list[ParkedRecord] = []
        projections = with_parking(self.projections, parked)
        result = fold_pieces({**pieces, MESSAGES: partials}, projections, self.plan.extents)
        result.parked += parked
        return result


@dataclass(frozen=True)
class RebuildTasks(FoldContext):
    """Tasks of a rebuild; parts that are already written are skipped.

    Arguments:
        writer: writer of the version that is built.
    """

    writer: PartWriter

    @property
    def needs_envelopes(self) -> bool:
        return self.writer.stores_envelopes or bool(self.plan.body_rules.topics)

    def run(self, part: Part) -> Iterator[Work]:
        """Fold a part of the log or a bucket of pieces, and write the result."""
        if not self.writer.is_done(part.name):
            yield self._fold_ranges(part) if part.bucket is None else self._fold_bucket(part, part.bucket)

    def _fold_ranges(self, part: Part) -> Work:
        with _timer() as read:
            records = self.read(part)
        with _timer() as fold:
            result = self.fold(part, records)
        return self._write(part, result, Work(records.height, read=read[0], fold=fold[0]))

    def _fold_bucket(self, part: Part, bucket: int) -> Work:
        with _timer() as read:
            pieces = self.writer.pieces(bucket)
        with _timer() as fold:
            result = self.fold_rest(pieces)
        return self._write(part, result, Work(read=read[0], fold=fold[0]))

    def _write(self, part: Part, result: FoldResult, work: Work) -> Work:
        with _timer() as write:
            rows = self.writer.write(part.name, result)
        return work._replace(rows=rows, write=write[0])


@contextmanager
def _timer() -> Iterator[list[float]]:
    """Yield a list that receives the duration (s) when the context ends."""
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - start)


POLL_SECONDS = 0.1


class LocalTaskRunner:
    """A `TaskRunner` in this process: a thread runs the tasks, while the caller uses their results."""

    def start(self) -> None:
        """Do nothing: this process runs already."""

    def run(
        self,
        task: Callable[[Part], Iterable[Any]],
        parts: Sequence[Part],
        stages: Sequence[Stage] = (),
        *,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Any]:
        """Run a task for each part, then the stages; see `TaskRunner.run`."""
        items: list[Any] = []
        done = 0
        with ThreadPoolExecutor(1, "tasks") as pool:
            jobs = [(part, pool.submit(lambda each: list(task(each)), part)) for part in parts]
            try:
                for part, job in jobs:
                    while wait([job], POLL_SECONDS).not_done:
                        progress(done)
                    items += job.result()
                    done += part.size
                    progress(done)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for stage in stages:
            groups: dict[Key, list[Any]] = {key: [] for key in stage.keys}
            rest = []
            for item in items:
                if isinstance(item, Pair) and item.stage == stage.name:
                    groups.setdefault(item.key, []).append(item.value)
                else:
                    rest.append(item)
            items = rest + [each for key, values in groups.items() for each in stage.task(key, values)]
        return items

    def reason(self, error: Exception) -> str:
        """Return the error of a task; see `TaskRunner.reason`."""
        return str(error).partition("\n")[0] or summarize(error)
