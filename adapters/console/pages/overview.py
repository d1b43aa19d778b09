"""The overview: topics, rates, read models, leases and contexts, updated by server-sent events."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime
from secrets import token_urlsafe
from typing import Any, Final, NamedTuple

from markupsafe import Markup
from starlette.responses import Response, StreamingResponse

from postroom.adapters.console.page import NavEntry, Page, route
from postroom.adapters.console.samples import EVENTS, EVERY_SECONDS, Samples
from postroom.application.ports.control_plane import LeaseSummary
from postroom.application.ports.read_models import ContextBacklog, ProjectionStatus
from postroom.application.queries.mailbox_past import to_us
from postroom.application.query_results import Backlog
from postroom.application.threads import wait_at_most
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden, PostroomError, Saturated, Unauthenticated
from postroom.domain.mailbox.counts import TopicCount

NAV: Final = NavEntry("Overview", "/", 0)
REFRESH_SECONDS: Final = 2.0
LEASES_SECONDS: Final = 1.0
MAX_STREAMS: Final = 64
MAX_STREAMS_OF_BEARER: Final = 8
"""The same per capability, as each page of a token that is limited to topics is rendered separately."""
MAX_ROWS: Final = 200
"""Number of topics that are shown, the largest first."""
_CSRF: Final = token_urlsafe(32)
"""Placeholder for the CSRF token of a browser in a part that browsers share."""
LABELS: Final = {"sent": "In", "delivered": "Out", "acked": "Acked", "nacked": "Nacked"}


class TopicRow(NamedTuple):
    """A row of the table of topics; ages in µs, rates in messages per second in the order of `EVENTS`."""

    name: str
    paused: bool
    ready: int
    delayed: int
    in_flight: int
    dead: int
    oldest: int | None
    rates: list[float | None]
    depths: list[float | None]
    shards: list[tuple[TopicCount, int | None]]


async def overview(page: Page) -> Response:
    """Show the current state of the mailbox."""
    return await page.render("overview/page", live=Markup(await _live_part(page)))


async def live(page: Page) -> Response:
    """Send the live part of the overview whenever it may have changed."""
    await page.check(Right.READ_HEADERS)
    console = page.console
    streams = console.streams
    if streams.total() >= MAX_STREAMS or streams[page.browser.bearer] >= MAX_STREAMS_OF_BEARER:
        raise Saturated("Too many live pages are open; close some, or reload this one.", 10_000)
    headers = {"x-accel-buffering": "no"}
    return _LiveResponse(page, _events(page), media_type="text/event-stream", headers=headers)


class _LiveResponse(StreamingResponse):
    """A stream of events that is counted while it is open."""

    def __init__(self, page: Page, content: AsyncIterator[str], **arguments: Any) -> None:
        super().__init__(content, **arguments)
        self._page = page

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the events."""
        streams, browser = self._page.console.streams, self._page.browser
        streams[bearer := browser.bearer] += 1
        browser.streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            streams[bearer] -= 1
            streams += Counter()  # removes zero counts
            browser.streams -= 1


async def _events(page: Page) -> AsyncIterator[str]:
    """Yield the live part, until the service stops or the session ends."""
    console, stopping = page.console, page.service.stopping
    last = ""
    while not stopping.is_set():
        if console.find(page.request, touch=False) is not page.browser:
            yield _event("end", "The session has ended.")
            return
        try:
            page.session = await page.service.open_session(page.browser.token)
            text = await _live_part(page)
        except (Unauthenticated, Forbidden) as error:
            yield _event("end", str(error))
            return
        except PostroomError as error:
            yield _event("problem", str(error))
        else:
            # An unchanged part is replaced by a comment, which keeps the connection alive.
            yield _event("live", text) if text != last else ": same\n\n"
            last = text
        await wait_at_most(REFRESH_SECONDS, stopping.wait())
    yield _event("end", "The service is stopping.")


def _event(name: str, text: str) -> str:
    lines = "".join(f"data: {line}\n" for line in text.splitlines())
    return f"event: {name}\n{lines}\n"


async def pause(page: Page) -> Response:
    """Pause a topic."""
    topic = page.field("topic")
    await page.mailbox.pause_topic(topic)
    page.console.samples.forget()
    return page.redirect("/", f"Topic {topic} is paused: it delivers no more messages until it is resumed.")


async def resume(page: Page) -> Response:
    """Resume a topic."""
    topic = page.field("topic")
    await page.mailbox.resume_topic(topic)
    page.console.samples.forget()
    return page.redirect("/", f"Topic {topic} delivers messages again.")


async def _live_part(page: Page) -> str:
    """Return the live part; callers who see all topics share one, rendered once per sample or count."""
    await page.check(Right.READ_HEADERS)
    samples = page.console.samples
    backlog = await samples.count()
    key = (page.base, frozenset(page.operations)) if page.grant.covers_all_topics else None
    text = samples.find_part(key)
    if text is None:
        text = page.part("overview/live", csrf=_CSRF, **await _facts(page, backlog))
        if key is not None:
            samples.store_part(key, text)
    return text.replace(_CSRF, page.browser.csrf)


async def _facts(page: Page, backlog: Backlog) -> dict[str, Any]:
    """Return the variables of the live part for this caller."""
    samples, grant = page.console.samples, page.grant
    now = to_us(datetime.fromisoformat(backlog.as_of))
    shards: dict[str, list[TopicCount]] = {topic: [] for topic in backlog.paused_topics}
    for row in backlog.shards:
        shards.setdefault(row.topic, []).append(row)
    paused = set(backlog.paused_topics)
    rows = [
        _topic_row(topic, counts, topic in paused, samples, now)
        for topic, counts in shards.items()
        if grant.covers(topic)
    ]
    largest = sorted(rows, key=lambda row: -(row.ready + row.delayed + row.in_flight + row.dead))[:MAX_ROWS]
    sees_all = grant.covers_all_topics
    return {
        "backlog": backlog,
        "rows": sorted(largest, key=lambda row: row.name),
        "hidden_rows": len(rows) - len(largest),
        "totals": {
            name: sum(getattr(row, name) for row in rows)
            for name in ("ready", "delayed", "in_flight", "dead")
        },
        "oldest": max((row.oldest for row in rows if row.oldest is not None), default=None),
        "rates": [
            (LABELS[event], f"series-{number}", samples.rates(event))
            for number, event in enumerate(EVENTS, start=1)
        ]
        if sees_all and samples.has_rates
        else [],
        "has_rates": samples.has_rates,
        "rate_labels": [LABELS[event] + " /s" for event in EVENTS],
        "sample_seconds": EVERY_SECONDS,
        "sees_all": sees_all,
        "may_admin": page.may(Right.ADMIN),
        "projections": await _projections(page) if sees_all else None,
        "contexts": await _contexts(page) if sees_all else (),
        "leases": await _leases(page) if sees_all else (),
        "parts": page.data.parts() if sees_all and page.data.parts is not None else (),
    }


def _topic_row(topic: str, counts: list[TopicCount], paused: bool, samples: Samples, now: int) -> TopicRow:
    ages = [_age(each.oldest_at, now) for each in counts]
    return TopicRow(
        topic,
        paused,
        sum(each.ready for each in counts),
        sum(each.delayed for each in counts),
        sum(each.in_flight for each in counts),
        sum(each.dead for each in counts),
        max((each for each in ages if each is not None), default=None),
        [samples.topic_rate(event, topic) for event in EVENTS],
        samples.depths(topic),
        list(zip(counts, ages, strict=True)),
    )


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


def _age(at: int | None, now: int) -> int | None:
    return None if at is None else max(0, now - at)


ROUTES: Final = [
    route("/", overview),
    route("/live", live),
    route("/topics/pause", pause, method="POST"),
    route("/topics/resume", resume, method="POST"),
]
