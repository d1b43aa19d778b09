"""The timeline of a search, with a link for each bar."""

from collections.abc import Callable
from typing import Final, NamedTuple

from markupsafe import Markup

from postroom.adapters.console.event_filter import write_time
from postroom.adapters.console.filters import utc
from postroom.application.ports.facets import Timeline
from postroom.application.queries.explain_message import DAY_MS

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
