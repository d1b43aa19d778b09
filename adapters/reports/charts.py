"""Charts of reports as SVG, rendered by pygal."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

import pygal
from pygal.style import Style

from postroom.adapters.reports.labels import label_of
from postroom.projections.reports.report import Chart

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
            tag: object = child.tag  # a function for a comment
            if not isinstance(tag, str) or tag.endswith("script"):
                parent.remove(child)
    return root
