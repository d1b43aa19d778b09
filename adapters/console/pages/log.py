"""The log: its events and commits, newest first, and the verification of a range."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from datetime import UTC, datetime
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from starlette.responses import Response

from postroom.adapters.console.page import NavEntry, Page, route
from postroom.adapters.console.values import read_time
from postroom.application.mailbox.event_columns import RUNS
from postroom.application.masking import MASK, Mask
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.browse_log import MAX_POSITION, BrowseLog, EventPage
from postroom.application.queries.read_events import EventFilter, LoggedEvent
from postroom.application.queries.verify import RangeVerification, VerifyRange
from postroom.domain.capability.rights import Right
from postroom.domain.errors import BrokenLog, InvalidRequest, NotFound, Saturated
from postroom.domain.names import describe_choices
from postroom.domain.record import StoredEvent

ROWS = 50
FIELDS = ("event", "topic", "message", "since", "until", "position")
RANGE = ("from", "through", "begin", "chain")
"""Parameters of a verification."""
EVENTS_PER_PART = 20_000
"""Number of events that are verified for one page."""
RETRY_MS = 2_000
EVENT_NAMES = tuple(sorted(each.__name__ for each in RUNS if each is not StoredEvent))
_verifying = Lock()

S = TypeVar("S", bound=Sized)
T = TypeVar("T")


class LogQuery(NamedTuple):
    """The parameters of a page of events.

    Arguments:
        since, until: log times in µs, inclusive and exclusive.
        before: position below which the events are.
        cursor: `next_cursor` of the previous page.
    """

    criteria: EventFilter
    since: int | None
    until: int | None
    before: int | None
    cursor: str | None

    @property
    def names(self) -> list[str]:
        """Return the names of the criteria that are set, for the audit log."""
        used = {
            "topic": self.criteria.topic,
            "events": self.criteria.events,
            "message_id": self.criteria.message_id,
            "since": self.since,
            "until": self.until,
        }
        return [name for name, value in used.items() if value]

    def read(self, browse: BrowseLog) -> EventPage:
        """Read the page from the log; blocks."""
        first = None if self.since is None else browse.position_after(self.since)
        before = self.before
        if self.until is not None:
            end = browse.position_after(self.until)
            before = end if before is None else min(before, end)
        return browse.events(self.criteria, since=first, before=before, cursor=self.cursor, limit=ROWS)


async def show_events(page: Page) -> Response:
    """Show the events that match, newest first."""
    query = read_query(page.query, datetime.now(UTC))
    events = await _read(
        page,
        lambda log: query.read(BrowseLog(log)),
        lambda answer: len(answer.items),
        target=query.criteria.message_id or "",
        criteria=query.names,
    )
    bounds = await page.blocking(BrowseLog(log_of(page)).bounds)
    fields = {name: page.query.get(name, "") for name in FIELDS}
    return await page.render(
        "log/events",
        events=[(each, list(details(each))) for each in events.items],
        first=events.first,
        last=events.last,
        older=events.next_cursor and page.url("/log", **fields, cursor=events.next_cursor),
        bounds=bounds,
        fields=fields,
        options=[("", "any"), *((name, name) for name in EVENT_NAMES)],
    )


async def show_event(page: Page) -> Response:
    """Show one event with its fields."""
    position = read_position("The position", page.path["position"])
    event = await _read(page, lambda log: BrowseLog(log).event(position), lambda _: 1)
    return await page.render(
        "log/event",
        event=event,
        fields=list(flatten(hide(event.fields(), page.mask))),
        message_url=event.message_id and page.message_url(event.message_id),
    )


async def show_commits(page: Page) -> Response:
    """Show the commits, newest first, with their links in the hash chain."""
    position, cursor = read_start(page.query)
    commits = await _read(
        page, lambda log: BrowseLog(log).commits(before=position, cursor=cursor, limit=ROWS), lambda answer: 0
    )
    return await page.render(
        "log/commits",
        commits=commits.items,
        older=commits.next_cursor and page.url("/log/commits", cursor=commits.next_cursor),
        position=page.query.get("position", ""),
    )


async def show_commit(page: Page) -> Response:
    """Show one commit and its events."""
    position = read_position("The position", page.path["position"])

    def read(log: EventLogReader) -> tuple[Any, EventPage]:
        browse = BrowseLog(log)
        link = browse.commit(position)
        return link, browse.events(since=link.commit.first, before=link.commit.last + 1, limit=200)

    link, events = await _read(page, read, lambda answer: len(answer[1].items))
    return await page.render(
        "log/commit",
        link=link,
        commit=link.commit,
        events=[(each, list(details(each))) for each in reversed(events.items)],
        rest=events.next_cursor and page.url("/log", cursor=events.next_cursor),
        verify=page.url("/log/verify", **{"from": link.commit.first}, through=link.commit.last),
    )


async def show_verification(page: Page) -> Response:
    """Verify a part of a range of the log, and link to the next."""
    through = optional_position("The last position", page.query.get("through", ""))
    facts: dict[str, Any] = {"bounds": None, "part": None, "failure": None, "failure_url": None}
    if page.query.get("from", "").strip() or page.query.get("through"):
        facts |= await verify_part(page, log_of(page), Right.READ_HEADERS, through)
        if facts["failure"] is not None:
            facts["failure_url"] = page.url(f"/log/commits/{facts['failure'].position}")
    else:
        facts["bounds"] = await _read(page, lambda log: BrowseLog(log).bounds(), lambda answer: 0)
    return await page.render(
        "log/verify_part" if page.is_fragment else "log/verify",
        fields={name: page.query.get(name, "") for name in ("from", "through")},
        part_events=EVENTS_PER_PART,
        **facts,
    )


async def verify_part(
    page: Page,
    log: EventLogReader,
    operation: Right,
    through: int | None = None,
    verify: Callable[[EventLogReader], VerifyRange] = VerifyRange,
) -> dict[str, Any]:
    """Verify the part of a log that the URL names; return variables of `log/verify_part.html`.

    The parameter `from` is the first position, `chain` the chain hash of `VerifyRange`, and `begin` the first
    position of earlier parts.

    Arguments:
        operation: the right that the caller needs.
        through: last position; None for the end of the log.

    Raises: Saturated while another verification runs in this process, NotFound, Forbidden.
    """
    first = optional_position("The first position", page.query.get("from", ""))
    begin = optional_position("The first position", page.query.get("begin", ""))
    chain = page.query.get("chain") or None

    def run() -> RangeVerification:
        if not _verifying.acquire(blocking=False):
            raise Saturated("Another verification is running; try again when it has ended.", RETRY_MS)
        try:
            start = first or log.first_position() or 1
            return verify(log)(start, through, chain=chain, limit=EVENTS_PER_PART)
        finally:
            _verifying.release()

    async def read() -> RangeVerification:
        page.require_all(operation)
        return await page.blocking(run)

    try:
        part = await page.session.audit(operation, read, lambda _: 0)
    except BrokenLog as error:
        return {"part": None, "failure": error, "begin": begin, "following": None}
    begin = begin or part.first
    more = {"from": part.following, "chain": part.chain, "begin": begin, "through": through}
    path = page.request.scope["path"].removeprefix(page.request.scope["root_path"])
    following = None if part.following is None else page.url(path, **more)
    return {"part": part, "failure": None, "begin": begin, "following": following}


def read_query(query: Any, now: datetime) -> LogQuery:
    """Return the query of a URL's parameters.

    Arguments:
        query: the parameters, as Starlette's `QueryParams`.

    Raises: InvalidRequest naming the malformed field.
    """
    events = [each for each in query.getlist("event") if each]
    for each in events:
        if each not in EVENT_NAMES:
            raise InvalidRequest(f"Unknown event {each[:80]!r}; {describe_choices(each, EVENT_NAMES)}")
    times = [
        read_time(name, query[key], now) if query.get(key) else None
        for name, key in (("Since", "since"), ("Until", "until"))
    ]
    criteria = EventFilter(query.get("topic") or None, frozenset(events), query.get("message") or None)
    return LogQuery(criteria, times[0], times[1], *read_start(query))


def read_start(query: Any) -> tuple[int | None, str | None]:
    """Return the position below which the page of a URL starts, and its cursor."""
    position = optional_position("The position", query.get("position", ""))
    cursor = query.get("cursor") or query.get("before") or None  # older links have `before`
    return None if position is None else position + 1, cursor


def read_position(name: str, text: str) -> int:
    """Parse a position of a log; raise InvalidRequest for other text."""
    digits = text.replace(",", "").strip()
    if digits.isascii() and digits.isdecimal() and len(digits) <= 13 and 1 <= int(digits) <= MAX_POSITION:
        return int(digits)
    raise InvalidRequest(f"{name} is {text[:40]!r}; write a number, 1 or more.")


def optional_position(name: str, text: str) -> int | None:
    """Parse a position of a log; return None for blank text."""
    return read_position(name, text) if text.strip() else None


def details(event: LoggedEvent) -> Iterator[tuple[str, Any]]:
    """Yield names and values for the details column of an event's row."""
    fields = event.fields()
    for name in ("attempt", "reason", "last_error", "consumer", "principal", "owner", "through"):
        if name in fields:
            yield name.replace("_", " "), fields[name]
    for change in event.changes:
        yield change.name, f"{change.stored} to {change.argument}"


def flatten(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values of fields; nested names are joined with a colon."""
    for name, value in fields.items():
        label = prefix + name.replace("_", " ")
        if isinstance(value, Mapping):
            yield from flatten(value, label + ": ")
        elif name == "changes":
            yield from ((f"{label}: {each['name']}", f"{each['current']} to {each['new']}") for each in value)
        elif isinstance(value, bool):
            yield label, "yes" if value else "no"
        elif value is not None:
            yield label, value


def hide(fields: Mapping[str, Any], mask: Mask) -> dict[str, Any]:
    """Return the fields of an event without masked headers, and without hashes if payloads are masked."""
    shown = {
        name: value
        for name, value in fields.items()
        if not mask.payload_fields or name not in ("payload_hash", "hash_chain")
    }
    headers = shown.get("headers")
    if isinstance(headers, Mapping):
        shown["headers"] = {
            name: mask.hide_headers(value)
            if isinstance(value, Mapping)
            else MASK
            if mask.covers_header(name)
            else value
            for name, value in headers.items()
        }
    return shown


async def _read(
    page: Page,
    query: Callable[[EventLogReader], T],
    count: Callable[[T], int],
    *,
    target: str = "",
    criteria: Sequence[str] = (),
) -> T:
    """Run a query of the log in a thread, audited; it needs the right to the headers of all topics."""
    log = log_of(page)

    async def read() -> T:
        page.require_all(Right.READ_HEADERS)
        return await page.blocking(query, log)

    return await page.session.audit(Right.READ_HEADERS, read, count, target=target, criteria=criteria)


def log_of(page: Page) -> EventLogReader:
    """Return the log of the mailbox; raise NotFound if this process can't read it."""
    if page.data.log is None:
        raise NotFound(
            f"The log of {page.mailbox.name} is not readable from this process; run `postroom log show` on "
            "the host of its store."
        )
    return page.data.log


ROUTES = [
    route("/log", show_events, query=(*FIELDS, "cursor", "before"), lists=("event",)),
    route("/log/commits", show_commits, query=("position", "cursor", "before")),
    route("/log/commits/{position}", show_commit),
    route("/log/events/{position}", show_event),
    route("/log/verify", show_verification, query=RANGE),
]
NAV = NavEntry("Log", "/log", 60, group="History", key="l", all_topics=True)
