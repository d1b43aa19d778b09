"""The search page: a query builder, facets, a timeline, pages of messages, and exports."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import msgspec
from starlette.responses import Response, StreamingResponse

from postroom.adapters.console.charts import TimelineChart, chart_of
from postroom.adapters.console.event_filter import (
    HEADER,
    LISTS,
    change,
    check_mask,
    criteria,
    parse_filter,
    write_filter,
    write_header,
    write_time,
)
from postroom.adapters.console.page import NavEntry, Page, moment_facts, parse_moment, route
from postroom.application.page import Page as ResultPage
from postroom.application.ports.facets import FacetField, Facets, SuggestionField, Timeline
from postroom.application.ports.read_models import ExportFormat, ExportOptions, ExportPart, SearchQueries
from postroom.domain.capability.rights import Right
from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.domain.errors import Forbidden, InvalidRequest, NotFound, PostroomError
from postroom.domain.message import Status
from postroom.domain.search import Cursor, EventFilter, FoundMessage, Order

TYPES: Final = {
    ExportFormat.CSV: "text/csv; charset=utf-8",
    ExportFormat.JSON: "application/jsonl; charset=utf-8",
    ExportFormat.PARQUET: "application/vnd.apache.parquet",
}
SUFFIXES: Final = {
    ExportFormat.CSV: "csv",
    ExportFormat.JSON: "jsonl",
    ExportFormat.PARQUET: "parquet",
}


async def download(page: Page, queries: SearchQueries) -> Response:
    """Return all messages that match the filter of the URL as a file.

    An error before the first part is shown as a page; a later one aborts the download.
    """
    try:
        format_ = ExportFormat(page.query.get("format", ""))
    except ValueError:
        raise InvalidRequest("Unknown export format; expected csv, json or parquet.") from None
    filter_ = parse_filter(page.query.multi_items())
    check_mask(filter_, page.mask)
    options = ExportOptions(format_, payload=page.query.get("payload") == "1", mask=page.mask)
    opened = AsyncExitStack()
    parts = await opened.enter_async_context(queries.export(filter_, options))
    name = f"messages-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.{SUFFIXES[format_]}"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return _Download(opened, _data(parts), media_type=TYPES[format_], headers=headers)


async def _data(parts: AsyncIterator[ExportPart]) -> AsyncIterator[bytes]:
    async for part in parts:
        yield part.data


class _Download(StreamingResponse):
    """A file that is generated while it is sent, and closed when the request ends."""

    def __init__(self, opened: AsyncExitStack, content: AsyncIterator[bytes], **arguments: Any) -> None:
        super().__init__(content, **arguments)
        self._opened = opened

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the file."""
        async with self._opened:
            await super().__call__(scope, receive, send)


NAV: Final = NavEntry("Search", "/search", 10)
BACK: Final = "back"
"""Parameter of the link to the previous page, whose cursor is read backwards."""
LABELS: Final = {
    FacetField.TOPIC: "Topic",
    FacetField.STATUS: "Status",
    FacetField.PRINCIPAL: "Principal",
    FacetField.CONTENT_TYPE: "Content type",
    FacetField.NAMESPACE: "Namespace",
    FacetField.REASON: "Reason of dead letters",
}
CRITERIA: Final = {
    "topics": "Topic",
    "principals": "Principal",
    "statuses": "Status",
    "start_time": "From",
    "end_time": "To",
    "message_id": "Message id",
    "correlation_id": "Correlation id",
    "trace_id": "Trace id",
    "namespace": "Namespace",
    "text": "Text in headers",
    "match": "Words",
}
MORE: Final = ("text", "message_id", "correlation_id", "trace_id", "namespace", "at")
"""Fields that the form shows if they are set, or on demand."""
LIMITS: Final = (25, 50, 100, 250)


class Results(NamedTuple):
    """A page of messages, and the links to others."""

    items: Sequence[FoundMessage]
    previous: str | None
    next: str | None
    is_live: bool = False
    error: PostroomError | None = None


class FacetLink(NamedTuple):
    """A value of a facet, with the link that narrows the search to it."""

    value: str
    shown_count: str
    href: str | None
    is_selected: bool


class FacetList(NamedTuple):
    """The values of a field."""

    label: str
    links: list[FacetLink]
    others: int


async def search(page: Page) -> Response:
    """Show the messages that match the filter of the URL."""
    typed = page.query.multi_items()
    if any(not value for _, value in typed):  # a form sends all of its fields
        pairs = [(name, value) for name, value in typed if value]
        return page.redirect("/search", None, **_group_values(pairs))
    try:
        filter_ = parse_filter(page.query.multi_items())
        at = parse_moment(page.query.get("at", ""))
        check_mask(filter_, page.mask)
    except (Forbidden, InvalidRequest) as error:
        facts = _form_facts(page, EventFilter(), error)
        return await page.render("search/page", error.status, **facts)
    own = msgspec.structs.replace(filter_, mailbox=page.mailbox.name)
    queries = _queries(page)
    results, facets, timeline, moment = await asyncio.gather(
        _results(page, own, queries),
        _or_error(queries.facets(change(own))) if queries else _nothing(),
        _or_error(queries.timeline(change(own))) if queries else _nothing(),
        moment_facts(page, at, filter_.topics) if at is not None else _nothing(),
    )
    facts = _form_facts(page, filter_, results.error)
    facts |= {
        "results": results,
        "facets": _facet_lists(page, filter_, facets) if isinstance(facets, Facets) else [],
        "counted": facets if isinstance(facets, Facets) else None,
        "chart": _chart(page, filter_, timeline),
        "moment": moment,
        "exports": _exports(page, filter_) if queries and not results.is_live else [],
    }
    return await page.render("search/page", results.error.status if results.error else 200, **facts)


async def suggest(page: Page) -> Response:
    """Return values of a field that begin with the typed text, as options of a list."""
    try:
        field = SuggestionField(page.path["field"])
    except ValueError:
        raise NotFound("This field has no suggestions.") from None
    texts = [value for name, value in page.query.multi_items() if name != BACK]
    queries = _queries(page)
    values: Sequence[str] = ()
    if queries is not None and not page.mask.covers_header(field.value):
        values = await queries.suggest(field, texts[-1] if texts else "")
    if field == SuggestionField.HEADER:
        values = [write_header(each, "") for each in values]
    return await page.render("search/suggestions", values=values)


async def export(page: Page) -> Response:
    """Download all messages that match."""
    queries = _queries(page)
    if queries is None:
        raise NotFound("Exports need read models, which this store lacks; run `postroom views rebuild`.")
    return await download(page, queries)


def _group_values(pairs: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, value in pairs:
        grouped.setdefault(name, []).append(value)
    return grouped


def _queries(page: Page) -> SearchQueries | None:
    raw = page.data.search_queries
    return None if raw is None else page.session.search_queries(raw)


async def _nothing() -> None:
    return None


async def _or_error(awaitable: Awaitable[Any]) -> Any:
    """Return the result, or None for an error, which the search itself reports."""
    try:
        return await awaitable
    except PostroomError:
        return None


async def _results(page: Page, filter_: EventFilter, queries: SearchQueries | None) -> Results:
    """Return the messages that match; without read models, only unsettled ones."""
    is_back = BACK in page.query and filter_.cursor is not None
    asked = msgspec.structs.replace(filter_, envelopes=False)
    if is_back:
        flipped = Order.OLDEST_FIRST if filter_.order == Order.NEWEST_FIRST else Order.NEWEST_FIRST
        asked = msgspec.structs.replace(asked, order=flipped)
    is_live = False
    try:
        try:
            result = await page.session.search(asked)
        except NotFound:
            if queries is None:
                raise
            result, is_live = await queries.search_unsettled(asked), True
        is_live = is_live or page.data.read_models is None
    except PostroomError as error:
        return Results((), None, None, error=error)
    return _link_results(page, filter_, result, is_back=is_back, is_live=is_live)


def _link_results(
    page: Page, filter_: EventFilter, result: ResultPage[FoundMessage], *, is_back: bool, is_live: bool
) -> Results:
    items = result.items[::-1] if is_back else result.items
    previous = following = None
    cursor = result.next_cursor or filter_.cursor
    if items and cursor is not None:
        # A cursor contains the place of a message: its mailbox's number and its position.
        base = Cursor.decode(cursor).id // POSITIONS_PER_MAILBOX * POSITIONS_PER_MAILBOX
        first, last = (
            Cursor(each.timestamp, base + each.position).encode() for each in (items[0], items[-1])
        )
        if result.next_cursor is not None if is_back else filter_.cursor is not None:
            previous = _link(page, msgspec.structs.replace(filter_, cursor=first), (BACK, "1"))
        if is_back or result.next_cursor is not None:
            following = _link(page, msgspec.structs.replace(filter_, cursor=last))
    elif filter_.cursor is not None:
        previous = _link(page, change(filter_))
    return Results([page.mask.hide_item(each) for each in items], previous, following, is_live)


def _link(page: Page, filter_: EventFilter, *others: tuple[str, str], path: str = "/search") -> str:
    pairs = [*write_filter(msgspec.structs.replace(filter_, mailbox=None)), *others]
    return page.url(path) + (f"?{urlencode(pairs)}" if pairs else "")


def _form_facts(page: Page, filter_: EventFilter, error: PostroomError | None) -> dict[str, Any]:
    """Return the variables of the query builder; malformed input is shown as it was typed."""
    typed = page.query.multi_items()
    values = {name: [value for key, value in typed if key == name and value] for name in (*LISTS, HEADER)}
    single = {name: page.query.get(name, "") for name in (*CRITERIA, "at") if name not in LISTS}
    statuses = {each.name.lower() for each in filter_.statuses}
    return {
        "error": error,
        "values": values,
        "single": single,
        "statuses": [(each.name.lower(), each.name.lower() in statuses) for each in Status],
        "order": filter_.order.value,
        "limit": filter_.limit,
        "limits_shown": [(each, each) for each in sorted({*LIMITS, filter_.limit})],
        "may_read_payload": page.may(Right.READ_PAYLOAD),
        "criteria": [] if error else _criteria(page, filter_),
        "has_more": any(single[name] for name in MORE) or bool(values["principals"] or values[HEADER]),
        "reset": page.url("/search"),
        "results": None,
        "facets": [],
        "counted": None,
        "chart": None,
        "moment": None,
        "exports": [],
        "has_suggestions": page.data.search_queries is not None,
    }


def _criteria(page: Page, filter_: EventFilter) -> list[tuple[str, str, str]]:
    """Return the label and text of each criterion, and the link to the search without it."""
    shown: list[tuple[str, str, str]] = []
    for name, value in criteria(filter_).items():
        if name == "headers":
            for key, text in filter_.headers.items():
                rest = {other: each for other, each in filter_.headers.items() if other != key}
                shown.append((f"Header {key}", text, _link(page, change(filter_, headers=rest))))
        elif name in LISTS:
            for each in value:
                others = tuple(other for other in value if other != each)
                text = each.name.lower() if isinstance(each, Status) else each
                shown.append((CRITERIA[name], text, _link(page, change(filter_, **{name: others}))))
        else:
            text = write_time(value) if isinstance(value, int) else value
            shown.append((CRITERIA[name], text, _link(page, change(filter_, **{name: None}))))
    return shown


def _facet_lists(page: Page, filter_: EventFilter, facets: Facets) -> list[FacetList]:
    lists = []
    for facet in facets.facets:
        if page.mask.covers_header(facet.field.value):
            continue
        links = []
        for each in facet.values:
            narrowed, is_selected = _narrow(filter_, facet.field, each.value)
            count = f"{each.count:,}" + ("" if each.is_exact else "+")
            href = None if narrowed is None else _link(page, narrowed)
            links.append(FacetLink(each.value, count, href, is_selected))
        if links:
            lists.append(FacetList(LABELS[facet.field], links, facet.others))
    return lists


def _narrow(filter_: EventFilter, field: FacetField, value: str) -> tuple[EventFilter | None, bool]:
    """Return the filter for a value of a facet, or None if filters lack the field, and whether it is set."""
    match field:
        case FacetField.TOPIC:
            return change(filter_, topics=(value,)), filter_.topics == (value,)
        case FacetField.STATUS:
            status = Status[value.upper()]
            return change(filter_, statuses=(status,)), filter_.statuses == (status,)
        case FacetField.PRINCIPAL:
            return change(filter_, principals=(value,)), filter_.principals == (value,)
        case FacetField.NAMESPACE:
            return change(filter_, namespace=value), filter_.namespace == value
        case _:
            return None, False


def _chart(page: Page, filter_: EventFilter, timeline: Timeline | None) -> TimelineChart | None:
    if timeline is None or not timeline.counts:
        return None

    def link(start: int, end: int) -> str:
        return _link(page, change(filter_, start_time=start, end_time=end))

    return chart_of(timeline, link)


def _exports(page: Page, filter_: EventFilter) -> list[tuple[str, str]]:
    plain = change(filter_)
    return [
        (label, _link(page, plain, ("format", format_), path="/search/export"))
        for label, format_ in (("CSV", "csv"), ("JSON lines", "json"), ("Parquet", "parquet"))
    ]


ROUTES: Final = [
    route("/search", search),
    route("/search/export", export),
    route("/search/suggestions/{field}", suggest),
]
