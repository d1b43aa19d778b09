"""Workers and consumers: who receives which messages, since when, and with what results."""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple, TypeVar

from starlette.responses import Response

from postroom.adapters.console.page import NavEntry, Page, route
from postroom.adapters.console.values import parse_number
from postroom.application.queries.mailbox_past import to_us
from postroom.application.reports import ConsumerReport
from postroom.application.worker_reports import HandlerState, WorkerReport
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.names import TOPIC_TEXT

T = TypeVar("T")

NAV: Final = NavEntry("Consumers", "/consumers", 6, key="c")
ROWS: Final = 50
STALE_US: Final = 10 * 60_000_000
"""Time without a delivery after which a consumer is shown as stale, unless it has or waits for messages."""
_PROCESS: Final = re.compile(r"(.+)@([^@:]+):(\d+)\Z", re.DOTALL)
"""Name that a worker gives its consumers: its own, the handler's, its host and its process."""
HEADINGS: Final = (
    "Consumer",
    "Waits",
    "In flight",
    "Acked",
    "Failed",
    "Work p50, p95",
    "Last delivery",
    "Last error",
)
WORKER_HEADINGS: Final = (
    "Worker",
    "Version",
    "Handlers",
    "In use",
    "Handled",
    "Failed",
    "Work p95",
    "Last error",
)
HANDLER_HEADINGS: Final = (
    "Handler",
    "Topic",
    "In use",
    "Handled",
    "Failed",
    "In flight",
    "Work p95",
    "Last delivery",
    "Last error",
)
SORTS: Final = {
    "": "Active first",
    "in_flight": "Most in flight",
    "failed": "Most failures",
    "slowest": "Slowest",
    "name": "Name",
}


class ConsumerRow(NamedTuple):
    """A row of the table.

    Arguments:
        name: name without host and process, which are empty if the consumer does not report them.
        held: age of its oldest delivery in flight, µs; None without any.
        last: age of its last delivery; None without any.
    """

    report: ConsumerReport
    name: str
    host: str
    process: str
    held: int | None
    last: int | None
    is_stale: bool


class Activity(NamedTuple):
    """What the log says about the consumers with one name, or about the consumers of a worker.

    Arguments:
        p95_ms: the longest of their 95th percentiles.
        last: when they received last, RFC 3339; empty if they did not.
        error: the last error of the latest of them that has one.
    """

    in_flight: int = 0
    p95_ms: float | None = None
    last: str = ""
    error: str | None = None

    @classmethod
    def of(cls, reports: Iterable[ConsumerReport]) -> "Activity":
        """Return the activity of consumers."""
        every = sorted(reports, key=lambda each: each.last_received or "")
        times = [each.work_p95_ms for each in every if each.work_p95_ms is not None]
        return cls(
            sum(each.in_flight for each in every),
            max(times, default=None),
            every[-1].last_received or "" if every else "",
            next((each.last_error for each in reversed(every) if each.last_error), None),
        )


class WorkerRow(NamedTuple):
    """A row of the table of workers; numbers of its handlers are sums."""

    report: WorkerReport
    in_use: int
    concurrency: int
    handled: int
    failed: int
    activity: Activity


async def list_consumers(page: Page) -> Response:
    """Show the workers and the consumers."""
    text, sort = page.query.get("text", "").strip(), page.query.get("sort", "")
    if sort not in SORTS:
        raise InvalidRequest(f"sort is {sort[:40]!r}; choose one of {', '.join(filter(None, SORTS))}.")
    every, workers = await page.mailbox.list_consumers(), await page.mailbox.list_workers()
    folded = text.casefold()
    matches = [
        each for each in every if folded in each.consumer.casefold() or folded in each.topic.casefold()
    ]
    own = [each for each in workers if any(folded in each.casefold() for each in _texts(each))]
    by_name = _by_name(every)
    now = to_us(datetime.now(UTC))
    return await page.render(
        "consumers/list",
        headings=[HEADINGS[0], "Topic", *HEADINGS[1:]],
        consumers=len(every),
        selected=len(matches),
        rows=[make_row(each, now) for each in _cut(page, "page", _sort(matches, sort))],
        pages=_pages(page, "page", len(matches)),
        worker_headings=WORKER_HEADINGS,
        workers=len(workers),
        selected_workers=len(own),
        worker_rows=[_make_worker_row(each, by_name) for each in _cut(page, "workers", own)],
        worker_pages=_pages(page, "workers", len(own)),
        text=text,
        sort=sort,
        sorts=list(SORTS.items()),
    )


async def show_worker(page: Page) -> Response:
    """Show a worker and its handlers."""
    id_, principal = page.query.get("id", ""), page.query.get("principal")
    workers = await page.mailbox.list_workers()
    worker = next((each for each in workers if (each.id, each.principal) == (id_, principal)), None)
    if worker is None:
        raise NotFound(
            "This worker is not known: it has ended, was silent for an hour, or has not reported yet to the "
            "present owner of the mailbox."
        )
    by_name = _by_name(await page.mailbox.list_consumers())
    handlers = [(each, Activity.of(by_name.get(each.consumer, ()))) for each in worker.handlers]
    return await page.render(
        "consumers/worker",
        row=_make_worker_row(worker, by_name),
        headings=HANDLER_HEADINGS,
        handlers=[(*each, each[0].topic if _is_topic(each[0]) else None) for each in handlers],
    )


class Pages(NamedTuple):
    """The pages of a table: the number of the current page, and links to other pages, if any."""

    number: int
    last: int
    previous: str | None
    next: str | None


def _number(page: Page, name: str, rows: int) -> tuple[int, int]:
    """Return the number of a table's current page, from the parameter `name`, and the number of its pages."""
    count = max(1, -(-rows // ROWS))
    return min(max(1, parse_number(name, page.query.get(name, "")) or 1), count), count


def _cut(page: Page, name: str, rows: Sequence[T]) -> Sequence[T]:
    number, _ = _number(page, name, len(rows))
    return rows[(number - 1) * ROWS : number * ROWS]


def _pages(page: Page, name: str, rows: int) -> Pages:
    number, count = _number(page, name, rows)

    def link(at: int) -> str | None:
        if not 1 <= at <= count:
            return None
        others = {each: page.query.get(each) for each in QUERY}
        return page.url("/consumers", **others | {name: at if at > 1 else None})

    return Pages(number, count, link(number - 1), link(number + 1))


def _texts(worker: WorkerReport) -> Iterable[str]:
    yield from (worker.name, worker.host, worker.version, worker.principal or "")
    for each in worker.handlers:
        yield from (each.consumer, each.topic)


def _by_name(consumers: Iterable[ConsumerReport]) -> Mapping[str, Sequence[ConsumerReport]]:
    by_name: dict[str, list[ConsumerReport]] = {}
    for each in consumers:
        by_name.setdefault(each.consumer, []).append(each)
    return by_name


def _make_worker_row(worker: WorkerReport, by_name: Mapping[str, Sequence[ConsumerReport]]) -> WorkerRow:
    names = dict.fromkeys(each.consumer for each in worker.handlers)
    return WorkerRow(
        worker,
        sum(each.in_use for each in worker.handlers),
        sum(each.concurrency for each in worker.handlers),
        sum(each.handled for each in worker.handlers),
        sum(each.failed for each in worker.handlers),
        Activity.of(each for name in names for each in by_name.get(name, ())),
    )


def _is_topic(handler: HandlerState) -> bool:
    """Return whether a handler has one topic, not a pattern."""
    return TOPIC_TEXT.match(handler.topic) is not None


def _sort(consumers: Sequence[ConsumerReport], sort: str) -> Sequence[ConsumerReport]:
    match sort:
        case "in_flight":
            return sorted(consumers, key=lambda each: -each.in_flight)
        case "failed":
            return sorted(consumers, key=lambda each: -each.failed)
        case "slowest":
            return sorted(consumers, key=lambda each: -(each.work_p95_ms or 0.0))
        case "name":
            return sorted(consumers, key=lambda each: (each.consumer, each.topic))
        case _:
            return consumers


def make_row(report: ConsumerReport, now: int) -> ConsumerRow:
    """Return the row of a consumer at `now` (µs)."""
    match = _PROCESS.match(report.consumer)
    name, host, process = match.groups() if match else (report.consumer, "", "")
    held, last = _age(report.in_flight_since, now), _age(report.last_received, now)
    is_stale = not (report.receivers or report.in_flight or last is None or last <= STALE_US)
    return ConsumerRow(report, name, host, process, held, last, is_stale)


def _age(at: str | None, now: int) -> int | None:
    return None if at is None else now - to_us(datetime.fromisoformat(at))


QUERY: Final = ("text", "sort", "page", "workers")
ROUTES: Final = [
    route("/consumers", list_consumers, query=QUERY),
    route("/consumers/worker", show_worker, query=("id", "principal")),
]
