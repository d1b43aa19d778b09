"""Charts of pages, drawn as SVG: lines and bars over time, with axes.

Every scale begins at zero. console.js shows the title of the shape under the pointer at once; a table behind
the chart has the same values.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import ceil
from typing import Final, NamedTuple

from markupsafe import Markup

from postroom.adapters.console.event_filter import write_time
from postroom.adapters.console.samples import EVERY_SECONDS, SAMPLES
from postroom.adapters.console.values import US, age, number, span
from postroom.application.ports.facets import Timeline
from postroom.domain.policy import DAY_MS

JOINED: Final = 4
"""Number of the samples that a chart of the latest minutes draws as one value."""
TICKS: Final = 4
"""Approximate number of intervals of a scale."""
LEAST: Final = 1e-6
"""Below this, a scale is as if all values were 0."""
MIN_BAR: Final = 1.5
"""Minimum height of a bar, in percent, so that a count of 1 beside one of 1,000 is visible."""
TIMES: Final = 6
"""Maximum number of times below a chart."""
SECOND_MS, MINUTE_MS, HOUR_MS = 1_000, 60_000, 3_600_000
SPANS: Final = tuple(
    unit * each
    for unit, numbers in (
        (1, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
        (SECOND_MS, (1, 2, 5, 10, 30)),
        (MINUTE_MS, (1, 2, 5, 10, 30)),
        (HOUR_MS, (1, 2, 6, 12)),
        (DAY_MS, (1, 2, 7, 14, 28, 91, 182, 365, 730, 3_650)),
    )
    for each in numbers
)
"""Lengths of time (ms) that divide a scale well."""


class Tick(NamedTuple):
    """A label of an axis.

    Arguments:
        at: place, in percent of the axis.
        anchor: which point of the label is at that place: its `start`, `middle` or `end`.
    """

    at: float
    text: str
    anchor: str = "middle"


class Series(NamedTuple):
    """Values over time.

    Arguments:
        values: at equal distances, oldest first; None where nothing was measured.
        colour: name of the colour: 1 to 4, or `bad`.
        is_bars: whether each value is a bar, not a point of a line.
    """

    name: str
    values: Sequence[float | None]
    colour: int | str = 1
    is_bars: bool = False


class Chart(NamedTuple):
    """A chart with its axes and its table; `ui.chart` shows it.

    Arguments:
        title: what the values are, with their unit.
        ticks: labels of the vertical axis.
        times: labels of the horizontal axis.
        keys: name and colour of each series.
        headings, rows: headings and rows of the table.
    """

    title: str
    svg: Markup
    ticks: list[Tick]
    times: list[Tick]
    keys: list[tuple[str, int | str]]
    headings: list[str]
    rows: list[list[str]]


def plot(
    title: str,
    series: Sequence[Series],
    moments: Sequence[str],
    times: list[Tick],
    *,
    write: Callable[[float | None], str] = number,
    is_time: bool = False,
    heading: str = "Time (UTC)",
    links: Sequence[tuple[str, str, str]] | None = None,
) -> Chart:
    """Return a chart of series that have the same length.

    Arguments:
        moments: the time of each value, for its title and for the table.
        times: labels of the horizontal axis.
        write: formats a value.
        is_time: whether values are in ms, so that the scale is divided as times are.
        heading: heading of the times in the table.
        links: for each value, the link, start and end of its time; values of 0 have no link.
    """
    top = max((value for each in series for value in each.values if value is not None), default=0.0)
    scale = _scale(top, is_time=is_time)
    rows, hits = [], []
    for index, moment in enumerate(moments):
        values = [each.values[index] for each in series]
        texts = [write(value) for value in values]
        rows.append([moment, *texts])
        if any(values) or (links is None and any(value is not None for value in values)):
            names = [each.name + " " if len(series) > 1 else "" for each in series]
            what = ", ".join(map(str.__add__, names, texts))
            hits.append(_hit(index, f"{moment}: {what}", None if links is None else links[index]))
    shapes = [*hits, _grid(scale, len(moments))]  # paths let the pointer through
    shapes += [_bars(each, scale[-1]) if each.is_bars else _lines(each, scale[-1]) for each in series]
    svg = Markup(
        '<svg class="plot-lines" viewBox="0 0 {} 100" preserveAspectRatio="none" role="{}" '
        'aria-label="{}">{}</svg>'
    ).format(
        max(1, len(moments)),
        "img" if links is None else "group",
        _summary(title, series, write),
        Markup("").join(shapes),
    )
    return Chart(
        title,
        svg,
        [
            Tick(round(100 - 100 * each / scale[-1], 2), span(each) if is_time and each else _plain(each))
            for each in scale
        ],
        times,
        [(each.name, each.colour) for each in series],
        [heading, *(each.name for each in series)],
        rows,
    )


def _hit(index: int, text: str, link: tuple[str, str, str] | None) -> Markup:
    """Return a full-height column that shows a value under the pointer, as low bars are hard to hit."""
    shape = Markup('<rect class="plot-hit" x="{}" width="1" height="100"><title>{}</title></rect>').format(
        index, text
    )
    if link is None:
        return shape
    href, start, end = link
    return Markup('<a href="{}" aria-label="{}" data-start="{}" data-end="{}">{}</a>').format(
        href, text, start, end, shape
    )


def _summary(title: str, series: Sequence[Series], write: Callable[[float | None], str]) -> str:
    """Return the description of a chart for screen readers."""
    texts = []
    for each in series:
        numbers = [value for value in each.values if value is not None]
        texts.append(f"{each.name} {write(max(numbers))} at most" if numbers else f"{each.name} not measured")
    return f"{title}: {', '.join(texts)}. The values are in the table below."


def _scale(top: float, *, is_time: bool) -> list[float]:
    """Return the values of the ticks, from 0 to at least the largest value."""
    if top < LEAST:
        return [0.0, float(SECOND_MS if is_time else 1)]
    if is_time:
        index = bisect_left(SPANS, top / TICKS)
        step = float(SPANS[index]) if index < len(SPANS) else top / TICKS
    else:
        size = 1.0
        while size * 10 <= top / TICKS:
            size *= 10
        while size > top / TICKS:
            size /= 10
        step = next(each * size for each in (1, 2, 5, 10) if each * size >= top / TICKS * (1 - 1e-9))
    return [index * step for index in range(ceil(top / step - 1e-9) + 1)]


def _plain(value: float) -> str:
    return f"{value:,.6g}" if value < 1_000_000 else f"{value / 1_000_000:,.6g}\N{NO-BREAK SPACE}M"


def _grid(scale: Sequence[float], width: int) -> Markup:
    """Return the lines of the scale; the line at zero is the base."""
    lines = "".join(f"M0 {_y(each, scale[-1])}H{width}" for each in scale[1:])
    return Markup('<path class="plot-grid" d="{}"/><path class="plot-zero" d="M0 100H{}"/>').format(
        lines, width
    )


def _y(value: float, top: float) -> str:
    return f"{max(0.0, 100 - 100 * value / top):.1f}".removesuffix(".0")


def _bars(series: Series, top: float) -> Markup:
    least = top * MIN_BAR / 100
    steps = [
        f"M{index}.1 100V{_y(max(value, least), top)}h.8V100z"
        for index, value in enumerate(series.values)
        if value
    ]
    return Markup('<path class="plot-bars series-{}" d="{}"/>').format(series.colour, "".join(steps))


def _lines(series: Series, top: float) -> Markup:
    """Return a line for each run of values; a run of one value is a dot."""
    lines: list[str] = []
    dots: list[str] = []
    run: list[str] = []
    for index, value in enumerate([*series.values, None]):
        if value is not None:
            run.append(f"{index}.5 {_y(value, top)}")
        elif run:
            (lines if len(run) > 1 else dots).append(f"M{run[0]}L{' '.join(run[1:] or run)}")
            run = []
    return Markup(
        '<path class="plot-line series-{0}" d="{1}"/><path class="plot-dot series-{0}" d="{2}"/>'
    ).format(series.colour, "".join(lines), "".join(dots))


def minutes_plot(title: str, series: Sequence[Series], taken: int) -> Chart:
    """Return a chart of the latest ten minutes.

    Each value is the mean of four samples, always of the same four, so that only the last value changes until
    the chart moves on.

    Arguments:
        series: with a value for each sample, at most `SAMPLES`.
        taken: number of samples taken since the start.
    """
    seconds, last = EVERY_SECONDS * JOINED, taken // JOINED
    first = last - SAMPLES // JOINED + 1

    def join(values: Sequence[float | None]) -> list[float | None]:
        joined: list[list[float]] = [[] for _ in range(first, last + 1)]
        for sample, value in enumerate(values, start=taken - len(values) + 1):
            if value is not None and sample // JOINED >= first:
                joined[sample // JOINED - first].append(value)
        return [sum(each) / len(each) if each else None for each in joined]

    count = last - first
    moments = [f"{age(round((count - index) * seconds) * US)} ago" for index in range(count)] + ["now"]
    length = round(count * seconds / 60)
    times = [Tick(100 * each / length, f"\N{MINUS SIGN}{length - each} min") for each in range(0, length, 2)]
    times[0] = times[0]._replace(anchor="start")
    drawn = [each._replace(values=join(each.values)) for each in series]
    return plot(title, drawn, moments, [*times, Tick(100, "now", "end")], heading="When")


def time_ticks(start: int, end: int) -> list[Tick]:
    """Return labels of round times between two times (ms since 1970 UTC)."""
    length = max(1, end - start)
    index = bisect_left(SPANS, length / TIMES)
    step = SPANS[index] if index < len(SPANS) else length
    ticks = []
    for at in range(-(-start // step) * step, end + 1, step):
        place = round(100 * (at - start) / length, 2)
        anchor = "start" if place < 3 else "end" if place > 97 else "middle"
        ticks.append(Tick(place, _clock(at, step), anchor))
    return ticks


def _clock(at: int, step: int) -> str:
    """Return a time as precisely as labels at this distance (ms) need it."""
    try:
        moment = datetime.fromtimestamp(at / 1_000, UTC)
    except (OverflowError, OSError, ValueError):
        return ""
    if step >= 60 * DAY_MS:
        return f"{moment:%Y-%m}"
    if at % DAY_MS == 0:
        return f"{moment:%m-%d}"
    if step >= MINUTE_MS:
        return f"{moment:%H:%M}"
    return f"{moment:%H:%M:%S}" if step >= SECOND_MS else f"{moment:%S.%f}"[:-3]


class TimelineChart(NamedTuple):
    """The timeline of a search.

    Arguments:
        note: the basis of the counts, as a sentence.
        width: time that a bar spans, as text.
    """

    chart: Chart
    note: str
    width: str


def chart_of(timeline: Timeline, link: Callable[[int, int], str]) -> TimelineChart:
    """Render a timeline of at least one bar.

    Arguments:
        link: returns the link to the messages from one time to another, both inclusive, in ms.
    """
    starts = [timeline.start + index * timeline.width for index in range(len(timeline.counts))]
    ends = [start + timeline.width - 1 for start in starts]
    links = [
        (link(start, end), write_time(start), write_time(end))
        for start, end in zip(starts, ends, strict=True)
    ]
    chart = plot(
        "Messages over time",
        [Series("messages", timeline.counts, is_bars=True)],
        [write_time(start) for start in starts],
        time_ticks(timeline.start, ends[-1] + 1),
        links=links,
    )
    return TimelineChart(chart, _note(timeline), span(timeline.width))


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
