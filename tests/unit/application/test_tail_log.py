"""The live tail of a log: each event that matches once, from bounded steps that say what they leave out."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.queries import tail_log
from postroom.application.queries.tail_log import Show, TailLog, TailStep
from postroom.domain.message import (
    Headers,
    MessageAcked,
    MessageDeadLettered,
    MessageRequeued,
    MessageSent,
    RequeueReason,
)
from postroom.domain.record import Event
from postroom.domain.search import EventFilter
from tests.conformance.records import append, created, received, sent, stored, stream
from tests.support.envelopes import build_envelope

MAILBOX = "acme@one"
ALL = 1_000
FILTERS = (
    EventFilter(),
    EventFilter(topics=("bills",)),
    EventFilter(topics=("bi*", "none")),
    EventFilter(principals=("me",)),
    EventFilter(topics=("orders",), text="CORR"),
    EventFilter(headers={"k": "v"}),
    EventFilter(correlation_id="corr-1"),
)


def send(number: int) -> MessageSent:
    """Return the event that a message was sent, with topic and headers that depend on its number."""
    headers = Headers(
        number,
        correlation_id=f"corr-{number % 4}" if number % 2 else None,
        principal="me" if number % 3 == 0 else None,
        custom_headers={"k": "v"} if number % 5 == 0 else None,
    )
    return msgspec.structs.replace(sent(number, headers=headers), topic=("orders", "bills")[number % 2])


def requeued(number: int, version: int = 3, reason: RequeueReason = "nacked") -> MessageRequeued:
    """Return the event that a delivery failed."""
    return MessageRequeued(stream(number), version, 1_000, 1, 1_002, reason, "boom")


def acked(number: int, version: int = 5) -> MessageAcked:
    """Return the event that a message was settled."""
    return MessageAcked(stream(number), version, 1_000, 2)


def dead(number: int) -> MessageDeadLettered:
    """Return the event that a message became a dead letter."""
    return MessageDeadLettered(stream(number), 5, 1_000, 2, "max_attempts", "boom", 1_099)


def lives(count: int) -> list[list[Event]]:
    """Return the events of messages, a list for each."""
    return [
        [
            send(number),
            received(number),
            requeued(number, reason="released" if number % 4 == 0 else "nacked"),
            received(number, version=4),
            dead(number) if number % 3 == 0 else acked(number),
        ]
        for number in range(1, count + 1)
    ]


def expected(log: MemoryEventLog, filter_: EventFilter, show: Show) -> list[int]:
    """Return the positions of the events that match, by what the filter and the events say themselves."""
    matches: dict[bytes, bool] = {}
    positions = []
    for record in log.read():
        event = record.event
        if isinstance(event, MessageSent):
            item = event.headers
            matches[event.stream] = (
                (not filter_.topics or any(each[:2] == event.topic[:2] for each in filter_.topics))
                and (not filter_.principals or item.principal == "me")
                and (not filter_.headers or item.custom_headers == {"k": "v"})
                and (filter_.text is None or item.correlation_id is not None)
                and filter_.correlation_id in (None, item.correlation_id)
            )
        is_shown = {
            "messages": isinstance(event, MessageSent),
            "events": record.type.startswith("Message"),
            "failures": isinstance(event, MessageDeadLettered)
            or (isinstance(event, MessageRequeued) and event.reason != "released"),
        }[show]
        if is_shown and matches.get(event.stream):
            positions.append(record.position)
    return positions


def positions(step: TailStep) -> list[int]:
    """Return the positions of a step's events, oldest first."""
    return [each.record.position for each in reversed(step.events)]


def fill(log: MemoryEventLog, events: Sequence[Event], size: int = 7) -> None:
    """Append events in commits of some each."""
    for start in range(0, len(events), size):
        append(log, list(events[start : start + size]))


@given(
    st.sampled_from(FILTERS),
    st.sampled_from(tail_log.SHOWN),
    st.lists(st.integers(0, 11), min_size=1, max_size=80),
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
)
def test_each_event_that_matches_comes_once_however_the_log_grows(
    filter_: EventFilter, show: Show, order: list[int], sizes: list[int]
) -> None:
    log, messages = MemoryEventLog(MAILBOX), lives(12)
    append(log, [created(MAILBOX)])
    events = [messages[number].pop(0) for number in order if messages[number]]
    tail, after, shown = TailLog(log, filter_, show), 0, list[int]()
    while events:
        size = sizes[len(events) % len(sizes)]
        append(log, events[:size])
        del events[:size]
        step = tail(after, ALL)
        assert (step.omitted, step.skipped, step.unknown) == (0, 0, 0)
        shown += positions(step)
        after = step.last
    assert shown == expected(log, filter_, show)
    assert tail(after, ALL) == TailStep((), after)


@pytest.mark.parametrize("show", tail_log.SHOWN)
def test_a_tail_that_begins_later_looks_up_messages_that_were_sent_before(show: Show) -> None:
    log = MemoryEventLog(MAILBOX)
    fill(log, [event for step in range(5) for life in lives(20) for event in life[step : step + 1]])
    for filter_ in FILTERS:
        every = expected(log, filter_, show)
        for after in (0, 25, 50, 99):
            step = TailLog(log, filter_, show)(after, ALL)
            assert positions(step) == [each for each in every if each > after], (filter_, after)
            for each in step.events:
                assert each.topic in ("orders", "bills")
                assert each.message_id is not None


def test_a_step_returns_the_latest_and_counts_the_others() -> None:
    log = MemoryEventLog(MAILBOX)
    fill(log, [send(number) for number in range(1, 101)])
    step = TailLog(log, EventFilter(topics=("bills",)), "messages")(10, 3)
    assert positions(step) == [95, 97, 99]
    assert (step.first, step.last, step.skipped, step.omitted) == (11, 100, 0, 42)


def test_a_tail_that_is_far_behind_skips_what_it_can_not_read_and_says_how_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tail_log, "MAX_BEHIND", 30)
    log = MemoryEventLog(MAILBOX)
    fill(log, [send(number) for number in range(1, 101)])
    step = TailLog(log, EventFilter(), "messages")(10, ALL)
    assert (positions(step)[0], step.first, step.last, step.skipped) == (71, 71, 100, 60)


def test_positions_that_retention_removed_are_counted_as_skipped() -> None:
    log = MemoryEventLog(MAILBOX)
    fill(log, [send(number) for number in range(1, 22)])
    log.truncate(7, 10)
    step = TailLog(log, EventFilter(), "messages")(2, ALL)
    assert (positions(step), step.skipped) == ([*range(8, 22)], 5)


def test_a_step_compares_a_bounded_number_of_messages_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tail_log, "MAX_COMPARED", 10)
    log = MemoryEventLog(MAILBOX)
    fill(log, [send(number) for number in range(1, 50)])
    tail, after, steps, shown = TailLog(log, EventFilter(principals=("me",)), "messages"), 0, 0, list[int]()
    while (step := tail(after, ALL)).last > after:
        shown, after, steps = shown + positions(step), step.last, steps + 1
        assert step.skipped == 0
    assert (shown, steps) == ([*range(3, 50, 3)], 4)


def test_events_of_too_many_earlier_messages_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_log, "MAX_LOOKUPS", 5)
    log = MemoryEventLog(MAILBOX)
    fill(log, [send(number) for number in range(1, 21)])
    fill(log, [received(number) for number in range(1, 21)])
    step = TailLog(log, EventFilter(topics=("orders",)), "events")(20, ALL)
    assert (positions(step), step.unknown) == ([36, 38, 40], 15)
    assert len(positions(TailLog(log, EventFilter(), "events")(20, ALL))) == 20  # no topic need be known


def test_what_is_remembered_of_messages_and_topics_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_log, "MAX_REMEMBERED", 10)
    log = MemoryEventLog(MAILBOX)
    fill(log, [msgspec.structs.replace(send(n), topic=f"topic-{n}") for n in range(1, 101)])
    tail = TailLog(log, EventFilter(topics=("topic-*",)), "events")
    assert len(positions(tail(0, ALL))) == 100
    assert len(tail._matching) <= 10
    assert len(tail._topics) <= 10


def test_words_are_found_in_payloads_too() -> None:
    log = MemoryEventLog(MAILBOX)
    payloads = (b"red apples", b"green pears", b"red pears")
    fill(
        log,
        [
            sent(
                number,
                envelope=build_envelope(
                    message_id=str(number),
                    topic="orders",
                    namespace="acme",
                    published_at_us=1,
                    payload=payload,
                    attrs={},
                    content_type="text/plain",
                ),
            )
            for number, payload in enumerate(payloads, 1)
        ],
    )
    assert positions(TailLog(log, EventFilter(match="red pear*"), "messages")(0, ALL)) == [3]
    append(log, [received(3)])
    step = TailLog(log, EventFilter(match="red"), "events")(3, ALL)
    assert (positions(step), step.unknown) == ([], 1)  # its payload was sent before


def test_an_empty_log_and_a_position_beyond_its_end_have_no_events() -> None:
    log = MemoryEventLog(MAILBOX)
    assert TailLog(log, EventFilter(), "events")(7, ALL) == TailStep((), 0)
    append(log, [send(1), stored(9)])
    assert TailLog(log, EventFilter(), "events")(70, ALL) == TailStep((), 2)
