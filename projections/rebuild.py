"""Rebuild the read models of a store from its event log, beside the ones that are being served.

Runs as `postroom project rebuild` and as `spark-submit projections/rebuild.py --store STORE`.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable
from postroom.domain.search import NO_BODIES, BodyRules
from postroom.projections.cut import PLACES, MailboxCut
from postroom.projections.fold import MESSAGES, check_folds
from postroom.projections.follow import catch_up
from postroom.projections.logs import Log, open_log
from postroom.projections.projection import projections
from postroom.projections.session import start_context
from postroom.projections.sinks import (
    Build,
    Done,
    Part,
    Plan,
    Removed,
    Served,
    Sink,
    buckets,
    open_sink,
    parts,
)
from postroom.projections.sinks.versions import wanted
from postroom.projections.tasks import Job, Work

if TYPE_CHECKING:
    from pyspark import SparkContext

PHASES = ("start", "fold", "load", "index", "catch_up", "flip")
ALIASES = {"search": "mailbox"}
"""What `only` takes beside the names of the models: search reads the messages' table."""
PARTS = 16
POSITIONS = (50_000, 250_000)
"""How many positions a part covers, at least and at most: few messages should reach into a second one."""
POSITIONS_PER_BUCKET = 250_000
MAX_BUCKETS = 256
POLL_SECONDS = 0.1
# What a Python traceback ends with, inside of what the JVM says.
_RAISED = re.compile(r"Traceback \((?:(?!Traceback \().)*?^[\w.]+: ([^\n]*)", re.DOTALL | re.MULTILINE)


class Progress(msgspec.Struct, frozen=True):
    """Tell how far a rebuild has come.

    Arguments:
        phase: one of `PHASES`: Spark starts; its tasks read, fold and write; what they could not write is
            loaded and merged; indexes are built; what was logged meanwhile is applied; the version is
            served.
        done, total: of the phase's work, in `unit`; total is 0 while unknown.
        seconds: since the rebuild began.
        rate: how much is done a second; 0 while unknown.
        seconds_left: of the phase, at that rate; None while unknown.
    """

    phase: str
    done: int
    total: int
    unit: str
    seconds: float
    rate: float = 0.0
    seconds_left: float | None = None

    def told(self) -> str:
        """Return it in words."""
        if not self.total:
            return self.phase
        left = "" if self.seconds_left is None else f", {self.seconds_left:,.0f} s left"
        return f"{self.phase} {self.done:,}/{self.total:,} {self.unit}, {self.rate:,.0f}/s{left}"


class RebuildReport(msgspec.Struct, frozen=True):
    """Say what a rebuild read and built, and how long each phase took.

    Arguments:
        version: the one that is now active.
        path: where the read models are: a file, or a database without its password.
        cuts: how far each mailbox log was read.
        events: how many records that were.
        rows: of each model that was built.
        parts, resumed: how many parts there were, and how many of them a killed rebuild had done.
        parked: how many records could not be folded and were left out.
        seconds: by phase, by the clock, and `total`.
        task_seconds: of `read`, `fold` and `write`, summed over all tasks, which run side by side.
        differences: from the version served before, a sentence each; None where that was not asked for.
    """

    version: int
    path: str
    cuts: list[MailboxCut]
    events: int
    rows: dict[str, int]
    parts: int
    resumed: int
    parked: int
    seconds: dict[str, float]
    task_seconds: dict[str, float]
    differences: list[str] | None = None

    def told(self) -> str:
        """Return the report in words, a line or a few."""
        rows = ", ".join(f"{name} {count:,}" for name, count in self.rows.items())
        seconds = ", ".join(f"{phase} {each:.1f} s" for phase, each in self.seconds.items())
        tasks = ", ".join(f"{what} {each:.1f} s" for what, each in self.task_seconds.items())
        lines = [
            f"Version {self.version}: {rows} from {self.events:,} events ({seconds}; all tasks: {tasks})",
            *([f"{self.resumed} of {self.parts} parts were done before"] if self.resumed else []),
            *([f"{self.parked:,} records could not be folded and were left out"] if self.parked else []),
            *(self.differences or ([] if self.differences is None else ["No row differs from before"])),
        ]
        return "\n".join(lines)


OnProgress = Callable[[Progress], None]


def rebuild(
    store: str,
    *,
    only: Sequence[str] = (),
    to_position: Sequence[str] = (),
    compare: bool = False,
    archive: str | None = None,
    into: str | None = None,
    bodies: BodyRules = NO_BODIES,
    restart: bool = False,
    progress: OnProgress = lambda _: None,
) -> RebuildReport:
    """Build the read models of a store as of now, and have them served (RFC-037 table schema).

    The log is only read, a short transaction at a time, so senders are neither blocked nor slowed. A rebuild
    that was killed is continued by the next one that asks for the same.

    Arguments:
        store: path of a SQLite store, or URL of a PostgreSQL one.
        only: names of the models to build; the others are taken over from the version that is served, so all
            are read as far as that is. None builds all there are.
        to_position: how far to read: `N` in every mailbox, or `MAILBOX:N`; all there is by default.
        compare: compare with the version that is served, reading as far as that has.
        archive: folder of what retention removed, to be read as the log's beginning.
        into: another place than the store's own read models; see `open_sink`.
        bodies: which payloads are searched for words.
        restart: begin anew instead of continuing a killed rebuild.
        progress: called as the work goes on, from this thread.

    Raises: NotFound when there is no such store; InvalidRequest for a model or position that is none;
        Unavailable when another rebuild is running, when Spark or Java is missing, or when Spark failed.
    """
    clock = Stopwatch(progress)
    log = open_log(store, archive=archive)
    models = _models(only)
    if compare and to_position:
        raise InvalidRequest("A comparison reads as far as what is served; leave the position out.")
    through = _through(log, to_position)
    sink = open_sink(store, into)

    def plan(served: Served | None) -> Plan:
        as_far = through
        if as_far is None and served is not None and (compare or set(models) < set(served.models)):
            as_far = served.positions
        cuts = log.cuts(as_far)
        return plan_of(
            cuts,
            models,
            bodies=msgspec.json.encode(bodies).decode(),
            through=",".join(to_position),
            archive=archive,
        )

    check_folds({name: projections()[name] for name in models})
    clock.report("start", 0, 0, "")
    with sink.build(plan, restart=restart) as build, _failing(build, sink.where):
        context = start_context()
        clock.end("start")
        rebuilt = _Rebuild(context, log, build, sink, clock)
        # Elsewhere nobody reads on, and up to a position nobody should.
        follows = None if into or through is not None or MESSAGES not in models else store
        return rebuilt.run(compare=compare, follows=follows)


class _Rebuild:
    """One rebuild, step by step; a step that a killed one had done is passed over."""

    def __init__(
        self, context: "SparkContext", log: Log, build: Build, sink: Sink, clock: "Stopwatch"
    ) -> None:
        self._context = context
        self._log = log
        self._build = build
        self._sink = sink
        self._clock = clock

    def run(self, *, compare: bool, follows: str | None) -> RebuildReport:
        """Do what is left to be done, and return the report.

        Arguments:
            follows: the store whose log the version reads on before it is served.
        """
        build, clock = self._build, self._clock
        ranges = parts(build.plan)
        resumed = len(build.parts_done() & {part.name for part in ranges})
        work = Work()
        if not build.is_loaded:
            work = self._fold(ranges)
            clock.end("fold")
            build.load(clock.counting("load", "parts"))
            build.merge()
            clock.end("load")
            build.index(clock.counting("index", "indexes"))
            clock.end("index")
        served = self._sink.served()
        is_shared = served is not None and not set(served.models) <= set(build.plan.models)
        differences = self._differences(served, follows) if compare else None
        if follows is not None and not is_shared:
            catch_up(follows, build.version)
            clock.end("catch_up")
        counts = build.counts()
        events = sum(cut.events for cut in build.plan.cuts)
        clock.report("flip", 0, 0, "")
        build.flip({"events": events, **counts}, clock.seconds)
        clock.end("flip")
        return RebuildReport(
            build.version,
            self._sink.where,
            list(build.plan.cuts),
            events,
            counts,
            len(ranges),
            resumed,
            build.parked(),
            {**clock.seconds, "total": clock.elapsed()},
            {"read": round(work.read, 3), "fold": round(work.fold, 3), "write": round(work.write, 3)},
            differences,
        )

    def _differences(self, served: Served | None, follows: str | None) -> list[str]:
        """Compare with what is served, both read equally far."""
        if served is None:
            return ["Nothing is served yet to compare with"]
        if follows is not None:
            catch_up(follows, self._build.version, through=served.positions)
        found = self._build.differences()
        if self._sink.served() != served:
            return ["What is served moved on while it was compared; stop `postroom project follow` meanwhile"]
        return found

    def _fold(self, ranges: Sequence[Part]) -> Work:
        """Fold the log part by part, and then what the parts left over, bucket by bucket."""
        build = self._build
        job = Job(self._log, build.plan, wanted(build.plan), build.writer())
        work = self._run(job.fold_part, ranges, lambda part: sum(r.last - r.first + 1 for r in part.ranges))
        if build.plan.removed is None:
            build.remove_truncated(self._removed())
            job = replace(job, plan=build.plan)
        rest = buckets(build.plan)
        return work.plus(self._run(job.fold_bucket, rest, lambda part: 1))

    def _run(self, fold: Callable[[Part], Work], all_: Sequence[Part], size: Callable[[Part], int]) -> Work:
        """Run a task for each part that is not done, and bring to the tables what they write meanwhile."""
        build, clock = self._build, self._clock
        done = build.parts_done()
        left = [part for part in all_ if part.name not in done]
        if not left:
            return Work()
        sizes = {part.name: size(part) for part in all_}
        finished = self._context.accumulator(sum(sizes[name] for name in sizes.keys() & done))
        count = clock.counting("fold", "events" if left[0].bucket is None else "buckets", finished.value)

        def task(part: Part) -> Work:
            folded = fold(part)
            finished.add(sizes[part.name])
            return folded

        rdd = self._context.parallelize(left, len(left)).map(task)
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(rdd.reduce, Work.plus)
            try:
                while wait([job], POLL_SECONDS).not_done:
                    count(finished.value, sum(sizes.values()))
                    build.load(lambda *_: None)
            except BaseException:
                self._context.cancelAllJobs()
                raise
            return job.result()

    def _removed(self) -> Removed:
        """Return what retention began to remove while the log was read."""
        first = {cut.id: cut.first for cut in self._log.cuts()}
        return tuple(
            (cut.place(cut.first), cut.place(now_first))
            for cut in self._build.plan.cuts
            if (now_first := first.get(cut.id, cut.last + 1)) > cut.first
        )


def plan_of(cuts: Sequence[MailboxCut], models: tuple[str, ...], **others: Any) -> Plan:
    """Return a plan that divides the work into parts of a good size.

    Arguments:
        others: further fields of the plan.
    """
    total = sum(cut.events for cut in cuts)
    positions = min(max(total // PARTS, POSITIONS[0]), POSITIONS[1])
    buckets = min(max(-(-total // POSITIONS_PER_BUCKET), 1), MAX_BUCKETS)
    return Plan(tuple(cuts), models, positions, buckets, **others)


def _models(only: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the models that are built, all of them where none is named."""
    known = projections()
    names = [ALIASES.get(name, name) for name in only]
    for name in names:
        if name not in known:
            raise InvalidRequest(f"There is no read model {name!r}; there are {', '.join(known)}.")
    return tuple(name for name in known if not names or name in names)


def _through(log: Log, to_position: Sequence[str]) -> dict[str, int] | None:
    """Return how far each mailbox is to be read; None for as far as there is."""
    if not to_position:
        return None
    mailboxes = log.mailboxes()
    through = dict.fromkeys(mailboxes, PLACES - 1)
    for text in to_position:
        name, _, position = text.rpartition(":")
        if not position.isdecimal() or (name and name not in mailboxes):
            raise InvalidRequest(
                f"The position {text!r} is none; write a number, or MAILBOX:NUMBER for one of "
                f"{', '.join(mailboxes)}."
            )
        through |= {name: int(position)} if name else dict.fromkeys(mailboxes, int(position))
    return through


@contextmanager
def _failing(build: Build, where: str) -> Iterator[None]:
    """Drop what can't be built, and say why; what is interrupted or killed can be continued."""
    try:
        yield
    except Exception as error:
        why = str(error) if isinstance(error, PostroomError) else reason(error)
        # Of a server that is gone, say: the next rebuild goes on, or cleans up.
        with suppress(Exception):
            build.fail(why)
        if isinstance(error, PostroomError):
            raise
        raise Unavailable(f"The rebuild of the read models {where} failed: {why}") from error


class Stopwatch:
    """Time the phases, one after the other, and pass progress on."""

    def __init__(self, progress: OnProgress) -> None:
        self._began = self._phase_began = time.monotonic()
        self._progress = progress
        self.seconds: dict[str, float] = {}

    def elapsed(self) -> float:
        """Return the seconds since this began."""
        return round(time.monotonic() - self._began, 3)

    def end(self, phase: str) -> None:
        """Note that a phase is over, and the next one begins."""
        now = time.monotonic()
        self.seconds[phase] = round(now - self._phase_began, 3)
        self._phase_began = now

    def counting(self, phase: str, unit: str, before: int = 0) -> Done:
        """Return what tells how far a phase is; its rate is of what was done since now."""
        began = time.monotonic()

        def done(count: int, total: int) -> None:
            rate = (count - before) / max(time.monotonic() - began, 0.001)
            self.report(phase, count, total, unit, rate, (total - count) / rate if rate else None)

        done(before, 0)
        return done

    def report(
        self, phase: str, done: int, total: int, unit: str, rate: float = 0.0, left: float | None = None
    ) -> None:
        """Tell how far a phase is."""
        self._progress(Progress(phase, done, total, unit, self.elapsed(), rate, left))


def reason(error: Exception) -> str:
    """Return what went wrong in one line; Spark wraps what a task itself raised in pages of its own."""
    text = str(error)
    if raised := _RAISED.findall(text):
        return str(raised[-1]).strip()
    return next((line.strip() for line in text.splitlines() if line.strip()), repr(error))


def main() -> int:
    """Run a rebuild from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Rebuild the read models of a Postroom store.")
    parser.add_argument(
        "--store",
        default=os.environ.get("POSTROOM_STORE"),
        help="path of a SQLite store, or postgresql:// URL",
    )
    parser.add_argument("--only", default="", help="models to build, separated by commas; `search` is one")
    parser.add_argument("--to-position", action="append", default=[], help="N, or MAILBOX:N; may be repeated")
    parser.add_argument("--compare", action="store_true", help="compare with what is served")
    parser.add_argument("--archive", help="folder of what retention removed")
    parser.add_argument("--into", help="another place than the store's own read models")
    parser.add_argument(
        "--bodies",
        action="append",
        default=[],
        metavar="TOPIC",
        help="topic, or glob, whose bodies are searched for words; may be repeated",
    )
    parser.add_argument("--restart", action="store_true", help="do not go on with a rebuild that was killed")
    parser.add_argument("--json", action="store_true", help="print the report as one line of JSON")
    arguments = parser.parse_args()
    # Standard output is for the report.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if not arguments.store:
        parser.error("name the store with --store or POSTROOM_STORE")
    try:
        report = rebuild(
            arguments.store,
            only=[name for name in arguments.only.split(",") if name],
            to_position=arguments.to_position,
            compare=arguments.compare,
            archive=arguments.archive,
            into=arguments.into,
            bodies=BodyRules(tuple(arguments.bodies)),
            restart=arguments.restart,
        )
    except PostroomError as error:
        sys.stderr.write(f"postroom: {error}\n")
        return 1
    sys.stdout.write(f"{msgspec.json.encode(report).decode() if arguments.json else report.told()}\n")
    return 0


if __name__ == "__main__":
    from postroom.projections.rebuild import main as run  # so that tasks find by its name what they run

    sys.exit(run())
