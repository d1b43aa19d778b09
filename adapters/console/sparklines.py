"""Lines and bars in the rows of tables, drawn as SVG without axes; scales of numbers begin at zero."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from postroom.adapters.console.values import DASH, number, utc
from postroom.application.text import printable

SPARK_WIDTH: Final = 120
SPARK_HEIGHT: Final = 28
_MARGIN: Final = 2.0


def sparkline(
    values: Sequence[float | None], title: str, *, series: int = 1, points: int | None = None
) -> Markup:
    """Return a line over its zero, scaled to its maximum.

    Arguments:
        values: at equal distances, oldest first; None where nothing was measured.
        title: description, to which the last value and the maximum are appended.
        series: number of the colour, 1 to 4.
        points: maximum number of points; each is the largest value of its part.
    """
    numbers = [value for value in values if value is not None]
    top = max(numbers, default=0.0)
    text = (
        f"{title}: {number(numbers[-1])} now, {number(top)} at most" if numbers else f"{title}: not measured"
    )
    if points is not None and len(values) > points:
        size = -(-len(values) // points)
        parts = [values[start : start + size] for start in range(0, len(values), size)]
        values = [max((each for each in part if each is not None), default=None) for part in parts]
    shapes = [
        Markup('<path class="spark-line" d="{}"/>').format(each)
        for each in _paths(values, top, SPARK_WIDTH, SPARK_HEIGHT)
    ]
    return _spark(text, shapes, series)


def trend(counts: Sequence[int], start: int, width: int, title: str) -> Markup:
    """Return a bar for each count, scaled from 0 to the largest.

    Arguments:
        start, width: when the first bar begins, and the length of each, in µs.
        title: what is counted, for screen readers.
    """
    top, step = max(counts, default=0), SPARK_WIDTH / max(1, len(counts))
    shapes = [
        Markup(
            '<g class="plot-hit"><title>{}</title>'
            '<rect class="spark-hit" x="{:.1f}" width="{:.1f}" height="{}"/>'
            '<rect class="chart-bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/></g>'
        ).format(
            f"{utc(start + index * width)[:16]}: {count:,}",
            *(index * step, step, SPARK_HEIGHT),
            *(index * step + step / 8, SPARK_HEIGHT - _height(count, top), step * 3 / 4, _height(count, top)),
        )
        for index, count in enumerate(counts)
        if count
    ]
    return _spark(f"{title}: {number(top)} at most", shapes, 1)


def describe_trend(counts: Sequence[int], start: int, width: int) -> str:
    """Return the counts of a trend as text, without those that are 0."""
    return ", ".join(
        f"{utc(start + index * width)[:16]}: {count:,}" for index, count in enumerate(counts) if count
    )


def _height(count: int, top: int) -> float:
    return max(_MARGIN, (SPARK_HEIGHT - 1) * count / top)


def _spark(text: str, shapes: Sequence[Markup], series: int) -> Markup:
    return Markup(
        '<svg class="spark series-{}" viewBox="0 0 {} {}" role="img" preserveAspectRatio="none">'
        '<title>{}</title><path class="plot-zero" d="M0 {}H{}"/>{}</svg>'
    ).format(
        series,
        SPARK_WIDTH,
        SPARK_HEIGHT,
        printable(text, multiline=False),
        *(SPARK_HEIGHT, SPARK_WIDTH),
        Markup("").join(shapes),
    )


def _paths(values: Sequence[float | None], top: float, width: float, height: float) -> list[str]:
    """Return the SVG path of each run of values; a run of one value is a dot."""
    step = width / max(1, len(values) - 1)
    runs: list[list[tuple[str, str]]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            runs.append([])
            continue
        share = value / top if top > 0 else 0.0
        y = f"{height - share * (height - _MARGIN):.1f}"
        run = runs[-1]
        if len(run) > 1 and run[-1][1] == run[-2][1] == y:  # a level line needs its ends only
            run.pop()
        run.append((f"{index * step:.1f}", y))
    texts = [[f"{x} {y}" for x, y in run] for run in runs if run]
    return [f"M{run[0]}L{' '.join(run[1:] or run)}" for run in texts]


CHARTS: Final[dict[str, Callable[..., Any]]] = {
    "sparkline": sparkline,
    "trend": trend,
    "describe_trend": describe_trend,
}


# -- bars of messages over the times that they have in common ---

ROW: Final = 24
"""Height in pixels; widths are percentages."""
STEPS: Final = (
    *(base * 10**exponent for exponent in range(6) for base in (1, 2, 5)),
    *(each * 1_000_000 for each in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800)),
    *(each * 3_600_000_000 for each in (1, 2, 3, 6, 12, 24, 48, 168, 720, 2_160, 8_760)),
)
"""Distances of the lines of a scale, in µs."""
MAX_LINES: Final = 8


class Span(NamedTuple):
    """A part of a bar, between two times in µs.

    Arguments:
        kind: `wait`, or `work` while it is in flight.
        mark: sign at its end: `ack`, `fail`, `dead` or `gone`; empty for no sign.
    """

    start: int
    end: int
    kind: str
    mark: str = ""


MARKS: Final = {"ack": "✓", "fail": "!", "dead": "✕", "gone": DASH}
MIN_WIDTH: Final = 0.4
"""Width of the shortest part of a bar, in percent."""


class TimeScale(NamedTuple):
    """The times that bars have in common, in µs."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """Return the time that it spans, 1 µs or more."""
        return max(1, self.end - self.start)

    @property
    def step(self) -> int:
        """Return the distance of its lines; 0 for a scale without any."""
        return next((each for each in STEPS if self.length / each <= MAX_LINES), 0)

    def place(self, at: int) -> float:
        """Return the place of a time in percent; a time outside of the scale is at one of its ends."""
        return min(100.0, max(0.0, 100.0 * (at - self.start) / self.length))

    def bar(self, spans: Sequence[Span]) -> Markup:
        """Return the bar of one message: thin where it waits, thick where it is in flight."""
        shapes = [*self._lines(), *map(self._part, spans), *map(self._mark, spans)]
        return Markup('<svg class="trace" aria-hidden="true">{}</svg>').format(Markup("").join(shapes))

    def _lines(self) -> Iterator[Markup]:
        count = self.length // self.step if self.step else 0
        for index in range(1, count + 1):
            x = f"{self.place(self.start + index * self.step):.2f}%"
            yield Markup('<line class="scale-line" x1="{0}" x2="{0}" y1="0" y2="{1}"/>').format(x, ROW)

    def _part(self, each: Span) -> Markup:
        start = min(self.place(each.start), 100 - MIN_WIDTH)
        width = max(MIN_WIDTH, self.place(each.end) - start)
        height = 12 if each.kind == "work" else 4
        return Markup('<rect class="span-{}" x="{:.2f}%" y="{}" width="{:.2f}%" height="{}"/>').format(
            each.kind, start, (ROW - height) / 2, width, height
        )

    def _mark(self, each: Span) -> Markup:
        if not each.mark:
            return Markup("")
        x = min(97.0, self.place(each.end))  # so that the whole sign is within the bar
        return Markup('<text class="mark-{}" x="{:.2f}%" y="17">{}</text>').format(
            each.mark, x, MARKS[each.mark]
        )
