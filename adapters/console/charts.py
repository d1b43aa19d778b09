"""Charts of pages, drawn as SVG: lines of rates, bars of a search, and outcomes of policies."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from postroom.adapters.console.event_filter import write_time
from postroom.adapters.console.values import number, utc
from postroom.application.ports.facets import Timeline
from postroom.application.queries.simulate_policy import Comparison, Figures
from postroom.application.text import printable
from postroom.domain.policy import DAY_MS

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


LABEL_PERCENT: Final = 24
BAR_PERCENT: Final = 56
ROW: Final = 24
"""Height in pixels; widths are percentages, so that text has the same size in any window."""
CASES: Final = (("Recorded", "observed", 1), ("Best case", "best", 2), ("Worst case", "worst", 4))


class Measure(NamedTuple):
    """A figure that a chart compares.

    Arguments:
        field: name of the figure's field in `Figures`.
        write: formats a value.
    """

    title: str
    field: str
    write: Callable[[float], str]


def write_duration(ms: float) -> str:
    """Return a duration in its largest unit."""
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s")):
        if ms >= size:
            return f"{ms / size:,.1f} {unit}"
    return f"{ms:,.0f} ms"


MEASURES: Final = (
    Measure("Dead-lettered messages", "dead_lettered", number),
    Measure("Settled messages", "settled", number),
    Measure("Still waiting", "waiting", number),
    Measure("Deliveries", "deliveries", number),
    Measure("Time in the queue, median", "queued_p50_ms", write_duration),
    Measure("Time in the queue, 95 %", "queued_p95_ms", write_duration),
)


def outcome_charts(comparison: Comparison) -> list[tuple[str, Markup]]:
    """Return a title and a chart for each measure."""
    return [(each.title, _chart(each, comparison)) for each in MEASURES]


def _chart(measure: Measure, comparison: Comparison) -> Markup:
    figures: Sequence[tuple[str, Figures, int]] = [
        (label, getattr(comparison, case), series) for label, case, series in CASES
    ]
    values = [(label, float(getattr(each, measure.field)), series) for label, each, series in figures]
    top = max(value for _, value, _ in values)
    text = ", ".join(f"{label}: {measure.write(value)}" for label, value, _ in values)
    rows = [_row(index, row, top, measure) for index, row in enumerate(values)]
    return Markup('<svg class="outcome" role="img"><title>{}. {}</title>{}</svg>').format(
        measure.title, text, Markup("").join(rows)
    )


def _row(index: int, row: tuple[str, float, int], top: float, measure: Measure) -> Markup:
    label, value, series = row
    width = max(0.5, BAR_PERCENT * value / top if top > 0 else 0.0)
    return Markup(
        '<g class="series-{}"><text class="chart-label" x="0" y="{}">{}</text>'
        '<rect class="chart-bar" x="{}%" y="{}" width="{:.1f}%" height="{}" rx="2"/>'
        '<text class="chart-label" x="{:.1f}%" dx="6" y="{}">{}</text></g>'
    ).format(
        series,
        index * ROW + 16,
        label,
        LABEL_PERCENT,
        index * ROW + 6,
        width,
        ROW - 12,
        LABEL_PERCENT + width,
        index * ROW + 16,
        measure.write(value),
    )


WIDTH: Final = 640
HEIGHT: Final = 128
MIN_HEIGHT: Final = 2.0
MINUTE_MS: Final = 60_000
UNITS: Final = ((DAY_MS, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"), (1, "ms"))


class TimelineChart(NamedTuple):
    """A rendered timeline.

    Arguments:
        note: the basis of the counts, as a sentence.
        width: time that a bar spans, as text.
        start, end: time that the timeline spans, as text.
    """

    svg: Markup
    note: str
    width: str
    start: str
    end: str


def chart_of(timeline: Timeline, link: Callable[[int, int], str]) -> TimelineChart:
    """Render a timeline of at least one bar.

    Arguments:
        link: returns the link to the messages from one time to another, both inclusive, in ms.
    """
    top = max(timeline.counts)
    step = WIDTH / len(timeline.counts)
    shapes = []
    for index, count in enumerate(timeline.counts):
        start = timeline.start + index * timeline.width
        end = start + timeline.width - 1
        height = max(MIN_HEIGHT, HEIGHT * count / top) if count else 0.0
        label = f"{write_time(start)}: {count:,}"
        # The whole column is the link, as a low bar is hard to hit.
        shapes.append(
            Markup(
                '<a href="{}" aria-label="{}" data-start="{}" data-end="{}"><title>{}</title>'
                '<rect class="timeline-hit" x="{:.2f}" y="0" width="{:.2f}" height="{}"/>'
                '<rect class="chart-bar" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"/></a>'
            ).format(
                *(link(start, end), label, write_time(start), write_time(end), label),
                *(index * step, step, HEIGHT),
                *(index * step + step / 16, HEIGHT - height, step * 7 / 8, height),
            )
            if count
            else Markup('<rect class="timeline-gap" x="{:.2f}" y="0" width="{:.2f}" height="{}"/>').format(
                index * step, step, HEIGHT
            )
        )
    svg = Markup(
        '<svg class="chart timeline" viewBox="0 0 {} {}" role="group" aria-label="Messages over time" '
        'preserveAspectRatio="none" data-timeline>{}</svg>'
    ).format(WIDTH, HEIGHT, Markup("").join(shapes))
    ends = (timeline.start, timeline.start + len(timeline.counts) * timeline.width)
    return TimelineChart(
        svg, _note(timeline), _duration(timeline.width), *(_end(each, timeline.width) for each in ends)
    )


def _end(ms: int, width: int) -> str:
    """Return the time at an end of the timeline, without seconds where bars are minutes or longer."""
    text = utc(ms * 1_000)
    return f"{text[:16] if width % MINUTE_MS == 0 else text} UTC"


def _note(timeline: Timeline) -> str:
    counted = sum(timeline.counts)
    match timeline.basis:
        case "messages":
            return f"All {counted:,} messages."
        case "events":
            return f"{counted:,} sends, by the time at which the log recorded them."
        case "sample":
            return (
                f"{counted:,} matches in a sample of {timeline.sample:,} messages; narrow the search to "
                "count all of them."
            )


def _duration(ms: int) -> str:
    length, unit = next(each for each in UNITS if ms % each[0] == 0)
    return f"{ms // length:,} {unit}"
