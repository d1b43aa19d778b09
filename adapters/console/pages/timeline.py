"""The timeline of a correlation id: its messages, their causes and their outcomes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from markupsafe import Markup
from starlette.responses import Response

from postroom.adapters.console.page import Page, route
from postroom.adapters.console.pages.log import log_of
from postroom.adapters.console.pages.search import read_results
from postroom.adapters.console.sparklines import Span, TimeScale
from postroom.adapters.console.values import DASH, span
from postroom.application.queries.trace_messages import (
    RECENT_POSITIONS,
    Cause,
    MessageTrace,
    TraceMessages,
    order_by_cause,
    status_of,
)
from postroom.application.text import pluralize
from postroom.domain.capability.rights import Right
from postroom.domain.message import MS, Status
from postroom.domain.message_history import DeadLettering, MessageHistory, PastDelivery
from postroom.domain.search import EventFilter, Order

MAX_MESSAGES: Final = 500
MAX_DELIVERIES: Final = 50
"""Maximum number of deliveries in the bar of a message, which are the latest."""
MAX_DEPTH: Final = 8
"""Maximum number of causes by which a row is indented."""
CLOCKS_US: Final = 1_000_000
"""Difference between the clocks of sender and log above which the page mentions it."""
COLUMNS: Final = ("Sent after", "Waited", "Worked", "Total", "Outcome")
MINUS: Final = "\N{MINUS SIGN}"
KINDS: Final = {"acked": "good", "archived": "good", "dead": "bad", "in flight": "accent", "ready": "warn"}


class TraceRow(NamedTuple):
    """A message of the timeline; durations are written out.

    Arguments:
        depth: number of messages that led to it, as far as it is indented.
        since: time from the first message to this one.
        waited: time until the first delivery.
        worked: duration of the latest delivery that ended.
        total: time until it was acked, removed or became a dead letter.
        outcome: its status, such as `dead`.
        text: sentences about the outcome, its cause, and clocks.
        other_cause: id of the cause if it is not among these messages.
    """

    cause: Cause
    depth: int
    principal: str
    outcome: str
    text: list[str]
    other_cause: str
    bar: Markup = Markup("")
    since: str = DASH
    waited: str = DASH
    worked: str = DASH
    total: str = DASH


async def show(page: Page) -> Response:
    """Show the messages of the correlation id of the URL, or the form for one."""
    id_ = page.query.get("correlation_id", "")
    if not id_:
        return await page.render("timeline/page", id=id_, rows=None)
    filter_ = EventFilter(
        correlation_id=id_,
        topics=tuple(page.own_topics()),
        mailbox=page.mailbox.name,
        order=Order.OLDEST_FIRST,
        limit=MAX_MESSAGES,
        envelopes=False,
    )
    page.mask.check_criteria(filter_)
    query = TraceMessages(log_of(page))
    results = await read_results(page, filter_, page.search_queries)
    if results.error is not None:
        raise results.error
    by_position = {each.position: each for each in results.items}

    def read() -> list[MessageTrace]:
        for each in query.find_recent(filter_):
            by_position.setdefault(each.position, each)
        first = sorted(by_position.values(), key=lambda each: each.position)[:MAX_MESSAGES]
        return query(first)

    traces = await page.session.audit(
        Right.READ_HEADERS,
        lambda: page.blocking(read),
        len,
        topics=filter_.topics,
        criteria=("timeline", "correlation_id"),
    )
    if page.mask.covers_header("causality_parent"):
        traces = [each._replace(cause="") for each in traces]
    scale = _scale(traces)
    rows = [_row(page, each, scale) for each in order_by_cause(traces)]
    length = span((scale.end - scale.start) / MS)
    return await page.render(
        "timeline/page",
        id=id_,
        rows=rows,
        scale=scale,
        length=length,
        step=span(scale.step / MS),
        headings=["Message", f"0 to {length}", *COLUMNS],
        kinds=KINDS,
        counts=Counter(each.outcome for each in rows).most_common(),
        topics=len({each.message.topic for each in traces}),
        is_live=results.is_live,
        has_more=results.next is not None or len(by_position) > len(traces),
        recent=RECENT_POSITIONS,
        hides_causes=page.mask.covers_header("causality_parent"),
    )


def _scale(traces: Sequence[MessageTrace]) -> TimeScale:
    """Return the scale from the first message to the latest event."""
    times: list[int] = []
    for each in traces:
        if each.history is not None:
            times.append(each.history.sent.at)
            times += (at for part in _spans(each.history, 0) for at in part[:2])
    return TimeScale(min(times, default=0), max(times, default=0))


def _spans(history: MessageHistory, end: int) -> list[Span]:
    """Return the times in which a message waited or was in flight.

    Arguments:
        end: end of the last span if the message is still waiting or in flight, µs.
    """
    spans: list[Span] = []
    removal, since = history.removal, history.sent.at
    for each in history.rounds:
        dead, since = each.dead_lettering, each.entry.at
        for delivery in each.deliveries:
            start = delivery.entry.at
            spans.append(Span(since, start, "wait"))
            ended = _end(delivery)
            if ended is None and removal is None:
                return [*spans, Span(start, max(end, start), "work")]
            since = removal.entry.at if ended is None and removal is not None else ended or start
            spans.append(Span(start, since, "work", _mark(delivery, dead)))
        if dead is not None:
            spans.append(Span(since, dead.entry.at, "wait", "dead"))
            since = dead.entry.at
    if removal is not None:
        spans.append(Span(since, removal.entry.at, "wait", "gone"))
    elif status_of(history) == Status.READY:
        spans.append(Span(since, max(end, since), "wait"))
    return spans


def _end(delivery: PastDelivery) -> int | None:
    """Return when a delivery ended; None while it is in flight."""
    if delivery.late_ack is not None:
        return delivery.late_ack.at
    return None if delivery.outcome is None else delivery.outcome.entry.at


def _mark(delivery: PastDelivery, dead: DeadLettering | None) -> str:
    outcome = delivery.outcome
    if outcome is None or (dead is not None and dead.entry == outcome.entry):
        return ""
    return "ack" if outcome.kind == "acked" or delivery.late_ack is not None else "fail"


def _row(page: Page, cause: Cause, scale: TimeScale) -> TraceRow:
    each, history = cause.trace, cause.trace.history
    message = page.mask.hide_item(each.message)
    status = each.message.status if history is None or not each.is_complete else status_of(history)
    row = TraceRow(
        cause,
        min(cause.depth, MAX_DEPTH),
        message.principal or "",
        status.name.lower().replace("_", " "),
        [*_outcome(history), *_notes(cause)],
        each.cause if cause.parent is None and not each.copy_of else "",
    )
    if history is None:
        return row
    sent, end, deliveries = history.sent.at, _final(history), history.deliveries
    works = [ended - one.entry.at for one in deliveries if (ended := _end(one)) is not None]
    return row._replace(
        bar=scale.bar(_spans(history, scale.end)[-2 * MAX_DELIVERIES :]),
        since=_write(sent - scale.start),
        waited=_write(deliveries[0].entry.at - sent if deliveries else None),
        worked=_write(works[-1] if works else None),
        total=_write(None if end is None else end - sent),
    )


def _final(history: MessageHistory) -> int | None:
    """Return when a message was acked, removed, or became a dead letter; None before that."""
    if history.removal is not None:
        return history.removal.entry.at
    latest = history.rounds[-1] if history.rounds else None
    if latest is None:
        return None
    if history.is_settled:
        return _end(latest.deliveries[-1])
    return None if latest.dead_lettering is None else latest.dead_lettering.entry.at


def _outcome(history: MessageHistory | None) -> Iterator[str]:
    """Yield sentences about how a message ended, or who has it."""
    if history is None:
        yield "Retention removed its events from the log."
        return
    latest = history.rounds[-1] if history.rounds else None
    dead = None if latest is None else latest.dead_lettering
    flying = history.in_flight
    if history.removal is not None:
        yield f"Removed: {history.removal.reason}."
    elif dead is not None and not history.is_settled:
        yield f"{dead.reason.replace('_', ' ').capitalize()}{': ' if dead.error else '.'}{dead.error or ''}"
    elif flying is not None:
        yield f"Attempt {flying.attempt}{' of ' + flying.consumer if flying.consumer else ''}."
    if len(history.deliveries) > 1:
        yield f"{len(history.deliveries):,} deliveries."
    if len(history.rounds) > 1:
        yield f"Redriven {pluralize(len(history.rounds) - 1, 'time')}."


def _notes(cause: Cause) -> Iterator[str]:
    """Yield sentences about what caused a message, and about clocks."""
    each, parent = cause.trace, cause.parent
    history = each.history
    if cause.is_loop:
        yield "Its causes lead back to itself: senders named each other's messages."
    if parent is not None and each.copy_of:
        yield f"Copy for the subscription of a message on {parent.message.topic}."
    elif parent is not None and history is not None and parent.history is not None:
        delay = history.sent.at - parent.history.sent.at
        after = "after" if delay >= 0 else "before"
        yield f"Sent {_write(abs(delay))} {after} its cause, on {parent.message.topic}."
    elif each.copy_of:
        yield "Copy for a subscription; its original is not among these messages."
    if history is None:
        return
    ahead = each.published - history.sent.at
    if ahead > CLOCKS_US:
        yield f"By the clock of its sender, it was published {_write(ahead)} after it was stored."
    elif ahead < -CLOCKS_US:
        yield f"Published {_write(-ahead)} before it was stored."
    if any(part.end < part.start for part in _spans(history, 0)):
        yield "Its times go back: the clock was set back meanwhile."
    if not each.is_complete:
        yield "Its later events are too far away in the log to be read here."


def _write(us: int | None) -> str:
    """Return a duration in µs as text, with a minus sign if it is negative."""
    if us is None:
        return DASH
    return f"{MINUS}{span(-us / MS)}" if us < 0 else span(us / MS)


ROUTES: Final = [route("/timeline", show, query=("correlation_id",))]
