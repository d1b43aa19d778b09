"""Rebuild the read models of a store from its event log, while the active version is in use.

Runs as `postroom views rebuild` and as `spark-submit projections/rebuild.py --store STORE`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial, reduce
from time import monotonic, sleep
from typing import NamedTuple, TypeVar

import msgspec

from postroom.application.telemetry import logger
from postroom.application.text import pluralize
from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable
from postroom.domain.names import describe_choices
from postroom.domain.search import NO_BODIES, BodyRules
from postroom.projections.engine import EngineChoice
from postroom.projections.fold import MESSAGES, check_folds
from postroom.projections.follow import Follower
from postroom.projections.incremental import Cursor
from postroom.projections.log_checks import check_bounds, check_names, check_same_log
from postroom.projections.log_reader import LogExtent, LogReader
from postroom.projections.plan import Part, Plan, Truncated, bucket_parts, log_parts, make_plan
from postroom.projections.ports.read_model_store import ActiveVersion, Build, LockTimeout, ReadModelStore
from postroom.projections.ports.runner import Progress, Stopwatch, TaskRunner
from postroom.projections.projection import load_projections
from postroom.projections.tasks import RebuildTasks, Work

ALIASES = {"search": "mailbox"}
"""Other names of models that `only` accepts: search reads the messages' table."""

LOCK_SECONDS, LOCK_PAUSE_SECONDS = 600.0, 0.1
"""How long a rebuild waits for another process that has locked the read models, and how often it tries."""

T = TypeVar("T")
Follow = Callable[[int], Follower]
"""Opens the follower of a version."""


class RebuildReport(msgspec.Struct, frozen=True):
    """Result of a rebuild.

    Arguments:
        version: the new active version.
        path: location of the read models: a file, or a database without its password.
        extents: the part of each mailbox log that was read.
        events: number of positions in these extents.
        rows: number of rows of each model that was built.
        parts, resumed: number of parts, and of those completed by an earlier, interrupted rebuild.
        parked: number of records that could not be folded and were left out.
        seconds: duration of each phase (start, fold, load, index, catch_up, flip), and `total`.
        task_seconds: time spent in `read`, `fold` and `write`, summed over all concurrent tasks.
        differences: from the previously active version, a sentence each; None without a comparison.
        computed_by: the engine, and why it was chosen; None for a runner of the caller.
    """

    version: int
    path: str
    extents: list[LogExtent]
    events: int
    rows: dict[str, int]
    parts: int
    resumed: int
    parked: int
    seconds: dict[str, float]
    task_seconds: dict[str, float]
    differences: list[str] | None = None
    computed_by: EngineChoice | None = None

    def summary(self) -> str:
        """Return a few lines of text."""
        rows = ", ".join(f"{name} {count:,}" for name, count in self.rows.items())
        seconds = ", ".join(f"{phase} {each:.1f} s" for phase, each in self.seconds.items())
        tasks = ", ".join(f"{what} {each:.1f} s" for what, each in self.task_seconds.items())
        records = pluralize(self.events, "log record")
        lines = [f"Version {self.version}: {rows} from {records} ({seconds}; all tasks: {tasks})"]
        if self.resumed:
            lines.append(
                f"{self.resumed:,} of {pluralize(self.parts, 'part')} were built before an interruption"
            )
        if self.parked:
            lines.append(f"{pluralize(self.parked, 'log record')} parked: could not be folded")
        if self.differences is not None:
            lines += self.differences or ["No row differs from the active version"]
        return "\n".join(lines)


class RebuildRequest(NamedTuple):
    """Log range, models and options of a rebuild.

    Arguments:
        only: names of the models to build, all when empty; the others use the active version's tables.
        to_position: last position to read: `N` for every mailbox, or `MAILBOX:N`; the end by default.
        compare: compare with the active version, reading up to its positions.
        archive: folder of the log archive that the log includes, if any.
        bodies: topics whose bodies are searched for words.
        restart: begin a new version instead of continuing an interrupted rebuild.
        verify: check the hashes of all commits and envelopes.
        allow_gaps: ignore missing log records.
    """

    only: Sequence[str] = ()
    to_position: Sequence[str] = ()
    compare: bool = False
    archive: str | None = None
    bodies: BodyRules = NO_BODIES
    restart: bool = False
    verify: bool = False
    allow_gaps: bool = False


def rebuild(
    log: LogReader,
    store: ReadModelStore,
    runner: TaskRunner,
    follow: Follow | None,
    request: RebuildRequest,
    progress: Callable[[Progress], None] = lambda _: None,
) -> RebuildReport:
    """Build the read models of a store as of now, and make them the active version (RFC-037 table schema).

    The log is read in short transactions, so senders are not blocked. An interrupted rebuild is continued by
    the next one with the same request.

    Arguments:
        follow: opens the follower of a version; None for read models that are never followed.
        progress: called repeatedly, from this thread.

    Raises: NotFound when the store does not exist; InvalidRequest for an unknown model or position;
        BrokenLog when records are missing or, with `verify`, were altered; Unavailable when another rebuild
        is running, or when the runner can't be started or fails.
    """
    clock = Stopwatch(progress)
    models = _models(request.only)
    if request.compare and request.to_position:
        raise InvalidRequest(
            "A comparison reads up to the positions of the active version; leave the position out."
        )
    through = _through(log, request.to_position)
    if through is not None:
        follow = None
    elif follow is not None and not request.compare:
        _advance_shared(store, follow, models)

    def plan(active: ActiveVersion | None) -> Plan:
        end = through
        if end is None and active is not None and (request.compare or _is_shared(active, models)):
            end = active.positions
        return make_plan(
            log.extents(end),
            models,
            bodies=msgspec.json.encode(request.bodies).decode(),
            through=",".join(request.to_position),
            archive=request.archive,
            verify=request.verify,
            allow_gaps=request.allow_gaps,
        )

    if not request.allow_gaps:
        check_bounds(log)
    check_folds({name: load_projections()[name] for name in models})
    clock.report("start")
    with store.build(plan, restart=request.restart) as build, _record_failure(build, store.where, runner):
        check_names(log)
        check_same_log(log, _cursors(build.plan), store.where, "postroom views rebuild --restart")
        runner.start()
        clock.end("start")
        return _Rebuild(log, store, runner, build, clock).run(
            compare=request.compare, follow=follow if MESSAGES in models else None
        )


def _advance_shared(store: ReadModelStore, follow: Follow, models: Sequence[str]) -> None:
    """Advance the active version to the end of the log if the new version shares some of its models.

    All models of a version have the same positions, so the shared ones limit the others.
    """
    active = store.active_version()
    if active is not None and _is_shared(active, models) and MESSAGES in active.models:
        _advance(follow, active.version)


def _is_shared(active: ActiveVersion, models: Sequence[str]) -> bool:
    """Tell whether a version that builds some models shares others with the active version.

    A version that builds all known models does not: nobody can follow a model that is no longer known.
    """
    return not load_projections().keys() & active.models.keys() <= set(models)


def _advance(follow: Follow, version: int, through: Mapping[str, int] | None = None) -> None:
    """Advance a version to positions, or else to an end of the log after this call.

    A mailbox in use has no end to wait for. The second pass leaves out only records written during it.
    """
    with closing(follow(version)) as follower:
        for _ in range(2 if through is None else 1):
            ends = _wait_for_locks(follower.ends) if through is None else through
            while _wait_for_locks(partial(follower.step, ends)):
                pass


def _wait_for_locks(step: Callable[[], T]) -> T:
    """Run a step again while another process has locked the read models; a failed try changed nothing."""
    deadline = monotonic() + LOCK_SECONDS
    while True:
        try:
            return step()
        except LockTimeout as error:
            if monotonic() > deadline:
                raise
            logger().retry("rebuild.locked", error=str(error))
        sleep(LOCK_PAUSE_SECONDS)


class _Rebuild:
    """One rebuild; steps that an interrupted rebuild completed are skipped."""

    def __init__(
        self, log: LogReader, store: ReadModelStore, runner: TaskRunner, build: Build, clock: Stopwatch
    ) -> None:
        self._log = log
        self._store = store
        self._runner = runner
        self._build = build
        self._clock = clock

    def run(self, *, compare: bool, follow: Follow | None) -> RebuildReport:
        """Run the remaining steps, and return the report.

        Arguments:
            follow: opens the follower that applies later records before the version becomes active.
        """
        build, clock = self._build, self._clock
        parts = log_parts(build.plan)
        resumed = len(build.parts_done() & {part.name for part in parts})
        work = Work()
        if not build.is_loaded:
            work = self._fold(parts)
            clock.end("fold")
            build.load(clock.counter("load", "parts"))
            build.merge()
            clock.end("load")
            build.index(clock.counter("index", "indexes"))
            clock.end("index")
        active = self._store.active_version()
        is_shared = active is not None and _is_shared(active, build.plan.models)
        differences = self._differences(active, follow) if compare else None
        if follow is not None and not is_shared:
            _advance(follow, build.version)
            clock.end("catch_up")
        check_same_log(self._log, _cursors(build.plan), self._store.where)
        counts = build.counts()
        events = sum(extent.events for extent in build.plan.extents)
        clock.report("flip")
        _wait_for_locks(partial(build.flip, {"events": events, **counts}, clock.seconds))
        clock.end("flip")
        return RebuildReport(
            build.version,
            self._store.where,
            list(build.plan.extents),
            events,
            counts,
            len(parts),
            resumed,
            build.parked(),
            {**clock.seconds, "total": clock.elapsed()},
            {"read": round(work.read, 3), "fold": round(work.fold, 3), "write": round(work.write, 3)},
            differences,
        )

    def _differences(self, active: ActiveVersion | None, follow: Follow | None) -> list[str]:
        """Return the differences from the active version at its positions."""
        if active is None:
            return ["There is no active version to compare with"]
        if follow is not None:
            _advance(follow, self._build.version, active.positions)
        differences = self._build.differences()
        if self._store.active_version() != active:
            return ["The active version advanced during the comparison; stop `postroom views follow` first"]
        return differences

    def _fold(self, parts: Sequence[Part]) -> Work:
        """Fold the log part by part, and then the remaining pieces, bucket by bucket."""
        build = self._build
        tasks = RebuildTasks(self._log, build.plan, build.plan.projections(), build.writer())
        work = self._run(tasks, parts, "events")
        if build.plan.truncated is None:
            build.remove_truncated(self._truncated_places())
            tasks = replace(tasks, plan=build.plan)
        return work.plus(self._run(tasks, bucket_parts(build.plan), "buckets"))

    def _run(self, tasks: RebuildTasks, parts: Sequence[Part], unit: str) -> Work:
        """Run a task for each part that is not done, and load their rows as they are written."""
        build = self._build
        done = build.parts_done()
        total = sum(part.size for part in parts)
        before = sum(part.size for part in parts if part.name in done)
        remaining = [part for part in parts if part.name not in done]
        if not remaining:
            return Work()
        count = self._clock.counter("fold", unit, before)

        def progress(size: int) -> None:
            count(before + size, total)
            build.load(lambda *_: None)

        return reduce(Work.plus, self._runner.run(tasks.run, remaining, progress=progress), Work())

    def _truncated_places(self) -> Truncated:
        """Return the places that retention removed while the log was read."""
        first = {extent.id: extent.first for extent in self._log.extents()}
        return tuple(
            (extent.place(extent.first), extent.place(now_first))
            for extent in self._build.plan.extents
            if (now_first := first.get(extent.id, extent.last + 1)) > extent.first
        )


def _cursors(plan: Plan) -> dict[int, Cursor]:
    """Return the ends of the part of the log that a plan reads, by mailbox id."""
    return {each.id: Cursor(each.last, each.at, each.chain, each.name) for each in plan.extents}


def _models(only: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the models to build; all of them when `only` is empty."""
    projections = load_projections()
    names = [ALIASES.get(name, name) for name in only]
    for name in names:
        if name not in projections:
            raise InvalidRequest(f"There is no read model {name}; {describe_choices(name, projections)}")
    return tuple(name for name in projections if not names or name in names)


def _through(log: LogReader, to_position: Sequence[str]) -> Mapping[str, int] | None:
    """Return the last position to read, by mailbox; None for the end of every log."""
    mailboxes = log.mailboxes()  # called in any case: raises NotFound before anything is created
    if not to_position:
        return None
    through = dict.fromkeys(mailboxes, POSITIONS_PER_MAILBOX - 1)
    for text in to_position:
        name, _, position = text.rpartition(":")
        if not position.isdecimal() or (name and name not in mailboxes):
            raise InvalidRequest(
                f"Invalid position {text!r}; expected a number, or MAILBOX:NUMBER for one of "
                f"{', '.join(mailboxes)}."
            )
        through |= {name: int(position)} if name else dict.fromkeys(mailboxes, int(position))
    return through


@contextmanager
def _record_failure(build: Build, where: str, runner: TaskRunner) -> Iterator[None]:
    """Drop a version whose build failed, and record the error; an interrupted one can be continued."""
    try:
        yield
    except LockTimeout:
        raise  # nothing is wrong with the version
    except Exception as error:
        reason = str(error) if isinstance(error, PostroomError) else runner.reason(error)
        # It fails, for example, when the server is down; the next rebuild continues or cleans up.
        with suppress(Exception):
            build.fail(reason)
        if isinstance(error, PostroomError):
            raise
        raise Unavailable(f"The rebuild of the read models {where} failed: {reason}") from error


if __name__ == "__main__":
    # Imported by name: this layer must not depend on the adapters.
    import sys
    from importlib import import_module

    sys.argv[1:1] = ["views", "rebuild"]
    import_module("postroom.adapters.cli.main").main()
