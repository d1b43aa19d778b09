"""A report as a page of HTML: its charts and heat maps as SVG, and its table."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from itertools import islice
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

import pyarrow as pa
import pygal
from pygal.style import Style

from postroom.projections.reports.report import Chart, HeatMap, Report

# pygal's plug-in finder lacks find_spec, so on Python 3.12 and later each failing import would warn.
sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, pygal.PluginImportFixer)]

MAX_SERIES = 8
"""Number of colors, and so the maximum number of series of a chart."""
MAX_LABELS = 8
"""Maximum number of labels on the x axis."""
_STYLE = Style(
    background="transparent",
    plot_background="transparent",
    foreground="var(--ink)",
    foreground_strong="var(--ink)",
    foreground_subtle="var(--muted)",
    colors=tuple(f"var(--series-{number})" for number in range(MAX_SERIES)),
    font_family="inherit",
    label_font_size=11,
    major_label_font_size=11,
    opacity=".9",
)


def label_of(value: Any) -> str:
    """Return a value as printable text; other characters, which XML can't contain, become `�`."""
    text = "(none)" if value is None else str(value)
    return "".join(each if each.isprintable() else "�" for each in text)


class Drawing(NamedTuple):
    """A rendered chart.

    Arguments:
        svg: an element for an HTML page, whose style sheet defines the colors.
        series: names of the series, in the order of colors.
        omitted: number of series that are not in the chart.
    """

    svg: str
    series: Sequence[str]
    omitted: int


def draw(chart: Chart, rows: Sequence[Mapping[str, Any]]) -> Drawing:
    """Render a chart of a report's rows, with the `MAX_SERIES` series of the largest sums."""
    xs = sorted({row[chart.x] for row in rows})
    series = _series(chart, rows)
    largest = sorted(series, key=lambda name: (-sum(series[name].values()), name))
    shown = sorted(largest[:MAX_SERIES])
    kind = pygal.Line if isinstance(xs[0], datetime) and len(xs) > 2 else pygal.Bar
    drawing = kind(
        style=_STYLE,
        js=(),
        disable_xml_declaration=True,
        no_prefix=True,
        width=760,
        height=280,
        show_legend=False,
        x_labels_major_every=-(-len(xs) // MAX_LABELS) or 1,
        show_minor_x_labels=False,
        truncate_label=-1,
        dots_size=2.5,
        include_x_axis=True,
        y_title=chart.unit or None,
        no_data_text="",
    )
    drawing.x_labels = [f"{x:%m-%d %H:%M}" if isinstance(x, datetime) else str(x) for x in xs]
    for name in shown:
        drawing.add(name, [series[name].get(x) for x in xs])
    drawing.add_xml_filter(_without_scripts)
    return Drawing(drawing.render(is_unicode=True), shown, len(series) - len(shown))


def _series(chart: Chart, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[Any, float]]:
    series: dict[str, dict[Any, float]] = defaultdict(dict)
    for row in rows:
        value = row[chart.value]
        if value is None:
            continue
        points = series[label_of(row[chart.by])]
        before = points.get(row[chart.x])
        if before is None:
            points[row[chart.x]] = value
        else:
            points[row[chart.x]] = before + value if chart.merge == "sum" else max(before, value)
    return series


def _without_scripts(root: Element) -> Element:
    for parent in root.iter():
        for child in list(parent):
            tag: object = child.tag  # for a comment, the tag is a function
            if not isinstance(tag, str) or tag.endswith("script"):
                parent.remove(child)
    return root


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
    """Return the columns that have values, varying columns first; the first is the x axis."""
    columns = [name for name in chart.columns if any(row[name] is not None for row in rows)]
    return sorted(columns, key=lambda name: len({row[name] for row in rows}) < 3)  # null in the actual row


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


MAX_ROWS = 2_000
"""Maximum number of rows in a page."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy, which blocks scripts even if one were injected."""
_SWATCHES = "".join(f".s{n}::before {{ color: var(--series-{n}); }}\n" for n in range(MAX_SERIES))


def page_of(report: Report, rows: pa.Table) -> str:
    """Render the page of a report."""
    listed = rows.to_pylist()
    style = (files("postroom.adapters.reports") / "page.css").read_text() + _SWATCHES
    charts = [_figure(chart, listed) for chart in report.charts if listed]
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{_plain(report.title)}</title><style>{style}</style></head><body>",
            f"<h1>{_plain(report.title)}</h1>",
            f"<p>{_period(listed)}</p>",
            *charts,
            _table(rows.column_names, listed),
            "</body></html>\n",
        )
    )


def _figure(chart: Chart | HeatMap, rows: Sequence[Mapping[str, Any]]) -> str:
    if isinstance(chart, HeatMap):
        maps, rest = draw_heat_maps(chart, rows)
        return f"{_heading(chart)}{''.join(maps)}{_omission(rest)}</figure>"
    drawing = draw(chart, rows)
    legend = "".join(
        f'<li class="s{number}">{_plain(name)}</li>' for number, name in enumerate(drawing.series)
    )
    return f"{_heading(chart)}{drawing.svg}<ul>{legend}</ul>{_omission(drawing.omitted)}</figure>"


def _heading(chart: Chart | HeatMap) -> str:
    unit = f" ({_plain(chart.unit)})" if chart.unit else ""
    return f"<figure><h2>{_plain(chart.title)}{unit}</h2>"


def _omission(count: int) -> str:
    return f"<p>{count:,} series with smaller figures are omitted.</p>" if count else ""


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    numeric = [any(isinstance(row[name], int | float) for row in islice(rows, 100)) for name in columns]
    kinds = [' class="number"' if each else "" for each in numeric]
    head = "".join(f"<th{kind}>{_plain(name)}</th>" for name, kind in zip(columns, kinds, strict=True))
    body = "\n".join(
        _row([f"<td{kind}>{_cell(row[name])}</td>" for name, kind in zip(columns, kinds, strict=True)])
        for row in islice(rows, MAX_ROWS)
    )
    more = f"<p>The first {MAX_ROWS:,} of {len(rows):,} rows.</p>" if len(rows) > MAX_ROWS else ""
    return f"<h2>Rows</h2><div><table><tr>{head}</tr>\n{body}</table></div>{more}"


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def _period(rows: Sequence[Mapping[str, Any]]) -> str:
    starts = [row["start"] for row in rows if isinstance(row.get("start"), datetime)]
    if not starts:
        return "No rows." if not rows else f"{len(rows):,} rows."
    return f"{_cell(min(starts))} to {_cell(max(starts))} UTC, by the log time of events."


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case datetime():
            return f"{value:%Y-%m-%d %H:%M}"
        case float():
            return f"{value:,.3f}".rstrip("0").rstrip(".")
        case int():
            return f"{value:,}"
    return _plain(value)


def _plain(value: Any) -> str:
    return escape(label_of(value))
