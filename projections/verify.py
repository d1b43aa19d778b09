"""Verify: recompute the read models from the log, and compare them with those that are served, row by row.

It is a rebuild whose tasks compare instead of writing. What a range of the log amounts to is held against the
served rows of the messages sent in it; what ranges leave over goes through Spark's shuffle to one task a
bucket, and the rows of other models to one task a model. The backlog is also held against the live engine's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from postroom.domain.errors import NotFound, PostroomError, Unavailable
from postroom.domain.mailbox.state import TopicCount
from postroom.projections.cut import MailboxCut
from postroom.projections.fold import MESSAGES, Folded
from postroom.projections.logs import open_log
from postroom.projections.projection import EventProjection, merge_rows, projections
from postroom.projections.rebuild import (
    POLL_SECONDS,
    OnProgress,
    Stopwatch,
    plan_of,
    reason,
)
from postroom.projections.session import start_context
from postroom.projections.sinks import Part, open_sink, parts, with_bucket
from postroom.projections.sinks.comparing import Difference, Finding, Reader, compared, of_ids, open_reader
from postroom.projections.sinks.versions import staged
from postroom.projections.tasks import Folding

if TYPE_CHECKING:
    from pyspark import SparkContext

FOUND, PIECES, ROWS = "found", "pieces", "rows"
"""What a task hands on: a finding, pieces of messages for a bucket, or rows of a model to be merged."""

Key = tuple[str, str | int]
BacklogAt = Callable[[str, int], Sequence[TopicCount]]


class VerifyReport(msgspec.Struct, frozen=True):
    """Say how the served read models differ from what the log amounts to.

    Arguments:
        version: that was verified.
        positions: how far it has read each mailbox.
        models: what was found of each model.
        engine: the same of the backlog as the live engine counts it, of the mailboxes whose past is known.
        skipped: what could not be verified, a sentence each.
        seconds: how long it took.
    """

    version: int
    positions: dict[str, int]
    models: dict[str, Finding]
    engine: Finding
    skipped: list[str]
    seconds: float

    @property
    def is_intact(self) -> bool:
        """Tell whether every served row is what the log amounts to."""
        return all(each.first is None for each in (*self.models.values(), self.engine))

    def told(self) -> str:
        """Return the report in words, a line or a few."""
        lines = [f"Version {self.version}, verified in {self.seconds:.1f} s"]
        for name, found in {**self.models, "backlog of the live engine": self.engine}.items():
            if found.first is None:
                lines.append(f"{name}: {found.rows:,} rows, intact")
                continue
            lines.append(
                f"{name}: of {found.rows:,} rows {found.different:,} differ, {found.missing:,} are missing "
                f"and {found.extra:,} are too many; the first: {_shown(found.first)}"
            )
        return "\n".join([*lines, *(f"not verified: {each}" for each in self.skipped)])


def verify(
    store: str,
    *,
    backlog_at: BacklogAt,
    archive: str | None = None,
    progress: OnProgress = lambda _: None,
) -> VerifyReport:
    """Compare the read models that are served with what the log amounts to at the positions they have read.

    Arguments:
        store: path of a SQLite store, or URL of a PostgreSQL one.
        backlog_at: what the live engine counts in a mailbox at a position.
        archive: folder of what retention removed, to be read as the log's beginning.
        progress: called as the work goes on, from this thread.

    Raises: NotFound when there is no such store, or nothing is served; Unavailable when the read models moved
        on meanwhile, or when Spark failed.
    """
    clock = Stopwatch(progress)
    clock.report("start", 0, 0, "")
    log, sink = open_log(store, archive=archive), open_sink(store)
    served = sink.served()
    if served is None:
        raise NotFound(
            f"The store {sink.where} has no read models of this release; build them with `postroom project "
            "rebuild`."
        )
    cuts = log.cuts(served.positions)
    wanted = {name: each for name, each in projections().items() if name in served.models}
    skipped = []
    if any(cut.first > 1 for cut in cuts):
        removed = [name for name, each in wanted.items() if isinstance(each, EventProjection)]
        wanted = {name: each for name, each in wanted.items() if name not in removed}
        skipped = [f"{name}: retention removed events that it counts" for name in removed]
    plan = plan_of(cuts, tuple(wanted))
    task = _Comparing(log, plan, wanted, open_reader(store, served))
    try:
        models = _compare(start_context(), task, clock)
    except PostroomError:
        raise
    except Exception as error:
        raise Unavailable(f"The read models {sink.where} could not be verified: {reason(error)}") from error
    engine = Finding()
    if "backlog" in wanted:
        engine, unknown = _engine(backlog_at, cuts, task.reader.rows(wanted["backlog"]))
        skipped += unknown
    if sink.served() != served:
        raise Unavailable(
            f"The read models {sink.where} moved on while they were verified; stop `postroom project follow` "
            "meanwhile."
        )
    return VerifyReport(served.version, served.positions, models, engine, skipped, clock.elapsed())


def _shown(first: Difference) -> str:
    key = ", ".join(f"{name} {value}" for name, value in first.key.items())
    column = "" if first.column is None else f" {first.column}:"
    return f"{key}:{column} served {first.served}, recomputed {first.recomputed}"


@dataclass(frozen=True)
class _Comparing(Folding):
    """What tasks do.

    Arguments:
        reader: of the served rows.
    """

    reader: Reader

    def compare_part(self, part: Part) -> Iterator[tuple[Key, Any]]:
        """Compare rows of messages that a range tells all about; hand on the rest."""
        folded = self.fold(part, self.read(part))
        pieces = folded.pieces[MESSAGES]
        if messages := self.wanted.get(MESSAGES):
            places = (
                f"id BETWEEN {each.cut.place(each.first)} AND {each.cut.place(each.last)}"
                for each in part.ranges
            )
            served = self.reader.rows(messages, f"({' OR '.join(places)})")
            # Those that are not settled here are compared with all that the other ranges tell of them.
            left_over = pieces["id"].drop_nulls().implode()
            served = served.filter(~pl.col("id").is_in(left_over))
            yield (FOUND, MESSAGES), compared(messages, folded.rows[MESSAGES], served)
        for name, frame in folded.pieces.items():
            if frame.height:
                for (bucket,), rows in with_bucket(frame, self.plan.buckets).group_by("bucket"):
                    yield (PIECES, int(bucket)), (name, rows.drop("bucket"))
        yield from self._others(folded)

    def compare_bucket(
        self, pair: tuple[Key, Iterable[tuple[str, pl.DataFrame]]]
    ) -> Iterator[tuple[Key, Any]]:
        """Compare rows of messages of which several ranges tell."""
        pieces: dict[str, list[pl.DataFrame]] = {}
        for name, rows in pair[1]:
            pieces.setdefault(name, []).append(rows)
        empty = {name: pl.DataFrame(schema=schema) for name, schema in staged(self.wanted).items()}
        folded = self.fold_rest(
            {name: pl.concat([none, *pieces.get(name, ())]) for name, none in empty.items()}
        )
        if messages := self.wanted.get(MESSAGES):
            rows = folded.rows[MESSAGES]
            yield (
                (FOUND, MESSAGES),
                compared(messages, rows, of_ids(self.reader, messages, rows["id"].to_list())),
            )
        yield from self._others(folded)

    def compare_model(self, pair: tuple[Key, Iterable[pl.DataFrame]]) -> tuple[Key, Finding]:
        """Compare all rows of a model that is no model of single messages."""
        name = str(pair[0][1])
        projection = self.wanted[name]
        recomputed = pl.concat([pl.DataFrame(schema=projection.schema), *pair[1]])
        served = self.reader.rows(projection)
        if projection.key == ("id",):
            first = min((cut.place(cut.first) for cut in self.plan.cuts), default=0)
            served = served.filter(pl.col("id") >= first)
        return (FOUND, name), compared(projection, merge_rows(projection, recomputed), served)

    def _others(self, folded: Folded) -> Iterator[tuple[Key, pl.DataFrame]]:
        for name, rows in folded.rows.items():
            if name in self.wanted and name != MESSAGES:
                yield (ROWS, name), rows


def _compare(context: "SparkContext", task: _Comparing, clock: Stopwatch) -> dict[str, Finding]:
    """Return what was found of each model, by a job of three stages."""
    from pyspark import StorageLevel

    ranges = parts(task.plan)
    sizes = {part.name: sum(each.last - each.first + 1 for each in part.ranges) for part in ranges}
    done = context.accumulator(0)

    def compare_part(part: Part) -> Iterator[tuple[Key, Any]]:
        yield from task.compare_part(part)
        done.add(sizes[part.name])

    disk = StorageLevel.DISK_ONLY  # read again by the last stage
    first = context.parallelize(ranges, len(ranges) or 1).flatMap(compare_part).persist(disk)
    pieces = first.filter(_is(PIECES)).groupByKey(task.plan.buckets)
    second = pieces.flatMap(task.compare_bucket).persist(disk)
    both = first.union(second)
    # Of a model without rows, too, it is seen whether any are served.
    none = [
        ((ROWS, name), pl.DataFrame(schema=each.schema))
        for name, each in task.wanted.items()
        if name != MESSAGES
    ]
    models = context.parallelize(none, 1).union(both.filter(_is(ROWS))).groupByKey(max(1, len(none)))
    found = both.filter(_is(FOUND)).union(models.map(task.compare_model))
    count = clock.counting("compare", "events")
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(found.reduceByKey(Finding.plus, 1).collect)
        try:
            while wait([job], POLL_SECONDS).not_done:
                count(done.value, sum(sizes.values()))
            pairs = job.result()
        except BaseException:
            context.cancelAllJobs()
            raise
        finally:
            first.unpersist()
            second.unpersist()
    by_model = {name: each for (_, name), each in pairs}
    return {name: by_model.get(name, Finding()) for name in task.wanted}


def _is(kind: str) -> Callable[[tuple[Key, Any]], bool]:
    return lambda pair: pair[0][0] == kind


def _engine(
    backlog_at: BacklogAt, cuts: Iterable[MailboxCut], served: pl.DataFrame
) -> tuple[Finding, list[str]]:
    """Compare the backlog with what the live engine counts at the same positions."""
    projection = projections()["backlog"]
    found, skipped = Finding(), []
    for cut in cuts:
        try:
            shards = backlog_at(cut.name, cut.last)
        except NotFound as error:
            skipped.append(f"backlog of {cut.name} as the live engine counts it: {error}")
            continue
        rows = [{"mailbox": cut.name, **msgspec.structs.asdict(shard)} for shard in shards]
        counted = pl.DataFrame(rows, schema=projection.schema)
        found = found.plus(compared(projection, counted, served.filter(mailbox=cut.name)))
    return found, skipped
