"""The Spark rebuild beside its alternatives, on the same store and in one run.

Every run is a process of its own, its start and its imports included. Ours is the whole `spark-submit` of a
rebuild of the search model; the peers (`pipeline/`) make the same tables with the same rows and the same
indexes, as the catalog describes them. They take turns, so that a slow moment of the machine hits all.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

import postroom.projections
from postroom.adapters.compose import is_database
from postroom.adapters.compose.maintenance import migrate_store
from tests.benchmarks.figures import Figures
from tests.benchmarks.long_log import LongLog, build_long_log
from tests.benchmarks.options import LARGE, Database, Options
from tests.benchmarks.pipeline.peer import PEERS
from tests.benchmarks.pipeline.postgres import clean_up
from tests.benchmarks.processes import Finished, run_program
from tests.benchmarks.servers import postgres_server

GOAL_RATIOS = {1_000_000: 1.3, LARGE: 1.3}
"""How many times as long as its fastest peer a rebuild may take, by the number of messages."""
MEMORY_GOAL_MIB = 4_096
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""What docs/spark.md gives a JVM that only hands out tasks: `spark-submit` starts it before our code."""
OURS = ("segments", "local", "local.segments")
"""Other rebuilds of ours: on Spark with segments, and in one process without and with them."""
Run = tuple[Finished, dict[str, float]]
"""A run, and its phases in seconds."""
REBUILD = Path(postroom.projections.__path__[0]).resolve() / "rebuild.py"
"""That of the code that is measured, which is not always of this worktree."""


def label(messages: int) -> str:
    """Return what a number of messages is called in the names of figures, such as `1m`."""
    return f"{messages // 1_000_000}m" if messages >= 1_000_000 else f"{messages // 1_000}k"


@contextmanager
def open_store(
    database: Database, messages: int, options: Options, figures: Figures, folder: Path
) -> Iterator[tuple[str, LongLog]]:
    """Build a store with a long history, or reuse one of an earlier run; return its address and contents."""
    name = f"{database}-{label(messages)}-{options.interleave}"
    home = (options.keep or folder) / name
    home.mkdir(parents=True, exist_ok=True)
    built = home / "built.json"
    with postgres_server(home) if database == "postgres" else nullcontext() as server:
        store = str(home / "store.db") if server is None else server.url()
        if built.exists():
            log = msgspec.json.decode(built.read_bytes(), type=LongLog)
            figures.progress(f"{name}: reused from an earlier run")
        else:
            if server is not None:
                migrate_store(store)
            log = build_long_log(
                store, messages, options.interleave, home, lambda text: figures.progress(f"{name}: {text}")
            )
            built.write_bytes(msgspec.json.encode(log))
        yield store, log
    if options.keep is None:
        shutil.rmtree(home)


def rebuild(store: str, only: str = "search", engine: str = "spark", archive: str = "") -> Run:
    """Rebuild read models, and return the run and its phases in seconds.

    Arguments:
        only: their names, separated by commas; empty for all.
        engine: `spark`, by `spark-submit`, or `local`.
        archive: folder of segments; empty for none.
    """
    scripts = Path(sys.executable).parent
    command = [str(scripts / "postroom"), "views", "rebuild", "--engine", engine]
    if engine == "spark":
        command = [str(scripts / "spark-submit"), "--driver-java-options", JAVA_OPTIONS, str(REBUILD)]
    command += ["--only", only, "--json", *(["--archive", archive] if archive else [])]
    finished = run_program(command, {"POSTROOM_STORE": store, "PYSPARK_PYTHON": sys.executable})
    report: dict[str, Any] = msgspec.json.decode(finished.output.splitlines()[-1])
    phases = dict(report["seconds"])
    phases["submit"] = finished.seconds - phases.pop("total")
    # These are sums over tasks that run side by side.
    phases |= {f"tasks.{work}": seconds for work, seconds in report["task_seconds"].items()}
    return finished, phases


def build_segments(store: str, folder: Path) -> str:
    """Build the segments of a store's log in a folder, unless it has them, and return the folder."""
    if not folder.exists():
        postroom = str(Path(sys.executable).with_name("postroom"))
        run_program([postroom, "segments", "build", "--archive", str(folder)], {"POSTROOM_STORE": store})
    return str(folder)


def run_peer(peer: str, store: str, target: Path) -> Run:
    """Make the search model by a peer, and return the run and its phases in seconds.

    Arguments:
        peer: one of `PEERS`.
        target: the file to make; in PostgreSQL it is the schema `bench` instead.
    """
    module = "tests.benchmarks.pipeline.peer"
    finished = run_program([sys.executable, "-m", module, peer, str(target)], {"POSTROOM_STORE": store})
    phases: dict[str, float] = msgspec.json.decode(finished.output)
    # What the floor needs to begin with is no part of it.
    return finished._replace(seconds=finished.seconds - phases.pop("prepare", 0)), phases


def _present(figures: Figures) -> list[str]:
    """Return the peers that are installed; DuckDB need not be (dependency group `dev`)."""
    present = [peer for peer in PEERS if peer == "floor" or find_spec(peer)]
    if missing := sorted(set(PEERS) - set(present)):
        figures.progress(f"not measured, for want of {', '.join(missing)}")
    return present


def _run_peer_and_clean_up(peer: str, store: str, folder: Path) -> Run:
    try:
        return run_peer(peer, store, folder / "peer.db")
    finally:
        if is_database(store):
            clean_up(store)
        for file in folder.glob("peer.db*"):
            file.unlink()


def _compare(database: Database, messages: int, options: Options, figures: Figures, folder: Path) -> None:
    name = f"spark.rebuild.{database}.{label(messages)}"
    if not figures.wants(name):
        return
    with open_store(database, messages, options, figures, folder) as (store, log):
        segments = build_segments(store, (options.keep or folder) / f"{name}.segments")
        makers: dict[str, Callable[[str], Run]] = {"": rebuild}
        makers |= {OURS[0]: partial(rebuild, archive=segments), OURS[1]: partial(rebuild, engine="local")}
        makers[OURS[2]] = partial(rebuild, engine="local", archive=segments)
        makers |= {peer: partial(_run_peer_and_clean_up, peer, folder=folder) for peer in _present(figures)}
        results: dict[str, list[Run]] = {maker: [] for maker in makers}
        for run in range(options.runs_at(messages)):
            for maker, make in makers.items():
                finished, phases = make(store)
                results[maker].append((finished, phases))
                split = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items())
                figures.progress(
                    f"{name}, run {run + 1}: {maker or 'Spark'} {finished.seconds:.1f} s ({split})"
                )
                # After each run, as a later one may be interrupted.
                _report(name, log, maker, results[maker], figures)
        _report_ratio(name, log, results, figures)


def _report(name: str, log: LongLog, maker: str, runs: list[Run], figures: Figures) -> None:
    """Add the medians of the runs of one maker."""
    seconds = median(run.seconds for run, _ in runs)
    memory = {role: median(run.peak_mib[role] for run, _ in runs) for role in ("driver", "workers")}
    if maker:
        peer = f"{name}.{'' if maker in ('floor', *OURS) else 'peer.'}{maker}"
        figures.add(peer, seconds, "s")
        figures.add(f"{peer}.memory", memory["driver"], "MiB")
        return
    figures.add(name, seconds, "s")
    for phase in runs[0][1]:
        figures.add(f"{name}.{phase}", median(phases[phase] for _, phases in runs), "s")
    figures.add(f"{name}.events", log.events / seconds, "events/s")
    figures.add(f"{name}.memory.driver", memory["driver"], "MiB", MEMORY_GOAL_MIB)
    figures.add(f"{name}.memory.workers", memory["workers"], "MiB")


def _report_ratio(name: str, log: LongLog, results: dict[str, list[Run]], figures: Figures) -> None:
    """Add the time of each of our rebuilds in terms of the fastest peer's."""
    seconds = {maker: median(run.seconds for run, _ in runs) for maker, runs in results.items()}
    fastest = min(each for maker, each in seconds.items() if maker not in ("", "floor", *OURS))
    for maker in ("", *OURS):
        own = f"{name}.{maker}".rstrip(".")
        figures.add(
            f"{own}.ratio", seconds[maker] / fastest, "x", None if maker else GOAL_RATIOS.get(log.messages)
        )


def measurements(options: Options) -> dict[str, Callable[[Figures, Path, int], None]]:
    """Return what is measured of Spark under these options."""

    def of(database: Database, figures: Figures, folder: Path, messages: int) -> None:
        _compare(database, messages, options, figures, folder)

    def large(database: Database, figures: Figures, folder: Path, messages: int) -> None:
        if messages != LARGE and figures.is_named(f"spark.rebuild.{database}.{label(LARGE)}"):
            _compare(database, LARGE, options, figures, folder)

    databases: tuple[Database, ...] = ("postgres", "sqlite")
    return {
        f"spark.rebuild.{database}{size}": partial(measure, database)
        for measure, size in ((of, ""), (large, f".{label(LARGE)}"))
        for database in databases
    }
