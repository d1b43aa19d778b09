"""Report pages: one HTML file with charts and rows, without scripts and external resources."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from itertools import islice
from typing import Any

import pyarrow as pa

from postroom.adapters.reports.charts import MAX_SERIES, draw, draw_heat_maps, label_of
from postroom.projections.reports.report import Chart, HeatMap, Report

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
            f"<title>{_text(report.title)}</title><style>{style}</style></head><body>",
            f"<h1>{_text(report.title)}</h1>",
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
        f'<li class="s{number}">{_text(name)}</li>' for number, name in enumerate(drawing.series)
    )
    return f"{_heading(chart)}{drawing.svg}<ul>{legend}</ul>{_omission(drawing.omitted)}</figure>"


def _heading(chart: Chart | HeatMap) -> str:
    unit = f" ({_text(chart.unit)})" if chart.unit else ""
    return f"<figure><h2>{_text(chart.title)}{unit}</h2>"


def _omission(count: int) -> str:
    return f"<p>{count:,} series with smaller figures are omitted.</p>" if count else ""


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    numeric = [any(isinstance(row[name], int | float) for row in islice(rows, 100)) for name in columns]
    kinds = [' class="number"' if each else "" for each in numeric]
    head = "".join(f"<th{kind}>{_text(name)}</th>" for name, kind in zip(columns, kinds, strict=True))
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
    return _text(value)


def _text(value: Any) -> str:
    return escape(label_of(value))
