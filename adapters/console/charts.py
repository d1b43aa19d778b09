"""Charts as SVG, rendered by the server; the style sheet sets their colours by class."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from markupsafe import Markup

from postroom.adapters.console.filters import number
from postroom.application.text import printable

SPARK_WIDTH: Final = 120
SPARK_HEIGHT: Final = 28
_MARGIN: Final = 2.0


def sparkline(values: Sequence[float | None], title: str, *, series: int = 1) -> Markup:
    """Return a line without axes, scaled from 0 to its maximum.

    Arguments:
        values: at equal distances, oldest first; None where nothing was measured.
        title: description for screen readers, to which the last value and the maximum are appended.
        series: number of the colour, 1 to 4.
    """
    numbers = [value for value in values if value is not None]
    top = max(numbers, default=0.0)
    text = (
        f"{title}: {number(numbers[-1])} now, {number(top)} at most" if numbers else f"{title}: not measured"
    )
    paths = [
        Markup('<path class="spark-line" d="{}"/>').format(each)
        for each in _paths(values, top, SPARK_WIDTH, SPARK_HEIGHT)
    ]
    return Markup(
        '<svg class="spark series-{}" viewBox="0 0 {} {}" role="img" preserveAspectRatio="none">'
        "<title>{}</title>{}</svg>"
    ).format(series, SPARK_WIDTH, SPARK_HEIGHT, printable(text, multiline=False), Markup("").join(paths))


def _paths(values: Sequence[float | None], top: float, width: float, height: float) -> list[str]:
    """Return the SVG path of each run of values; a run of one value is a dot."""
    step = width / max(1, len(values) - 1)
    runs: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            runs.append([])
            continue
        share = value / top if top > 0 else 0.0
        runs[-1].append(f"{index * step:.1f} {height - _MARGIN - share * (height - 2 * _MARGIN):.1f}")
    return [f"M{run[0]}L{' '.join(run[1:] or run)}" for run in runs if run]


CHARTS: Final[dict[str, Callable[..., Any]]] = {"sparkline": sparkline}
