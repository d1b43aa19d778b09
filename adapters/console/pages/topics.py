"""Topics: their list, the page of one, and its pausing and purging."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from starlette.responses import HTMLResponse, Response

from postroom.adapters.console.charts import Chart, Series, minutes_plot, plot, time_ticks
from postroom.adapters.console.page import NavEntry, Page, route
from postroom.adapters.console.pages.consumers import HEADINGS, make_row
from postroom.adapters.console.pages.dead_letters import read_groups_of
from postroom.adapters.console.pages.topic_policy import fields_of
from postroom.adapters.console.topic_list import FIELDS, age_at, read_list, set_paused
from postroom.adapters.console.values import US, number, span, utc
from postroom.application.queries.mailbox_past import to_us
from postroom.application.reports import TopicPeriod, TopicReport, TopicStep
from postroom.application.text import pluralize
from postroom.domain.capability.rights import Right
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import check_topic

NAV: Final = NavEntry("Topics", "/topics", 5, key="t")
ROWS: Final = 50
MAX_GROUPS: Final = 10
COLUMNS: Final = {
    "topic": "Topic",
    "ready": "Ready",
    "in_flight": "In flight",
    "oldest": "Oldest",
    "delayed": "Delayed",
    "dead": "Dead letters",
    "receivers": "Receivers waiting",
}
"""Columns by which topics are sorted; columns of numbers begin with the largest number."""
PERIODS: Final = {"1h": "1 h", "24h": "24 h", "7d": "7 d"}
UNITS: Final = ((1, "a second"), (60, "a minute"), (3_600, "an hour"), (86_400, "a day"))
RANKS: Final = ("p50", "p95", "p99")
KINDS: Final = {"queue": "Wait", "work": "Work", "total": "Total"}
EVERY: Final = {"ready": "ready and delayed messages", "dead": "dead letters"}


async def list_topics(page: Page) -> Response:
    """Show the topics; to htmx, only their table."""
    shown = read_list(page.query, COLUMNS)
    topics = await page.mailbox.list_topics()
    rows, facts = shown.read_page(page, topics, COLUMNS, ROWS, "/topics")
    now = to_us(datetime.now(UTC))
    facts["rows"] = [(each, age_at(each.oldest_at, now)) for each in rows]
    if page.is_fragment:
        return HTMLResponse(page.part("topics/table", **facts))
    return await page.render("topics/list", **facts)


async def show(page: Page) -> Response:
    """Show a topic."""
    name = check_topic(page.query.get("name", ""))
    period = page.query.get("period", "")
    if period not in ("", *PERIODS):
        raise InvalidRequest(f"period is {period[:40]!r}; choose one of {', '.join(PERIODS)}.")
    report = await page.mailbox.describe_topic(name)
    own = [each for each in await page.mailbox.list_subscriptions() if each.name == name]
    exists = not _is_empty(report) or any(each.topic == name for each in await page.mailbox.list_topics())
    at = [*PERIODS].index(period) if period else _first_period(report.periods)
    now = to_us(datetime.now(UTC))
    return await page.render(
        "topics/show",
        report=report,
        topic=report.summary,
        exists=exists,
        titles=list(PERIODS.items()),
        at=at,
        rates=[_rate(each) for each in report.periods],
        times=_times(report.periods[at]),
        charts=period_charts(report.periods[at]),
        depths=_depths(page, name),
        consumers=[make_row(each, now) for each in report.consumers],
        consumer_headings=HEADINGS,
        oldest=age_at(report.summary.oldest_at, now),
        subscription=own[0] if own else None,
        groups=await read_groups_of(page, name, MAX_GROUPS),
        fields=fields_of(report),
        may_admin=page.may(Right.ADMIN),
        may_send=page.may(Right.SEND) and not own,
    )


def _rate(period: TopicPeriod) -> str:
    """Return the rate of sends per second, minute, hour or day: the shortest of these with one or more."""
    per_second = period.sent / period.seconds if period.seconds > 0 else 0.0
    length, unit = next((each for each in UNITS if per_second * each[0] >= 1), UNITS[-1])
    return f"{number(per_second * length)} {unit}" if period.sent else "0"


def _first_period(periods: Sequence[TopicPeriod]) -> int:
    """Return the index of the shortest period in which messages were sent, or of the first period."""
    return next((index for index, each in enumerate(periods) if each.sent), 0)


def _times(period: TopicPeriod) -> list[tuple[str, list[float]]]:
    """Return the percentiles of each kind of time that was measured."""
    rows = [(text, [getattr(period, f"{name}_{rank}_ms") for rank in RANKS]) for name, text in KINDS.items()]
    return [(text, values) for text, values in rows if None not in values]


def _is_empty(report: TopicReport) -> bool:
    """Return whether nothing shows that a topic exists."""
    topic = report.summary
    counts = (
        topic.ready,
        topic.delayed,
        topic.in_flight,
        topic.dead,
        *(each.sent for each in report.periods),
    )
    return not any(counts) and topic.policy is None and not topic.paused and not topic.dead_letterings


def _depths(page: Page, name: str) -> Chart | None:
    """Return the chart of the unsettled messages, if they are measured."""
    samples = page.console.samples
    values = samples.depths(name)
    if not any(each is not None for each in values):
        return None
    series = [Series("unsettled", values)]
    return minutes_plot("Unsettled messages without dead letters, over ten minutes", series, samples.taken)


def period_charts(period: TopicPeriod) -> list[Chart]:
    """Return the charts of the messages that were sent in a period, and of the time until their acks."""
    step = period.step_ms * 1_000
    if not period.sent or not step:
        return []
    since = to_us(datetime.fromisoformat(period.since))
    end = since + round(period.seconds * US)
    first = (end - period.period_ms * 1_000) // step * step
    starts = range(first, end + 1, step)  # includes the current step
    steps = {to_us(datetime.fromisoformat(each.at)): each for each in period.steps}
    unsent = TopicStep("")
    # Before the first event that was read, no value is known; after it, a step that is not listed is zero.
    rows = [steps.get(at, unsent if at + step > since else None) for at in starts]
    moments = [utc(at)[:16] for at in starts]
    times = time_ticks(first // 1_000, starts[-1] // 1_000 + period.step_ms)
    counts = plot(
        f"Messages sent in {span(period.step_ms)}, and what became of them",
        [
            Series("sent", [None if each is None else each.sent for each in rows], 1, is_bars=True),
            Series("failed deliveries", [None if each is None else each.failed for each in rows], 4),
            Series("dead-lettered", [None if each is None else each.dead for each in rows], "bad"),
        ],
        moments,
        times,
    )
    if not period.acked:
        return [counts]
    latencies = [
        Series(rank, [getattr(each, f"total_{rank}_ms", None) for each in rows], colour)
        for colour, rank in enumerate(RANKS, start=1)
    ]
    title = "Time from sending to the ack, by time of sending"
    return [counts, plot(title, latencies, moments, times, write=span, is_time=True)]


async def change_state(page: Page) -> Response:
    """Pause or resume a topic."""
    name = check_topic(page.field("name"))
    notice = await set_paused(page, name, is_paused=page.field("paused") == "1")
    return page.redirect("/topics/show", notice, name=name)


# -- purging ---


async def show_purge(page: Page) -> Response:
    """Ask which messages of a topic to remove, and show how many there are."""
    return await _ask_purge(page, page.query.get("name", ""))


async def purge(page: Page) -> Response:
    """Remove messages of a topic; without a confirmation, show what would be removed."""
    name = check_topic(page.field("name"))
    selection = {each: page.field(each) == "1" for each in EVERY}
    if not any(selection.values()):
        return await _ask_purge(page, name, "Choose what to remove.", 400)
    if page.field("confirmed") != "1":
        return await _ask_purge(page, name, selection=selection)
    removed = await page.mailbox.purge_topic(name, **selection)
    page.console.samples.forget()
    what = " and ".join(text for each, text in EVERY.items() if selection[each])
    return page.redirect(
        "/topics/show", f"{pluralize(removed, 'message')} removed from {name}: {what}.", name=name
    )


async def _ask_purge(
    page: Page, name: str, error: str = "", status: int = 200, selection: Mapping[str, bool] | None = None
) -> Response:
    await page.check(Right.ADMIN)
    report = await page.mailbox.describe_topic(check_topic(name))
    topic = report.summary
    counts = {"ready": topic.ready + topic.delayed, "dead": topic.dead}
    removed = sum(counts[each] for each, is_chosen in (selection or {}).items() if is_chosen)
    return await page.render(
        "topics/purge",
        status,
        topic=topic,
        counts=counts,
        selection=selection,
        removed=pluralize(removed, "message") if removed else "",
        every=EVERY,
        error=error,
    )


ROUTES: Final = [
    route("/topics", list_topics, query=FIELDS),
    route("/topics/show", show, query=("name", "period")),
    route("/topics/state", change_state, method="POST"),
    route("/topics/purge", show_purge, query=("name",)),
    route("/topics/purge", purge, method="POST"),
]
