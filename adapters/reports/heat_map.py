"""Heat maps of reports as SVG: one per topic, with a cell for each combination of values."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from postroom.adapters.reports.labels import label_of
from postroom.projections.reports.report import HeatMap

MAX_MAPS = 8
"""Maximum number of heat maps of a chart."""
WIDTH, HEIGHT, LEFT, TOP = 760, 30, 250, 48
MIN_OPACITY, MAX_OPACITY = 0.08, 0.6
"""Opacity of the cells of the smallest and the largest figure, on which text is legible."""

Row = Mapping[str, Any]


def draw_heat_maps(chart: HeatMap, rows: Sequence[Row]) -> tuple[list[str], int]:
    """Return a heat map for each value of the column `by`, and the number of omitted ones."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[chart.by], []).append(row)
    names = sorted(groups, key=lambda name: (-_largest(chart, groups[name]), label_of(name)))
    shown = sorted(names[:MAX_MAPS], key=label_of)
    return [_draw(chart, name, groups[name]) for name in shown], len(names) - len(shown)


def _draw(chart: HeatMap, name: Any, rows: Sequence[Row]) -> str:
    x, *others = _axes(chart, rows)
    policies = [row for row in rows if not _is_actual(chart, row)]
    actual = next((row[chart.value] for row in rows if _is_actual(chart, row)), None)
    columns = sorted({row[x] for row in policies}, key=_order)
    lines = sorted(
        {tuple(row[each] for each in others) for row in policies}, key=lambda line: [*map(_order, line)]
    )
    figures = {(row[x], tuple(row[each] for each in others)): row[chart.value] for row in policies}
    low, high = min(figures.values()), max(figures.values())
    width = (WIDTH - LEFT) / len(columns)
    parts = []
    head = [] if name is None else [label_of(name)]
    if actual is not None:
        head.append(f"actual: {_number(actual)}")
    parts.append(_text(8, 16, ", ".join(head), "start"))
    parts += [
        _text(LEFT + (number + 0.5) * width, TOP - 8, _label(x, value), "middle")
        for number, value in enumerate(columns)
    ]
    for number, line in enumerate(lines):
        y = TOP + number * HEIGHT
        label = ", ".join(_label(*each) for each in zip(others, line, strict=True))
        parts.append(_text(LEFT - 8, y + HEIGHT / 2 + 4, label, "end"))
        for index, value in enumerate(columns):
            figure = figures[value, line]
            share = (figure - low) / (high - low) if high > low else 0.0
            opacity = MIN_OPACITY + share * (MAX_OPACITY - MIN_OPACITY)
            left = LEFT + index * width
            parts.append(
                f'<rect x="{left + 1:.1f}" y="{y + 1}" width="{width - 2:.1f}" height="{HEIGHT - 2}" '
                f'fill="var(--series-1)" fill-opacity="{opacity:.2f}"/>'
            )
            parts.append(_text(left + width / 2, y + HEIGHT / 2 + 4, _number(figure), "middle"))
    height = TOP + len(lines) * HEIGHT + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-size="12" '
        f'fill="var(--ink)">{"".join(parts)}</svg>'
    )


def _axes(chart: HeatMap, rows: Sequence[Row]) -> list[str]:
    """Return the columns that have values, those that vary first; the first is the x axis."""
    columns = [name for name in chart.columns if any(row[name] is not None for row in rows)]
    return sorted(columns, key=lambda name: len({row[name] for row in rows}) < 3)  # null is the actual row's


def _is_actual(chart: HeatMap, row: Row) -> bool:
    return all(row[name] is None for name in chart.columns)


def _largest(chart: HeatMap, rows: Sequence[Row]) -> float:
    return max(float(row[chart.value]) for row in rows)


def _order(value: Any) -> tuple[bool, Any]:
    return value is not None, value


def _label(column: str, value: Any) -> str:
    name = column.removesuffix("_ms").replace("_", " ")
    return f"{name} {value / 1_000:g} s" if column.endswith("_ms") else f"{name} {value}"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'
