"""Bars of a timeline: their width, and counts of times."""

from collections.abc import Iterable

from postroom.application.ports.facets import Basis, Timeline

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
WIDTHS = (
    *(1, 5, 10, 50, 100, 500),
    *(seconds * 1_000 for seconds in (1, 5, 15, 30, 60, 300, 900, 1_800)),
    *(hours * HOUR_MS for hours in (1, 3, 6, 12)),
    *(days * DAY_MS for days in (1, 7, 28, 91, 364)),
)
"""Widths of bars in ms; wider ones are ten, hundred … times the last."""


def bar_width(first: int, last: int, bars: int) -> int:
    """Return the least width with which times from `first` to `last` fit into so many bars.

    Arguments:
        first, last: ms since 1970 UTC. bars: at least 2.
    """
    for width in WIDTHS:
        if last // width - first // width < bars:
            return width
    width = WIDTHS[-1]
    while last // width - first // width >= bars:
        width *= 10
    return width


def make_timeline(
    times: Iterable[tuple[int, int]], bars: int, basis: Basis, *, width: int = 0, sample: int = 0
) -> Timeline:
    """Return the timeline of times in ms, each with the number of its messages.

    Arguments:
        width: of a bar in ms; 0 is the least that is possible.
    """
    counted = list(times)
    if not counted:
        return Timeline(basis, 0, width or WIDTHS[0], (), sample)
    first, last = min(time for time, _ in counted), max(time for time, _ in counted)
    width = width or bar_width(first, last, bars)
    counts = [0] * (last // width - first // width + 1)
    for time, count in counted:
        counts[time // width - first // width] += count
    return Timeline(basis, first // width * width, width, tuple(counts), sample)
