"""Verify: recompute the read models from the log, and compare them with the active version, row by row.

It is a rebuild whose tasks compare instead of writing. The rows folded from a range of the log are compared
with the stored rows of the messages sent in it. The remaining pieces are grouped by bucket, and the rows of
other models by model. The backlog is also compared with the counts of the live engine.

Runs as `postroom views verify` and as `spark-submit projections/verify.py --store STORE`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl

from postroom.application.text import pluralize
from postroom.domain.errors import NotFound, PostroomError, Unavailable
from postroom.domain.mailbox.counts import TopicCount
from postroom.projections.engine import EngineChoice
from postroom.projections.fold import MESSAGES, FoldResult, piece_schemas
from postroom.projections.log_checks import check_bounds, check_names, check_same_log
from postroom.projections.log_reader import LogExtent, LogReader
from postroom.projections.plan import Part, log_parts, make_plan, with_bucket
from postroom.projections.ports.read_model_store import ActiveVersion, RowReader, VerifiableStore
from postroom.projections.ports.runner import Pair, Progress, Stage, Stopwatch, TaskRunner
from postroom.projections.projection import EventProjection, Projection, load_projections, merge_rows
from postroom.projections.tasks import FoldContext

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
    return pl.concat([pl.DataFrame(schema=projection.stored_schema), *frames])


def compare_rows(
    projection: Projection, recomputed_rows: pl.DataFrame, stored_rows: pl.DataFrame
) -> Comparison:
    """Compare the stored columns with recomputed rows; in both, a key occurs at most once."""
    recomputed_rows = recomputed_rows.select(stored_rows.columns)
    if recomputed_rows.height == stored_rows.height and recomputed_rows.sort(*projection.key).equals(
        stored_rows.sort(*projection.key)
    ):
        return Comparison(recomputed_rows.height)
    key = projection.key
    others = [name for name in stored_rows.columns if name not in key]
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
    """Return a sentence about the rows of a model that differ from another version's.

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


PIECES, ROWS = "pieces", "rows"
"""Stages after the ranges: pieces of messages by bucket, and rows by model."""

BacklogAt = Callable[[str, int], Sequence[TopicCount]]
"""Returns the live engine's counts for a mailbox at a position."""
Result = tuple[str, Comparison]


class VerifyReport(msgspec.Struct, frozen=True):
    """Differences between the active version and the log.

    Arguments:
        version: the version that was verified.
        positions: its last position, by mailbox.
        models: result by model.
        engine: result of comparing the backlog with the live engine, for mailboxes with a complete log.
        skipped: checks that were not possible, a sentence each.
        seconds: duration of the verification.
        computed_by: the engine that read the log, and why it was chosen; None for a runner of the caller.
    """

    version: int
    positions: dict[str, int]
    models: dict[str, Comparison]
    engine: Comparison
    skipped: list[str]
    seconds: float
    computed_by: EngineChoice | None = None

    @property
    def is_intact(self) -> bool:
        """Tell whether no stored row differs from the log."""
        return all(each.first is None for each in (*self.models.values(), self.engine))

    def summary(self) -> str:
        """Return a few lines of text."""
        lines = [f"Version {self.version}, verified in {self.seconds:.1f} s"]
        for name, each in {**self.models, "backlog of the live engine": self.engine}.items():
            if each.first is None:
                lines.append(f"{name}: {pluralize(each.rows, 'row')}, intact")
                continue
            lines.append(
                f"{name}: {pluralize(each.rows, 'row')} recomputed: {each.different:,} different, "
                f"{each.missing:,} missing, {each.extra:,} extra; first difference: {_describe(each.first)}"
            )
        return "\n".join([*lines, *(f"not verified: {each}" for each in self.skipped)])


def verify(
    log: LogReader,
    store: VerifiableStore,
    runner: TaskRunner,
    *,
    backlog_at: BacklogAt,
    chain: bool = True,
    progress: Callable[[Progress], None] = lambda _: None,
) -> VerifyReport:
    """Compare the active version of the read models with the log at the positions it has read.

    Later records are checked, too, but not compared.

    Arguments:
        log: includes the archive if archived records are to be verified too.
        backlog_at: returns a mailbox's backlog as the live engine counts it.
        chain: also check the hashes of all commits and envelopes, to the end of the log.
        progress: called repeatedly, from this thread.

    Raises: NotFound when the store or an active version does not exist; BrokenLog when records are missing
        from the log or were altered, or when the log was replaced; Unavailable when the read models advanced
        during the verification, or when the runner failed.
    """
    clock = Stopwatch(progress)
    clock.report("start")
    active = store.active_version()
    if active is None:
        log.mailboxes()  # raises NotFound when the store is missing
        raise NotFound(
            f"The store {store.where} has no read models of this release; build them with `postroom views "
            "rebuild`."
        )
    if chain:
        check_names(log)
        check_bounds(log)
    check_same_log(log, active.cursors, store.where)
    extents = log.extents(active.positions)
    projections = {name: each for name, each in load_projections().items() if name in active.models}
    skipped = []
    if any(extent.first > 1 for extent in extents):
        event_models = [name for name, each in projections.items() if isinstance(each, EventProjection)]
        projections = {name: each for name, each in projections.items() if name not in event_models}
        skipped = [f"{name}: retention removed events that it counts" for name in event_models]
    plan = make_plan(extents, tuple(projections), verify=chain)
    tasks = _VerifyTasks(log, plan, projections, store.row_reader(active))
    try:
        runner.start()
        models = _compare(runner, tasks, clock)
        if chain:
            _check_rest(runner, tasks, active, clock)
    except PostroomError:
        raise
    except Exception as error:
        raise Unavailable(
            f"The read models {store.where} could not be verified: {runner.reason(error)}"
        ) from error
    engine = Comparison()
    if "backlog" in projections:
        engine, skipped_mailboxes = _compare_engine(
            backlog_at, extents, tasks.reader.rows(projections["backlog"])
        )
        skipped += skipped_mailboxes
    if store.active_version() != active:
        raise Unavailable(
            f"The read models {store.where} advanced during the verification; stop "
            "`postroom views follow` first."
        )
    return VerifyReport(active.version, active.positions, models, engine, skipped, clock.elapsed())


def _describe(first: Difference) -> str:
    key = ", ".join(f"{name} {value}" for name, value in first.key.items())
    column = "" if first.column is None else f" {first.column}:"
    return f"{key}:{column} stored {first.stored}, recomputed {first.recomputed}"


@dataclass(frozen=True)
class _VerifyTasks(FoldContext):
    """Tasks of a verification.

    Arguments:
        reader: reader of the stored rows.
    """

    reader: RowReader

    def compare_part(self, part: Part) -> Iterator[Result | Pair]:
        """Compare messages that are complete within a range; yield the rest for later stages."""
        result = self.fold(part, self.read(part))
        if messages := self.projections.get(MESSAGES):
            places = (
                f"id BETWEEN {each.extent.place(each.first)} AND {each.extent.place(each.last)}"
                for each in part.ranges
            )
            stored_rows = self.reader.rows(messages, f"({' OR '.join(places)})")
            # Messages that continue in other ranges are compared later, when all of their pieces are known.
            incomplete = result.pieces[MESSAGES]["id"].drop_nulls().implode()
            stored_rows = stored_rows.filter(~pl.col("id").is_in(incomplete))
            yield MESSAGES, compare_rows(messages, result.rows[MESSAGES], stored_rows)
        for name, frame in result.pieces.items():
            if frame.height:
                for (bucket,), rows in with_bucket(frame, self.plan.buckets).group_by("bucket"):
                    yield Pair(PIECES, int(bucket), (name, rows.drop("bucket")))
        yield from self._other_models(result)

    def check_part(self, part: Part) -> Iterator[Result]:
        """Check the hashes of a part of the log that the read models don't include yet."""
        self.read(part)
        return iter(())

    def compare_bucket(
        self, bucket: int, pairs: Iterable[tuple[str, pl.DataFrame]]
    ) -> Iterator[Result | Pair]:
        """Compare rows of messages whose events are in several ranges."""
        pieces = {
            name: [pl.DataFrame(schema=schema)] for name, schema in piece_schemas(self.projections).items()
        }
        for name, rows in pairs:
            pieces[name].append(rows)
        result = self.fold_rest({name: pl.concat(frames) for name, frames in pieces.items()})
        if messages := self.projections.get(MESSAGES):
            rows = result.rows[MESSAGES]
            stored_rows = rows_by_id(self.reader, messages, rows["id"].to_list())
            yield MESSAGES, compare_rows(messages, rows, stored_rows)
        yield from self._other_models(result)

    def compare_model(self, name: str, frames: Iterable[pl.DataFrame]) -> Iterator[Result]:
        """Compare all rows of a model other than the messages."""
        projection = self.projections[name]
        recomputed_rows = pl.concat([pl.DataFrame(schema=projection.schema), *frames])
        stored_rows = self.reader.rows(projection)
        if projection.key == ("id",):
            first = min((extent.place(extent.first) for extent in self.plan.extents), default=0)
            stored_rows = stored_rows.filter(pl.col("id") >= first)
        yield name, compare_rows(projection, merge_rows(projection, recomputed_rows), stored_rows)

    def _other_models(self, result: FoldResult) -> Iterator[Pair]:
        for name, rows in result.rows.items():
            if name in self.projections and name != MESSAGES:
                yield Pair(ROWS, name, rows)


def _compare(runner: TaskRunner, tasks: _VerifyTasks, clock: Stopwatch) -> dict[str, Comparison]:
    """Run the job, and return the result by model."""
    parts = log_parts(tasks.plan)
    total = sum(part.size for part in parts)
    count = clock.counter("compare", "events")
    others = [name for name in tasks.projections if name != MESSAGES]
    stages = [
        Stage(PIECES, tasks.compare_bucket, tasks.plan.buckets),
        # A model without recomputed rows may still have stored rows.
        Stage(ROWS, tasks.compare_model, max(1, len(others)), tuple(others)),
    ]
    results = runner.run(tasks.compare_part, parts, stages, progress=lambda done: count(done, total))
    by_model = dict.fromkeys(tasks.projections, Comparison())
    for name, comparison in results:
        by_model[name] = by_model[name].plus(comparison)
    return by_model


def _check_rest(runner: TaskRunner, tasks: _VerifyTasks, active: ActiveVersion, clock: Stopwatch) -> None:
    """Check the hashes of the log after the positions of a version."""
    rest = [
        msgspec.structs.replace(extent, first=max(extent.first, active.positions.get(extent.name, 0) + 1))
        for extent in tasks.log.extents()
    ]
    parts = log_parts(make_plan([each for each in rest if each.events > 0], tuple(tasks.projections)))
    if parts:
        total = sum(part.size for part in parts)
        count = clock.counter("check", "events")
        runner.run(tasks.check_part, parts, progress=lambda done: count(done, total))


def _compare_engine(
    backlog_at: BacklogAt, extents: Iterable[LogExtent], stored_rows: pl.DataFrame
) -> tuple[Comparison, list[str]]:
    """Compare the backlog with the live engine's counts at the same positions."""
    projection = load_projections()["backlog"]
    comparison, skipped = Comparison(), []
    for extent in extents:
        try:
            shards = backlog_at(extent.name, extent.last)
        except NotFound as error:
            skipped.append(f"backlog of {extent.name} as the live engine counts it: {error}")
            continue
        rows = [{"mailbox": extent.name, **msgspec.structs.asdict(shard)} for shard in shards]
        engine_rows = pl.DataFrame(rows, schema=projection.schema)
        comparison = comparison.plus(
            compare_rows(projection, engine_rows, stored_rows.filter(mailbox=extent.name))
        )
    return comparison, skipped


if __name__ == "__main__":
    # Imported by name: this layer must not depend on the adapters.
    import sys
    from importlib import import_module

    sys.argv[1:1] = ["views", "verify"]
    import_module("postroom.adapters.cli.main").main()
