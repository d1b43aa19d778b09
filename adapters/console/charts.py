"""Charts as SVG, drawn by the server; colours are those of the style sheet, by class."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from markupsafe import Markup

from postroom.adapters.console.filters import number
from postroom.application.printable import printable

WIDTH: Final = 640
HEIGHT: Final = 160
SPARK_WIDTH: Final = 120
SPARK_HEIGHT: Final = 28
_MARGIN: Final = 2.0
_AXIS: Final = 18.0


def sparkline(values: Sequence[float | None], title: str, *, series: int = 1) -> Markup:
    """Return a line without axes, scaled from 0 to its maximum.

    Arguments:
        values: at equal distances, oldest first; None where nothing was measured.
        title: what it shows, for those who don't see it; the last value and the maximum are added.
        series: number of its colour, 1 to 4.
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
    return _svg(f"spark series-{series}", SPARK_WIDTH, SPARK_HEIGHT, text, paths)


def lines(
    series: Sequence[tuple[str, Sequence[float | None]]], title: str, *, labels: Sequence[str] = ()
) -> Markup:
    """Return lines over time on one scale.

    Arguments:
        series: name and values of each, at equal distances, oldest first; there are four colours.
        labels: of the first and the last value.
    """
    top = max((value for _, values in series for value in values if value is not None), default=0.0)
    shapes = [_scale(top)]
    for index, (name, values) in enumerate(series):
        shapes.append(
            Markup('<g class="series-{}"><title>{}</title>{}</g>').format(
                index % 4 + 1,
                _text(name),
                Markup("").join(
                    Markup('<path class="chart-line" d="{}"/>').format(each)
                    for each in _paths(values, top, WIDTH, HEIGHT - _AXIS)
                ),
            )
        )
    return _svg("chart", WIDTH, HEIGHT, title, [*shapes, *_ends(labels)])


def bars(items: Sequence[tuple[str, float]], title: str, *, series: int = 1) -> Markup:
    """Return bars, such as counts over time; each has its label and value as a title.

    Arguments:
        items: label and value of each, oldest first.
    """
    top = max((value for _, value in items), default=0.0)
    space = HEIGHT - _AXIS
    step = WIDTH / max(1, len(items))
    shapes = [_scale(top)]
    for index, (label, value) in enumerate(items):
        height = (space - 2 * _MARGIN) * value / top if top > 0 else 0.0
        shapes.append(
            Markup(
                '<rect class="chart-bar" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}">'
                "<title>{}: {}</title></rect>"
            ).format(
                index * step + min(1.0, step / 8),
                space - _MARGIN - height,
                max(0.5, step - min(2.0, step / 4)),
                height,
                _text(label),
                number(value),
            )
        )
    labels = [items[0][0], items[-1][0]] if items else []
    return _svg(f"chart series-{series}", WIDTH, HEIGHT, title, [*shapes, *_ends(labels)])


def _svg(classes: str, width: int, height: int, title: str, shapes: Sequence[Markup]) -> Markup:
    return Markup(
        '<svg class="{}" viewBox="0 0 {} {}" role="img" preserveAspectRatio="none"><title>{}</title>{}</svg>'
    ).format(classes, width, height, _text(title), Markup("").join(shapes))


def _scale(top: float) -> Markup:
    return Markup(
        '<path class="chart-axis" d="M0 {0:.1f}H{1}"/><text class="chart-label" x="2" y="11">{2}</text>'
    ).format(HEIGHT - _AXIS, WIDTH, number(top))


def _ends(labels: Sequence[str]) -> list[Markup]:
    places = ((0, "start"), (WIDTH, "end"))
    return [
        Markup('<text class="chart-label" x="{}" y="{}" text-anchor="{}">{}</text>').format(
            x, HEIGHT - 4, anchor, _text(label)
        )
        for (x, anchor), label in zip(places, labels, strict=False)
    ]


def _paths(values: Sequence[float | None], top: float, width: float, height: float) -> list[str]:
    """Return the path of each run of values; a value by itself is a dot."""
    step = width / max(1, len(values) - 1)
    runs: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            runs.append([])
            continue
        share = value / top if top > 0 else 0.0
        runs[-1].append(f"{index * step:.1f} {height - _MARGIN - share * (height - 2 * _MARGIN):.1f}")
    return [f"M{run[0]}L{' '.join(run[1:] or run)}" for run in runs if run]


def _text(text: str) -> str:
    return printable(text, multiline=False)


CHARTS: Final[dict[str, Callable[..., Any]]] = {"bars": bars, "lines": lines, "sparkline": sparkline}
