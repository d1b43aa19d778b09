"""Running the measurements that were asked for, and writing down what they found."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from postroom.adapters.cli.bench import follow, history, messaging, peers, search, spark, throughput
from postroom.adapters.cli.bench.figures import Figure, Figures
from postroom.adapters.cli.session import Session

MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {
    **throughput.MEASUREMENTS,
    **history.MEASUREMENTS,
    **peers.MEASUREMENTS,
    **messaging.MEASUREMENTS,
}


def run(
    session: Session, names: Sequence[str], output: str, messages: int, spark_options: spark.Options
) -> None:
    """Measure, print a table, and write the figures to a file.

    Arguments:
        names: only measurements that begin with one of these; none means all.
        output: where the figures go, as JSON: a list of `{name, value, unit, goal, holds}`.
        messages: size of the stores on which history and rebuilds are measured.
        spark_options: how Spark is measured.
    """
    figures = Figures(names, session.out.note)
    measurements = dict(MEASUREMENTS)
    for module in (search, spark, follow):
        measurements |= module.measurements(spark_options)
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        # Measurements under several names are made once.
        for measure in dict.fromkeys(m for prefix, m in measurements.items() if figures.wants(prefix)):
            measure(figures, Path(folder), messages)
    Path(output).write_bytes(msgspec.json.format(msgspec.json.encode(figures.found), indent=1) + b"\n")
    if session.out.as_json:
        session.out.json(figures.found)
    else:
        session.out.table(
            ["name", "value", "unit", "goal", "holds"], [_row(figure) for figure in figures.found]
        )
        session.out.note(f"Written to {output}.")


def _row(figure: Figure) -> list[object]:
    holds = {True: "yes", False: "no", None: None}[figure.holds]
    goal = None if figure.goal is None else f"{figure.goal:,.10g}"
    return [
        figure.name,
        f"{figure.value:,.4g}" if figure.value < 100 else f"{figure.value:,.0f}",
        figure.unit,
        goal,
        holds,
    ]
