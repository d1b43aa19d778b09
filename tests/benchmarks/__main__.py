"""Benchmarks of this machine through the public handlers; `make bench` runs them."""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from postroom.adapters.cli.output import Output
from postroom.domain.errors import InvalidRequest
from tests.benchmarks import against
from tests.benchmarks.figures import RUNS, Figure, Figures, write
from tests.benchmarks.options import Options

MODULES: dict[str, tuple[str, ...]] = {
    "throughput": (
        "sqlite.send",
        "sqlite.receive",
        "sqlite.ack",
        "sqlite.lives",
        "sqlite.bare_append",
        "sqlite.send_of_bare_append",
        "sqlite.backlog",
        "sqlite.policies",
        "memory",
    ),
    "history": (
        *("sqlite.refold", "sqlite.open.empty", "sqlite.open.1m", "sqlite.search", "sqlite.retention"),
        *("sqlite.sizes", "postgres.sizes"),
    ),
    "store_costs": ("sqlite.bytes.life", "postgres.bytes.life", "sqlite.open.crash", "snapshot.pause"),
    "snapshots": ("snapshot.wake", "snapshot.share"),
    "large": ("large",),
    "peers": ("postgres.send", "postgres.lives", "postgres.keys", "pgmq", "pgqueuer"),
    "jetstream": ("jetstream",),
    "messaging": ("outbox", "inbox", "ingest"),
    "sources": ("ingest.sources",),
    "captures": ("outbox.capture",),
    "ordered": ("inbox.ordered",),
    "surfaces": ("surfaces",),
    "sqs": ("sqs",),
    "keys": ("keys",),
    "workers": ("workers",),
    "owners": ("owners",),
    "access": ("access",),
    "tokens": ("tokens",),
    "cluster": ("cluster",),
    "search": ("postgres.search",),
    "spark": ("spark",),
    "scans": ("scan",),
    "follow": ("follow",),
    "console": ("console",),
    "idle": ("idle", "wake"),
    "redrive": ("redrive.sqlite", "redrive.postgres"),
}
"""How the names of each module's measurements begin. Only the modules asked for are imported: the others may
need what older code lacks."""

Measure = Callable[[Figures, Path, int], None]


def measurements(figures: Figures, options: Options) -> dict[str, Measure]:
    """Return the measurements of the modules that are asked for."""
    found: dict[str, Measure] = {}
    for name, prefixes in MODULES.items():
        if any(figures.wants(prefix) for prefix in prefixes):
            module = import_module(f"tests.benchmarks.{name}")
            made = module.measurements(options) if hasattr(module, "measurements") else module.MEASUREMENTS
            found |= made
    return found


def main(
    names: Annotated[
        list[str] | None, Argument(metavar="[NAME]...", help="Prefixes of the measurements; default all.")
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write the figures to this JSON file; default bench.json, or bench-against.json.",
        ),
    ] = None,
    messages: Annotated[
        int, Option(metavar="COUNT", min=1_000, help="Messages in the stores of the history benchmarks.")
    ] = 1_000_000,
    interleave: Annotated[
        Literal["life", "none"],
        Option(help="For Spark: interleave sends, receives and acks, or write one kind after the other."),
    ] = "life",
    runs: Annotated[
        int, Option(metavar="COUNT", min=0, help="Runs of each; 0 means 3, or 1 for large stores of Spark.")
    ] = 0,
    keep: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="For Spark: keep the stores in this folder and reuse them."),
    ] = None,
    old: Annotated[
        Path | None,
        Option("--against", metavar="FOLDER", help="Measure the code of this worktree, too, in turns."),
    ] = None,
    old_commit: Annotated[
        str | None,
        Option("--against-commit", metavar="COMMIT", help="The same for the code of a commit."),
    ] = None,
    turns: Annotated[
        int, Option(metavar="COUNT", min=1, help="Turns of the old and the new code; medians count.")
    ] = 5,
    as_json: Annotated[bool, Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure sends, receives, acks, search and rebuilds, and write the figures to a JSON file.

    The file holds a list of `{name, value, unit, goal, holds}`; with `--against`, of `{name, unit, old, new,
    times, lowest, highest, turns, goal, holds}`.
    """
    out = Output(as_json)
    if old is not None and old_commit is not None:
        raise typer.BadParameter("--against and --against-commit exclude each other; give one of them.")
    if old is not None or old_commit is not None:
        with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder, ExitStack() as opened:

            def options(side: against.Side) -> list[str]:
                # The formats of the two stores may differ.
                kept = [] if keep is None else ["--keep", str(keep.resolve() / side.name)]
                of_all = ["--messages", str(messages), "--interleave", interleave, "--runs", str(runs or 1)]
                return [*of_all, *kept]

            try:
                if old_commit is not None:
                    old = opened.enter_context(against.worktree(old_commit, Path(folder)))
                assert old is not None
                compared = against.compare(
                    old, names or against.default_names(), turns, options, Path(folder), out.note
                )
            except InvalidRequest as error:
                raise typer.BadParameter(str(error)) from None
        _show_comparisons(out, compared, output or Path("bench-against.json"))
        return
    output = output or Path("bench.json")
    figures = Figures(names or [], out.note, output, runs or RUNS)
    figures.save()
    found = measurements(figures, Options(interleave, keep, runs))
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        # A function that is listed under several names runs once.
        for measure in dict.fromkeys(m for prefix, m in found.items() if figures.wants(prefix)):
            measure(figures, Path(folder), messages)
    if as_json:
        out.json(figures.results)
    else:
        out.table(["name", "value", "unit", "goal", "holds"], [_row(figure) for figure in figures.results])
        out.note(f"Written to {output}.")


def _show_comparisons(out: Output, compared: list[against.Comparison], output: Path) -> None:
    write(output, compared)
    if out.as_json:
        out.json(compared)
    else:
        rows = [
            (
                each.name,
                f"{_short(each.old)} -> {_short(each.new)} {each.unit}",
                f"{each.times:.2f}",
                f"{each.lowest:.2f}-{each.highest:.2f}",
                None if each.goal is None else f"{each.goal:.2f}",
                _answer(each.holds),
            )
            for each in compared
        ]
        out.table(["name", "old -> new", "times", "spread", "goal", "holds"], rows)
        out.note(f"Written to {output}.")


def _row(figure: Figure) -> list[object]:
    goal = None if figure.goal is None else f"{figure.goal:,.10g}"
    return [figure.name, _short(figure.value), figure.unit, goal, _answer(figure.holds)]


def _short(value: float) -> str:
    return f"{value:,.4g}" if value < 100 else f"{value:,.0f}"


def _answer(holds: bool | None) -> str | None:
    return {True: "yes", False: "no", None: None}[holds]


if __name__ == "__main__":
    typer.run(main)
