"""Charts of a policy simulation: the recorded outcome, and the best and worst case under another policy."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from markupsafe import Markup

from postroom.adapters.console.filters import number
from postroom.application.queries.simulate_policy import Comparison, Figures

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
