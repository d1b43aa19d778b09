"""The live tail: messages of topics or of a search's criteria, or their events, as they come."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
from starlette.responses import RedirectResponse, Response

from postroom.adapters.console.event_filter import (
    HEADER,
    TEXTS,
    parse_filter,
    write_filter,
)
from postroom.adapters.console.live import SAME, LiveResponse, check_streams, event, live_events, no_stream
from postroom.adapters.console.page import NavEntry, Page, route
from postroom.adapters.console.pages.log import details, log_of, optional_position
from postroom.adapters.console.values import size
from postroom.application.access.search import criteria_of
from postroom.application.masking import MASK, Mask
from postroom.application.queries.browse_log import BrowseLog
from postroom.application.queries.read_events import LoggedEvent
from postroom.application.queries.tail_log import SHOWN, Show, TailLog, TailStep
from postroom.application.threads import poll_pause
from postroom.domain.capability.access import uncovered_topic
from postroom.domain.capability.rights import Right
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import MessageSent
from postroom.domain.search import EventFilter

NAV: Final = NavEntry("Live tail", "/tail", 7, key="f")
CRITERIA: Final = ("topics", "principals", *TEXTS, HEADER)
FIELDS: Final = (*CRITERIA, "show", "after")
TITLES: Final[Mapping[Show, str]] = {
    "messages": "Messages that are sent",
    "events": "All events of messages",
    "failures": "Failed deliveries and dead letters",
}
HEADINGS: Final = ("Position", "Time (UTC)", "Event", "Topic", "Message", "Details")
POSITIONS_BEFORE: Final = 5_000
"""Number of positions before the end of the log at which a page without a position begins."""
ROWS: Final = 100
"""Maximum number of events of a page, and of the first step of a live page."""
ROWS_PER_STEP: Final = 20
"""Maximum number of events of each later step, several a second; people can't read more."""
PAUSE_SECONDS: Final = 0.5
QUIET_SECONDS: Final = 2.0
SHARE: Final = 25
"""Ratio of the pause after a step to its CPU time, for each live page that is open."""


class TailQuery(NamedTuple):
    """What a tail shows.

    Arguments:
        after: position of the log after which it begins; None if the URL has none.
    """

    filter: EventFilter
    show: Show
    after: int | None

    def url(self, page: Page, after: int, path: str = "/tail") -> str:
        """Return the link to the same tail from another position on."""
        names: dict[str, list[str]] = {}
        for name, value in write_filter(self.filter):
            names.setdefault(name, []).append(value)
        return page.url(path, **names, show=self.show, after=after)


class TailRow(NamedTuple):
    """An event as a row; `details` are pairs of a name and a value."""

    event: LoggedEvent
    details: list[tuple[str, Any]]


async def show_tail(page: Page) -> Response:
    """Show what came after a position; without a position, begin some thousand positions before the end."""
    query = _read_query(page)
    after = query.after
    if after is None:
        await _check(page, query.filter)
        bounds = await page.blocking(BrowseLog(log_of(page)).bounds)
        after = 0 if bounds is None else max(bounds[0] - 1, bounds[1].position - POSITIONS_BEFORE)
    if query.after is None or any(not value for _, value in page.query.multi_items()):
        return RedirectResponse(query.url(page, after), 303)
    step = await _begin(page, query, TailLog(log_of(page), query.filter, query.show), after)
    names = ("topics", "principals", HEADER)
    return await page.render(
        "tail/page",
        **_facts(page, step),
        query=query,
        first=after + 1,
        live_url=query.url(page, step.last, "/tail/live"),
        newer=query.url(page, step.last),
        choices=list(TITLES.items()),
        values={name: page.query.getlist(name) for name in names},
        single={name: page.query.get(name, "") for name in TEXTS},
        has_more=any(page.query.get(name) for name in (*names[1:], *TEXTS)),
    )


async def live(page: Page) -> Response:
    """Send what comes after a position: the one that the browser saw last, or the one in the URL."""
    query = _read_query(page)
    seen = _read_after("The position that was seen last", page.request.headers.get("last-event-id", ""))
    after = seen if seen is not None else query.after or 0
    if page.refresh.is_off:
        return no_stream()
    check_streams(page)
    rows = ROWS if page.refresh.seconds else ROWS_PER_STEP
    tail = TailLog(log_of(page), query.filter, query.show)
    steps = [await _begin(page, query, tail, after)]
    changed_at, took = time.monotonic(), 0.0

    def read() -> TailStep:
        nonlocal took
        begin = time.thread_time()
        try:
            return tail(after, rows)
        finally:  # a failed step costs as much
            took = time.thread_time() - begin

    async def next_event() -> str:
        nonlocal after, changed_at, took
        if steps:
            step = steps.pop()
        else:
            await _check(page, query.filter)
            step = await page.blocking(read)
        if step.last == after:
            return SAME
        after, changed_at, begin = step.last, time.monotonic(), time.thread_time()
        text = event("rows", page.part("tail/rows", **_facts(page, step)), step.last)
        took += time.thread_time() - begin
        return text

    def pause() -> float:
        quiet = poll_pause(time.monotonic() - changed_at, PAUSE_SECONDS, QUIET_SECONDS)
        return max(page.refresh.pause(quiet), took * SHARE * page.console.streams.total())

    return LiveResponse(page, live_events(page, next_event, pause))


def _read_query(page: Page) -> TailQuery:
    """Return the query of the URL; one without topics gets the topics that the token is limited to, if any.

    Raises: InvalidRequest; Forbidden for criteria that are masked.
    """
    show = page.query.get("show") or "messages"
    if show not in SHOWN:
        raise InvalidRequest(f"show is {show[:40]!r}; choose one of {', '.join(SHOWN)}.")
    filter_ = parse_filter(page.query.multi_items())
    page.mask.check_criteria(filter_)
    if not filter_.topics:
        filter_ = msgspec.structs.replace(filter_, topics=tuple(page.own_topics()))
    return TailQuery(filter_, show, _read_after("The position", page.query.get("after", "")))


def _read_after(name: str, text: str) -> int | None:
    return 0 if text == "0" else optional_position(name, text)


async def _check(page: Page, filter_: EventFilter) -> None:
    """Raise Forbidden or Unauthenticated unless the token permits to search with a filter now."""
    await page.check(Right.READ_HEADERS)
    if filter_.match is not None:
        await page.check(Right.READ_PAYLOAD)
    covers = page.grant.covers
    if not page.grant.covers_all_topics and not (filter_.topics and all(map(covers, filter_.topics))):
        raise uncovered_topic()


async def _begin(page: Page, query: TailQuery, tail: TailLog, after: int) -> TailStep:
    """Return the first step of a tail, which is audited."""

    async def read() -> TailStep:
        await _check(page, query.filter)
        return await page.blocking(tail, after, ROWS)

    return await page.session.audit(
        Right.READ_HEADERS,
        read,
        lambda step: len(step.events),
        topics=query.filter.topics,
        target=query.filter.message_id or "",
        criteria=("tail", *criteria_of(query.filter)),
    )


def _facts(page: Page, step: TailStep) -> dict[str, Any]:
    """Return the variables of the rows."""
    return {
        "step": step,
        "rows": [TailRow(each, list(_details(each, page.mask))) for each in step.events],
        "headings": HEADINGS,
        "sees_all": page.grant.covers_all_topics,
    }


def _details(each: LoggedEvent, mask: Mask) -> Iterator[tuple[str, Any]]:
    sent = each.record.event
    if not isinstance(sent, MessageSent):
        yield from details(each)
        return
    for name in ("principal", "content_type"):
        value = getattr(sent.headers, name)
        if value is not None:
            yield name.replace("_", " "), MASK if mask.covers_header(name) else value
    yield "payload", size(sent.size)


ROUTES: Final = [
    route("/tail", show_tail, query=FIELDS, lists=("topics", "principals", HEADER)),
    route("/tail/live", live, query=FIELDS, lists=("topics", "principals", HEADER)),
]
