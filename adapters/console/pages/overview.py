"""The overview: topics, rates, read models, leases and contexts, updated by server-sent events."""

import asyncio
from datetime import datetime
from operator import attrgetter
from secrets import token_urlsafe
from typing import Any, Final, NamedTuple

from markupsafe import Markup
from starlette.responses import Response

from postroom.adapters.console.charts import Chart, Series, minutes_plot
from postroom.adapters.console.live import LivePart, LiveResponse, live_events, no_stream
from postroom.adapters.console.page import NavEntry, Page, route
from postroom.adapters.console.samples import EVENTS, Counts, Samples
from postroom.adapters.console.topic_list import FIELDS, TopicList, age_at, read_list, set_paused
from postroom.application.ports.control_plane import LeaseSummary
from postroom.application.ports.read_models import ContextBacklog, ProjectionStatus
from postroom.application.queries.mailbox_past import to_us
from postroom.domain.capability.rights import Right
from postroom.domain.errors import PostroomError
from postroom.domain.mailbox.counts import TopicSummary

NAV: Final = NavEntry("Overview", "/", 0, key="o")
REFRESH_SECONDS: Final = 2.0
LEASES_SECONDS: Final = 1.0
ROWS: Final = 25
"""Number of topics of a page."""
_CSRF: Final = token_urlsafe(32)
"""Placeholder for the CSRF token of a browser in a part that browsers share."""
LABELS: Final = {"sent": "In", "delivered": "Out", "acked": "Acked", "nacked": "Nacked"}
COLUMNS: Final = {
    "topic": "Topic",
    "ready": "Ready",
    "delayed": "Delayed",
    "in_flight": "In flight",
    "dead": "Dead",
    "oldest": "Oldest",
}
"""Columns by which topics are sorted; columns of numbers begin with the largest number."""


class TopicRow(NamedTuple):
    """A row of the table of topics; its age in µs, its messages per second in the order of `EVENTS`."""

    topic: TopicSummary
    oldest: int | None
    rates: list[float | None]
    depths: list[float | None]


async def overview(page: Page) -> Response:
    """Show the state of the mailbox; redirect a caller who may not read it to a page for them."""
    if Right.READ_HEADERS not in page.grant.operations:
        return page.redirect(_first_page(page))
    shown = read_list(page.query, COLUMNS)
    live = Markup(await _live_part(page, shown))
    return await page.render("overview/page", live=live, live_url=shown.url(page, "/live"))


def _first_page(page: Page) -> str:
    """Return the path of a page for a caller who may not read."""
    if page.may(Right.SEND):
        return "/send"
    return page.nav[0].path if page.nav else "/access"


async def live(page: Page) -> Response:
    """Send what changes in the live part of the overview."""
    await page.check(Right.READ_HEADERS)
    part, shown = LivePart(), read_list(page.query, COLUMNS)
    if page.refresh.is_off:
        return no_stream()

    async def next_event() -> str:
        return part.event(await _live_part(page, shown))

    return LiveResponse(page, live_events(page, next_event, lambda: page.refresh.pause(REFRESH_SECONDS)))


async def pause(page: Page) -> Response:
    """Pause a topic."""
    return _back(page, await set_paused(page, page.field("topic"), is_paused=True))


async def resume(page: Page) -> Response:
    """Resume a topic."""
    return _back(page, await set_paused(page, page.field("topic"), is_paused=False))


def _back(page: Page, notice: str) -> Response:
    """Return to the topics that the form's page showed."""
    return page.redirect("/", notice, **{name: page.field(name) for name in FIELDS})


async def _live_part(page: Page, shown: TopicList) -> str:
    """Return the live part; callers who see all topics share one, rendered once per sample or count."""
    await page.check(Right.READ_HEADERS)
    samples = page.console.samples
    counts = await samples.count()
    key = (page.base, frozenset(page.operations), shown) if page.grant.covers_all_topics else None
    text = samples.find_part(key)
    if text is None:
        text = page.part("overview/live", csrf=_CSRF, **await _facts(page, counts, shown))
        if key is not None:
            samples.store_part(key, text)
    return text.replace(_CSRF, page.browser.csrf)


async def _facts(page: Page, counts: Counts, shown: TopicList) -> dict[str, Any]:
    """Return the variables of the live part for this caller."""
    samples, sees_all = page.console.samples, page.grant.covers_all_topics
    now = to_us(datetime.fromisoformat(counts.backlog.as_of))
    visible = counts.topics if sees_all else [each for each in counts.topics if page.grant.covers(each.topic)]
    topics, facts = shown.read_page(page, visible, COLUMNS, ROWS, "/")
    oldest = min((each.oldest_at for each in visible if each.oldest_at is not None), default=None)
    return facts | {
        "backlog": counts.backlog,
        "rows": [_topic_row(each, samples, now) for each in topics],
        "totals": {
            name: sum(map(attrgetter(name), visible)) for name in ("ready", "delayed", "in_flight", "dead")
        },
        "oldest": age_at(oldest, now),
        "rates": _rates(samples) if sees_all and samples.has_rates else [],
        "rate_chart": _rate_chart(samples) if sees_all and samples.has_rates else None,
        "has_rates": samples.has_rates,
        "rate_labels": [LABELS[event] + " /s" for event in EVENTS],
        "sees_all": sees_all,
        "may_admin": page.may(Right.ADMIN),
        "projections": await _projections(page) if sees_all else None,
        "contexts": await _contexts(page) if sees_all else (),
        "leases": await _leases(page) if sees_all else (),
        "parts": page.data.parts() if sees_all and page.data.parts is not None else (),
    }


def _rates(samples: Samples) -> list[tuple[str, float | None]]:
    """Return the kinds of events with their recent rates per second."""
    rates = [(LABELS[event], samples.rates(event)) for event in EVENTS]
    return [
        (label, next((each for each in values[::-1] if each is not None), None)) for label, values in rates
    ]


def _rate_chart(samples: Samples) -> Chart:
    series = [
        Series(LABELS[event], samples.rates(event), colour) for colour, event in enumerate(EVENTS, start=1)
    ]
    return minutes_plot("Messages per second, over ten minutes", series, samples.taken)


def _topic_row(topic: TopicSummary, samples: Samples, now: int) -> TopicRow:
    rates = [samples.topic_rate(event, topic.topic) for event in EVENTS]
    return TopicRow(topic, age_at(topic.oldest_at, now), rates, samples.depths(topic.topic))


async def _projections(page: Page) -> ProjectionStatus | None:
    models = page.data.read_models
    if models is None:
        return None
    try:
        return await page.blocking(models.status, 1)
    except PostroomError:
        return None


async def _contexts(page: Page) -> tuple[ContextBacklog, ...]:
    models = page.data.read_models
    if models is None:
        return ()
    try:
        return await page.blocking(models.contexts)
    except PostroomError:  # before the first rebuild
        return ()


async def _leases(page: Page) -> list[LeaseSummary]:
    if page.data.leases is None:
        return []
    try:
        async with asyncio.timeout(LEASES_SECONDS):
            return list(await page.data.leases())
    except (PostroomError, TimeoutError):
        return []


ROUTES: Final = [
    route("/", overview, query=FIELDS),
    route("/live", live, query=FIELDS),
    route("/topics/pause", pause, method="POST"),
    route("/topics/resume", resume, method="POST"),
]
