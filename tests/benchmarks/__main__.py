"""Benchmarks of this machine through the public handlers; `make bench` runs them."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from postroom.adapters.cli.output import Output
from tests.benchmarks import (
    access,
    cluster,
    follow,
    history,
    messaging,
    peers,
    search,
    snapshots,
    spark,
    surfaces,
    throughput,
    tokens,
    workers,
)
from tests.benchmarks.figures import Figure, Figures

MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {
    **throughput.MEASUREMENTS,
    **history.MEASUREMENTS,
    **snapshots.MEASUREMENTS,
    **peers.MEASUREMENTS,
    **messaging.MEASUREMENTS,
    **surfaces.MEASUREMENTS,
    **workers.MEASUREMENTS,
    **access.MEASUREMENTS,
    **tokens.MEASUREMENTS,
    **cluster.MEASUREMENTS,
}


def main(
    names: Annotated[
        list[str] | None, Argument(metavar="[NAME]...", help="Prefixes of the measurements; default all.")
    ] = None,
    output: Annotated[
        str, Option(metavar="FILE", help="Write each figure to this JSON file when it is measured.")
    ] = "bench.json",
    messages: Annotated[
        int, Option(metavar="COUNT", min=1_000, help="Messages in the stores of the history benchmarks.")
    ] = 1_000_000,
    interleave: Annotated[
        Literal["life", "none"],
        Option(help="For Spark: interleave sends, receives and acks, or write one kind after the other."),
    ] = "life",
    runs: Annotated[
        int, Option(metavar="COUNT", min=0, help="For Spark: runs of each; 0 means 3, or 1 for large stores.")
    ] = 0,
    keep: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="For Spark: keep the stores in this folder and reuse them."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure sends, receives, acks, search and rebuilds, and write the figures to a JSON file.

    The file holds a list of `{name, value, unit, goal, holds}`.
    """
    out = Output(as_json)
    figures = Figures(names or [], out.note, Path(output))
    figures.save()
    measurements = dict(MEASUREMENTS)
    for module in (search, spark, follow):
        measurements |= module.measurements(spark.Options(interleave, keep, runs))
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        # A function that is listed under several names runs once.
        for measure in dict.fromkeys(m for prefix, m in measurements.items() if figures.wants(prefix)):
            measure(figures, Path(folder), messages)
    if as_json:
        out.json(figures.results)
    else:
        out.table(["name", "value", "unit", "goal", "holds"], [_row(figure) for figure in figures.results])
        out.note(f"Written to {output}.")


def _row(figure: Figure) -> list[object]:
    holds = {True: "yes", False: "no", None: None}[figure.holds]
    goal = None if figure.goal is None else f"{figure.goal:,.10g}"
    value = f"{figure.value:,.4g}" if figure.value < 100 else f"{figure.value:,.0f}"
    return [figure.name, value, figure.unit, goal, holds]


if __name__ == "__main__":
    typer.run(main)
