"""Rebuild the read models of a store from its event log, beside the ones that are being served.

Runs as `postroom project rebuild` and as `spark-submit projections/rebuild.py --store STORE`.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import msgspec

from postroom.domain.errors import PostroomError, Unavailable
from postroom.projections.cut import MailboxCut
from postroom.projections.logs import take_cuts
from postroom.projections.rows import BACKLOG_COLUMNS, DEAD_LETTER_COLUMNS, MAILBOX_COLUMNS
from postroom.projections.session import start_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from postroom.projections.views import Views

PHASES = ("start", "fold", "load", "index", "flip")
POLL_SECONDS = 0.2
_RAISED = "[USER_RAISED_EXCEPTION]"


class Progress(msgspec.Struct, frozen=True):
    """Tell how far a rebuild has come.

    Arguments:
        phase: one of `PHASES`: Spark starts; the log is read and folded; rows are loaded; indexes are built;
            the new version becomes the active one.
        done, total: of the phase's work, in `unit`; total is 0 while unknown.
        seconds: since the rebuild began.
    """

    phase: str
    done: int
    total: int
    unit: str
    seconds: float


class RebuildReport(msgspec.Struct, frozen=True):
    """Say what a rebuild read and built, and how long each phase took.

    Arguments:
        version: the one that is now active.
        path: where the read models are: a file, or a database without its password.
        cuts: how far each mailbox log was read.
        events, messages, dead_letters, backlog: how many records were read and rows built.
        seconds: by phase, and `total`.
    """

    version: int
    path: str
    cuts: list[MailboxCut]
    events: int
    messages: int
    dead_letters: int
    backlog: int
    seconds: dict[str, float]


OnProgress = Callable[[Progress], None]


def rebuild(store: str, *, progress: OnProgress = lambda _: None) -> RebuildReport:
    """Build the read models of a store as of now, and have them served (RFC-037 table schema).

    The log is only read, a short transaction at a time, so senders are neither blocked nor slowed.

    Arguments:
        store: path of a SQLite store, or URL of a PostgreSQL one.
        progress: called as the work goes on, from this thread.

    Raises: NotFound when there is no such store; Unavailable when another rebuild is running, when Spark or
        Java is missing, or when Spark failed.
    """
    cuts = take_cuts(store)
    clock = _Stopwatch(progress)
    with clock.phase("start"):
        session = start_session()
        from postroom.projections.views import open_views
    with open_views(store) as views:
        version = views.begin(cuts)
        try:
            return _build(_Work(session, store, cuts, views, version, clock))
        except PostroomError as error:
            views.fail(version, str(error))
            raise
        except Exception as error:
            reason = _reason(error)
            views.fail(version, reason)
            raise Unavailable(f"The rebuild of the read models {views.where} failed: {reason}") from error


class _Work(msgspec.Struct, frozen=True):
    session: "SparkSession"
    store: str
    cuts: Sequence[MailboxCut]
    views: "Views"
    version: int
    clock: "_Stopwatch"


def _build(work: _Work) -> RebuildReport:
    views, version, clock = work.views, work.version, work.clock
    with _staging(views.staging) as staging:
        with clock.phase("fold"):
            _fold(work, staging)
        with clock.phase("load"):
            counts = _load(work, staging)
            _forget_truncated(work)
    with clock.phase("index"):
        views.index(version, lambda done, total: clock.report("index", done, total, "indexes"))
    events = sum(cut.events for cut in work.cuts)
    with clock.phase("flip"):
        views.flip(version, {"events": events, **counts}, clock.seconds)
        views.drop_old()
    return RebuildReport(
        version,
        views.where,
        list(work.cuts),
        events,
        counts["mailbox"],
        counts["dead_letters"],
        counts["backlog"],
        {**clock.seconds, "total": clock.elapsed()},
    )


def _fold(work: _Work, staging: Path) -> None:
    """Stage the rows of all read models: one job over the log, and the small ones from what it staged."""
    from postroom.projections.backlog import backlog
    from postroom.projections.dead_letters import dead_letters
    from postroom.projections.messages import messages

    session, store, cuts = work.session, work.store, work.cuts
    _stage(work, messages(session, store, cuts), staging / "mailbox")
    staged = session.read.parquet(str(staging / "mailbox"))
    _stage(work, backlog(staged), staging / "backlog")
    _stage(work, dead_letters(session, store, cuts, staged).sort("id"), staging / "dead_letters")


def _stage(work: _Work, rows: "DataFrame", folder: Path) -> None:
    """Write rows as Parquet, telling how many of Spark's tasks are done."""
    tracker = work.session.sparkContext.statusTracker()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(rows.write.parquet, str(folder))
        while not writing.done():
            stages = [
                info for id_ in tracker.getActiveStageIds() if (info := tracker.getStageInfo(id_)) is not None
            ]
            done, total = (
                sum(info.numCompletedTasks for info in stages),
                sum(info.numTasks for info in stages),
            )
            work.clock.report("fold", done, total, "tasks")
            time.sleep(POLL_SECONDS)
        writing.result()


def _load(work: _Work, staging: Path) -> dict[str, int]:
    import pyarrow.parquet as pq

    from postroom.projections.staging import in_order

    total = sum(pq.ParquetFile(file).metadata.num_rows for file in (staging / "mailbox").glob("*.parquet"))
    models = {
        "mailbox": in_order(staging / "mailbox", "id", MAILBOX_COLUMNS),
        "backlog": iter([pq.read_table(staging / "backlog", columns=list(BACKLOG_COLUMNS))]),
        "dead_letters": in_order(staging / "dead_letters", "id", DEAD_LETTER_COLUMNS),
    }
    return {
        table: work.views.load(
            table, work.version, rows, lambda done: work.clock.report("load", done, max(done, total), "rows")
        )
        for table, rows in models.items()
    }


def _forget_truncated(work: _Work) -> None:
    """Leave out messages whose records retention began to remove while the log was read.

    Their later events may have gone before they were read, so what was folded of them is no longer certain.
    """
    now_first = {cut.id: cut.first for cut in take_cuts(work.store)}
    for cut in work.cuts:
        first = now_first.get(cut.id, cut.last + 1)
        if first > cut.first:
            work.views.remove_truncated(work.version, cut.place(cut.first), cut.place(first))


@contextmanager
def _staging(start: Path) -> Iterator[Path]:
    """Make a folder for staged rows, its path beginning with `start`; remove those killed rebuilds left."""
    for orphan in start.parent.glob(f"{start.name}*"):
        shutil.rmtree(orphan, ignore_errors=True)
    folder = Path(mkdtemp(prefix=start.name, dir=start.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Stopwatch:
    """Time the phases and pass progress on."""

    def __init__(self, progress: OnProgress) -> None:
        self._began = time.monotonic()
        self._progress = progress
        self.seconds: dict[str, float] = {}

    def elapsed(self) -> float:
        return round(time.monotonic() - self._began, 3)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.report(name, 0, 0, "")
        began = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - began, 3)

    def report(self, phase: str, done: int, total: int, unit: str) -> None:
        self._progress(Progress(phase, done, total, unit, self.elapsed()))


def _reason(error: Exception) -> str:
    """Return what went wrong in one line; Spark wraps what a job itself raised in pages of its own."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    raised = next((line for line in lines if _RAISED in line), "")
    return raised.partition(_RAISED)[2].partition(" SQLSTATE")[0].strip() or (
        lines[0] if lines else repr(error)
    )


def main() -> int:
    """Run a rebuild from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Rebuild the read models of a Postroom store.")
    parser.add_argument(
        "--store",
        default=os.environ.get("POSTROOM_STORE"),
        help="path of a SQLite store, or postgresql:// URL",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one line of JSON")
    arguments = parser.parse_args()
    if not arguments.store:
        parser.error("name the store with --store or POSTROOM_STORE")
    try:
        report = rebuild(arguments.store)
    except PostroomError as error:
        sys.stderr.write(f"postroom: {error}\n")
        return 1
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        split = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report.seconds.items())
        sys.stdout.write(
            f"Read models version {report.version} of {report.messages} messages ({report.events} events), "
            f"{report.dead_letters} of them dead: {split}.\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
