"""The search page: a query builder, results now or as of a moment, facets, a timeline, and exports."""

import asyncio
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import msgspec
from starlette.responses import RedirectResponse, Response

from postroom.adapters.console.charts import TimelineChart, chart_of
from postroom.adapters.console.event_filter import (
    AT,
    COLUMN,
    COLUMNS,
    CRITERIA,
    HEADER,
    KEPT,
    LISTS,
    OF_HEADER,
    PARAMETERS,
    TEXTS,
    Columns,
    change,
    criteria,
    group_values,
    parse_columns,
    parse_filter,
    write_filter,
    write_time,
)
from postroom.adapters.console.page import NavEntry, Page, moment_facts, parse_moment, route
from postroom.adapters.console.redrive_form import ACTION_STATUSES
from postroom.application.masking import NO_MASK
from postroom.application.page import Page as ResultPage
from postroom.application.ports.facets import FacetField, Facets, Timeline
from postroom.application.ports.read_models import SearchQueries
from postroom.application.queries.mailbox_past import to_us
from postroom.application.queries.search_past import PastPage, SearchPast
from postroom.application.query_results import Moment
from postroom.domain.capability.rights import Right
from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.domain.errors import Forbidden, InvalidRequest, NotFound, PostroomError
from postroom.domain.message import DEAD, IN_FLIGHT, READY, Status
from postroom.domain.names import check_uuid
from postroom.domain.search import Cursor, EventFilter, FoundMessage, Order

NAV: Final = NavEntry("Search", "/search", 10, group="History", key="s")
QUICK: Final = "q"
"""Parameter of the field in the bar of every page: an id or words."""
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
CURSOR: Final = "cursor"
BACKLOG: Final = "backlog"
"""Parameter of the backlog at a moment, which takes a fold of the log."""
SINGLE: Final = ("start_time", "end_time", *TEXTS, AT)
_WAITING: Final = {READY: "ready or delayed", IN_FLIGHT: "in flight"}
MORE: Final = ("text", "message_id", "correlation_id", "trace_id", "namespace", AT)
"""Fields that the form shows if they are set, or on demand."""
LIMITS: Final = (25, 50, 100, 250)


async def search(page: Page) -> Response:
    """Show the messages that match the filter of the URL."""
    if QUICK in page.query:
        return _find(page, page.query[QUICK].strip())
    typed = page.query.multi_items()
    if any(not value for _, value in typed):  # a form sends all of its fields
        pairs = [(name, value) for name, value in typed if value]
        return page.redirect("/search", None, **group_values(pairs))
    try:
        filter_ = parse_filter(page.query.multi_items())
        at = parse_moment(page.query.get(AT, ""))
        columns = parse_columns(page.query.getlist(COLUMN)) if COLUMN in page.query else Columns()
        page.mask.check_criteria(filter_)
    except (Forbidden, InvalidRequest) as error:
        facts = _form_facts(page, EventFilter(), error)
        return await page.render("search/page", error.status, **facts)
    if not filter_.topics and (topics := page.own_topics()):
        await page.check(Right.READ_HEADERS)
        return page.redirect("/search", None, **group_values(typed) | {"topics": topics})
    own = msgspec.structs.replace(filter_, mailbox=page.mailbox.name)
    queries = page.search_queries
    shows_backlog = page.query.get(BACKLOG) == "1"
    counting = queries if at is None else None  # facets and bars count present statuses
    results, facets, timeline, moment, bodies = await asyncio.gather(
        read_results(page, own, queries) if at is None else read_past_results(page, own, at),
        _or_error(counting.facets(change(own))) if counting else asyncio.sleep(0),
        _or_error(counting.timeline(change(own))) if counting else asyncio.sleep(0),
        moment_facts(page, at, filter_.topics) if at is not None and shows_backlog else asyncio.sleep(0),
        _or_error(_describe_bodies(page, filter_)) if filter_.match else asyncio.sleep(0),
    )
    facts = _form_facts(page, filter_, results.error)
    facts |= {
        "look_up": facts["look_up"] if await _exists(page, facts["look_up"]) else "",
        "results": results,
        "columns": columns,
        "rows": [(each, columns.cells(each)) for each in results.items if columns.names],
        "facets": list_facets(page, filter_, facets) if isinstance(facets, Facets) else [],
        "counted": facets if isinstance(facets, Facets) else None,
        "chart": _draw_timeline(page, filter_, timeline if isinstance(timeline, Timeline) else None),
        "moment": moment,
        "backlog": None if shows_backlog or at is None else search_link(page, filter_, (BACKLOG, "1")),
        "bodies": bodies,
    }
    if results.items and at is None:  # an export or a job would read the present
        facts |= _offers(page, filter_, has_exports=queries is not None and not results.is_live)
    return await page.render("search/page", results.error.status if results.error else 200, **facts)


async def _exists(page: Page, id_: str) -> bool:
    """Return whether a text is the id of a message that the caller may see."""
    try:
        return bool(id_) and await page.session.read_headers(id_) is not None
    except PostroomError:
        return False


def _find(page: Page, text: str) -> Response:
    """Return the redirect to the message whose id is a UUID, or to the search for words."""
    if not text:
        return page.redirect("/search")
    try:
        return RedirectResponse(page.message_url(check_uuid("The message id", text.lower())), 303)
    except InvalidRequest:
        # Words may be in payloads; for callers who may not read payloads, search the text of headers.
        in_payloads = page.may(Right.READ_PAYLOAD) and page.mask == NO_MASK
        return page.redirect("/search", None, **{"match" if in_payloads else "text": text})


async def _or_error(awaitable: Awaitable[Any]) -> Any:
    """Return the result, or None for an error, which the search itself reports."""
    try:
        return await awaitable
    except PostroomError:
        return None


async def _describe_bodies(page: Page, filter_: EventFilter) -> str | None:
    """Return which payloads a search for words leaves out; None if none, or if there are no read models."""
    if page.data.read_models is None:
        return None
    active = (await page.blocking(page.data.read_models.status, 1)).active
    if active is None:
        return None
    bodies = active.bodies
    # The text of a glob is covered only if everything that it matches is.
    others = [each for each in filter_.topics or ("*",) if not bodies.cover(each)]
    if not others:
        return None
    if not bodies.topics:
        return "Only headers were searched, as the payloads of no topic are indexed."
    if filter_.topics and not any("*" in each for each in others):
        return f"Only headers were searched of {', '.join(others)}, whose payloads are not indexed."
    if not page.grant.covers_all_topics:
        return "Headers were searched, and the payloads of those topics whose payloads are indexed."
    return f"Headers were searched, and the payloads of {', '.join(bodies.topics)}."


class Results(NamedTuple):
    """A page of messages, and the links to others."""

    items: Sequence[FoundMessage]
    previous: str | None
    next: str | None
    is_live: bool = False
    error: PostroomError | None = None
    past: PastPage | None = None


async def read_results(page: Page, filter_: EventFilter, queries: SearchQueries | None) -> Results:
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


async def read_past_results(page: Page, filter_: EventFilter, at: Moment) -> Results:
    """Return the messages that matched at a past moment."""
    try:
        if page.data.log is None or page.data.read_models is None:
            raise NotFound(
                "A search as of a moment needs the read models of a store; run `postroom views rebuild`."
            )
        search = SearchPast(page.session.search, page.data.log, lambda: to_us(datetime.now(UTC)))
        past = await search(filter_, at)
    except PostroomError as error:
        return Results((), None, None, error=error)
    following = first = None
    if past.next_cursor is not None:
        following = search_link(page, msgspec.structs.replace(filter_, cursor=past.next_cursor))
    if filter_.cursor is not None:
        first = search_link(page, change(filter_))
    return Results([page.mask.hide_item(each) for each in past.items], first, following, past=past)


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
            previous = search_link(page, msgspec.structs.replace(filter_, cursor=first), (BACK, "1"))
        if is_back or result.next_cursor is not None:
            following = search_link(page, msgspec.structs.replace(filter_, cursor=last))
    elif filter_.cursor is not None:
        previous = search_link(page, change(filter_))
    return Results([page.mask.hide_item(each) for each in items], previous, following, is_live)


def search_link(page: Page, filter_: EventFilter, *others: tuple[str, str], path: str = "/search") -> str:
    """Return the link to the messages of a filter, with the columns and the moment of this page."""
    own = [each for each in page.query.multi_items() if each[0] in KEPT and each[1] and path == "/search"]
    pairs = [*write_filter(msgspec.structs.replace(filter_, mailbox=None)), *own, *others]
    return page.url(path) + (f"?{urlencode(pairs)}" if pairs else "")


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


def list_facets(page: Page, filter_: EventFilter, facets: Facets) -> list[FacetList]:
    """Return the facets that are not masked."""
    lists = []
    for facet in facets.facets:
        if page.mask.covers_header(facet.field.value):
            continue
        links = []
        for each in facet.values:
            narrowed, is_selected = _narrow(filter_, facet.field, each.value)
            count = f"{each.count:,}" + ("" if each.is_exact else "+")
            href = None if narrowed is None else search_link(page, narrowed)
            links.append(FacetLink(each.value, count, href, is_selected))
        if links:
            lists.append(FacetList(LABELS[facet.field], links, facet.others))
    return lists


def _narrow(filter_: EventFilter, field: FacetField, value: str) -> tuple[EventFilter | None, bool]:
    """Return the filter for a facet's value, None if filters lack its field, and whether it is set now."""
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


def _form_facts(page: Page, filter_: EventFilter, error: PostroomError | None) -> dict[str, Any]:
    """Return the variables of the query builder; malformed input is shown as it was typed."""
    typed = page.query.multi_items()
    values = {name: [value for key, value in typed if key == name and value] for name in (*LISTS, HEADER)}
    single = {name: page.query.get(name, "") for name in SINGLE}
    columns = page.query.getlist(COLUMN)
    statuses = {each.name.lower() for each in filter_.statuses}
    text = filter_.match or filter_.text  # may be an id
    return {
        "error": error,
        "values": values,
        "single": single,
        "statuses": [(each.name.lower(), each.name.lower() in statuses) for each in Status],
        "order": filter_.order.value,
        "limit": filter_.limit,
        "limits_shown": [(each, each) for each in sorted({*LIMITS, filter_.limit})],
        "may_read_payload": page.may(Right.READ_PAYLOAD),
        "criteria": [] if error else _list_criteria(page, filter_),
        "all_columns": [(name, heading, name in columns) for name, (heading, _) in COLUMNS.items()],
        "header_columns": [each for each in columns if each.startswith(OF_HEADER)],
        "has_more": any(single[name] for name in MORE)
        or bool(values["principals"] or values["statuses"] or values[HEADER] or columns),
        "look_up": text if text and len(text.split()) == 1 and not text.endswith("*") else "",
        "reset": page.url("/search"),
        "results": None,
        "facets": [],
        "counted": None,
        "chart": None,
        "moment": None,
        "backlog": None,
        "bodies": None,
        "exports": [],
        "bulk": [],
        "columns": Columns(),
        "rows": [],
        "query": urlencode([each for each in typed if each[1] and each[0] not in (CURSOR, BACK, BACKLOG)]),
        "may_save": page.may(Right.REDRIVE),
        "has_suggestions": page.data.search_queries is not None,
    }


def _list_criteria(page: Page, filter_: EventFilter) -> list[tuple[str, str, str]]:
    """Return the label and text of each criterion, and the link to the search without it."""
    shown: list[tuple[str, str, str]] = []
    for name, value in criteria(filter_).items():
        if name == "headers":
            for key, text in filter_.headers.items():
                rest = {other: each for other, each in filter_.headers.items() if other != key}
                shown.append((f"Header {key}", text, search_link(page, change(filter_, headers=rest))))
        elif name in LISTS:
            for each in value:
                others = tuple(other for other in value if other != each)
                text = each.name.lower() if isinstance(each, Status) else each
                shown.append((CRITERIA[name], text, search_link(page, change(filter_, **{name: others}))))
        else:
            text = write_time(value) if isinstance(value, int) else value
            shown.append((CRITERIA[name], text, search_link(page, change(filter_, **{name: None}))))
    return shown


def _draw_timeline(page: Page, filter_: EventFilter, timeline: Timeline | None) -> TimelineChart | None:
    """Return the chart of a timeline; None if it has no bars."""
    if timeline is None or not timeline.counts:
        return None

    def narrow(start: int, end: int) -> str:
        return search_link(page, change(filter_, start_time=start, end_time=end))

    return chart_of(timeline, narrow)


def _offers(page: Page, filter_: EventFilter, *, has_exports: bool) -> dict[str, list[tuple[str, ...]]]:
    """Return links to exports of all matches, and to actions on the matches that an action can change."""
    plain = change(filter_)
    exports: list[tuple[str, ...]] = [
        (label, search_link(page, plain, ("format", format_), path="/search/export"))
        for label, format_ in (("CSV", "csv"), ("JSON lines", "json"), ("Parquet", "parquet"))
        if has_exports
    ]
    bulk: list[tuple[str, ...]] = []
    for name, possible in ACTION_STATUSES.items():
        statuses = possible & frozenset(filter_.statuses or Status)
        if statuses and page.may(Right.REDRIVE if name == "redrive" else Right.ADMIN):
            which = "all dead letters" if DEAD in statuses else "all that wait"
            if statuses != possible:
                which = f"all that are {_WAITING[next(iter(statuses))]}"
            href = search_link(page, plain, ("action", name), path="/redrives/select")
            bulk.append((name, f"{name.capitalize()} {which}", href))
    return {"exports": exports, "bulk": bulk}


ROUTES: Final = [
    route("/search", search, query=(*PARAMETERS, *KEPT, BACK, BACKLOG, QUICK), lists=(*PARAMETERS, COLUMN)),
]
