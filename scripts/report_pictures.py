"""Draw the pictures of docs/reports.md: a chart of each report on a sample store, half a day of three topics.

The store is the same each time, so a picture changes only with the program.
"""

import re
from collections.abc import Iterator
from contextlib import closing
from html import escape
from importlib.resources import files
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from msgspec.structs import replace

from postroom.adapters.compose.reports import make_report, whatif_report
from postroom.adapters.reports.page import draw, draw_heat_maps
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.domain.message import (
    Headers,
    MessageAcked,
    MessageDeadLettered,
    MessageReceived,
    MessageRequeued,
)
from postroom.domain.policy_grid import policy_grid
from postroom.domain.record import Event
from postroom.projections.reports.report import REPORTS, HeatMap, Report
from postroom.projections.spark.options import LogSelection
from tests.conformance.records import append, created, sent, stream

IMAGES = Path(__file__).parents[1] / "docs" / "images"
BEGIN = 1_793_520_000_000_000
"""Log time at which the sample begins, µs."""
SECOND, HOUR = 1_000_000, 3_600_000_000
TOPICS = {"orders": (2, 0.02, "shop"), "invoices": (8, 0.06, "billing"), "emails": (5, 0.25, "crm")}
"""Of each topic: seconds that its consumer works, share of deliveries that fail, and publisher."""
ERRORS = ("HTTP 503", "connection reset", "timeout after 30 s")
MAX_ATTEMPTS, VISIBILITY = 3, 30 * SECOND


def main() -> None:
    """Write a picture for each report."""
    with TemporaryDirectory() as folder:
        store = str(Path(folder) / "sample.db")
        with closing(SqliteEventLog(store, "shop@eu", durability="relaxed")) as log:
            append(log, sample())
        grid = policy_grid(max_attempts=(1, 2, 3, 5, 8), visibility_ms=(5_000, 15_000, 30_000, 120_000))
        for report in (*REPORTS.values(), whatif_report(store, grid)):
            (IMAGES / f"report-{report.name}.svg").write_text(picture(report, store))


def sample(messages: int = 3_000) -> list[Event]:
    """Return the events of the sample in the order of log time."""
    chance = Random(13)
    events = [event for number in range(1, messages + 1) for event in course(number, chance)]
    events.sort(key=lambda event: (event.at, event.stream, event.version))
    return [created("shop@eu", at=BEGIN), *events]


def course(number: int, chance: Random) -> Iterator[Event]:
    """Yield the events of one message; most are sent around noon, when consumers are slower."""
    at = BEGIN + round(min(max(chance.gauss(6, 2.5), 0), 11.99) * HOUR)
    noon = 1 - abs((at - BEGIN) / HOUR - 6) / 6
    topic = chance.choices(list(TOPICS), (5, 2, 4))[0]
    work, failures, principal = TOPICS[topic]
    id_ = stream(number)
    first = sent(number, at=at, headers=Headers(at // 1_000, principal=principal))
    yield replace(first, topic=topic, size=chance.randrange(200, 4_000), expires_at=at + 100 * HOUR)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        at += round(chance.expovariate(1) * (1 + 8 * noon) * SECOND)
        version = 2 * attempt
        yield MessageReceived(id_, version, at, attempt, at + VISIBILITY, "worker")
        duration = round(chance.expovariate(1) * work * (1 + noon) * SECOND)
        fails = chance.random() < failures * (1 + noon)
        if duration >= VISIBILITY:
            duration, fails = VISIBILITY, True
        at += duration
        reason = "visibility_expired" if duration == VISIBILITY else "nacked"
        error = chance.choice(ERRORS) if reason == "nacked" else None
        if not fails:
            yield MessageAcked(id_, version + 1, at, attempt)
            return
        if attempt == MAX_ATTEMPTS:
            yield MessageDeadLettered(id_, version + 1, at, attempt, "max_attempts", error, at + 100 * HOUR)
            return
        due = at + (SECOND << attempt if reason == "nacked" else 0)
        yield MessageRequeued(id_, version + 1, at, attempt, due, reason, error)
        at = due


def picture(report: Report, store: str) -> str:
    """Return a chart of a report, with the names of its series below it."""
    rows = make_report(store, report, selection=LogSelection(), engine="local").to_pylist()
    chart = report.charts[0]
    if isinstance(chart, HeatMap):
        (drawing,), _ = draw_heat_maps(chart, rows)
        return framed(drawing, chart.title, ())
    drawn = draw(chart, rows)
    return framed(drawn.svg, f"{chart.title} ({chart.unit})" if chart.unit else chart.title, drawn.series)


def framed(drawing: str, title: str, series: tuple[str, ...] | list[str]) -> str:
    """Return a drawing as a file of its own: with a title, a legend, and the colors of pages."""
    colors = (files("postroom.adapters.reports") / "page.css").read_text().partition("body {")[0]
    (width, height) = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawing)[0])
    inner = drawing.replace("<svg", f'<svg y="24" width="{width}" height="{height}"', 1)
    legend = "".join(
        f'<text x="{20 + index % 4 * 185}" y="{height + 44 + index // 4 * 18}" '
        f'fill="var(--series-{index})">■ {escape(name)}</text>'
        for index, name in enumerate(series)
    )
    total = height + 30 + 18 * -(-len(series) // 4)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" font-family="sans-serif" '
        f'font-size="12"><style>{" ".join(colors.split())}</style>'
        f'<text x="{width / 2:.0f}" y="16" text-anchor="middle" fill="var(--ink)">{escape(title)}</text>'
        f"{inner}{legend}</svg>\n"
    )


if __name__ == "__main__":
    main()
