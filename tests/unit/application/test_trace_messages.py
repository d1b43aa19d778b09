"""Messages of one request: their histories, and each below its cause."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.queries import trace_messages
from postroom.application.queries.trace_messages import Cause, MessageTrace, TraceMessages, order_by_cause
from postroom.domain.message import (
    Headers,
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageRedriven,
    MessageSent,
    Status,
)
from postroom.domain.search import FoundMessage
from tests.conformance.records import append, received, sent, stream
from tests.support.envelopes import build_envelope

MAILBOX = "acme@one"


def send(number: int, cause: str = "", copy_of: str | None = None, published: int = 5_000) -> MessageSent:
    """Return the event that a message was sent whose id is its number."""
    envelope = build_envelope(
        message_id=str(number),
        topic="orders",
        namespace="acme",
        published_at_us=published,
        payload=b"",
        attrs={},
        causality_parent=cause,
    )
    event = sent(number, headers=Headers(published // 1_000, str(number)), envelope=envelope)
    return msgspec.structs.replace(event, copy_of=copy_of)


def found(number: int, position: int, status: Status = Status.READY) -> FoundMessage:
    """Return a message as a search finds it."""
    return FoundMessage(
        message_id=str(number),
        timestamp=5,
        topic="orders",
        envelope_blob=b"",
        mailbox=MAILBOX,
        position=position,
        status=status,
        attempts=0,
        shard=3,
    )


def traced(*causes: str) -> list[MessageTrace]:
    """Return messages 1, 2, ... with these causes, without histories."""
    return [
        MessageTrace(found(number, number), None, cause, "", 0, True)
        for number, cause in enumerate(causes, 1)
    ]


def tree(ordered: list[Cause]) -> list[tuple[int, str]]:
    """Return the depth and the id of each message, with a sign for one of a loop."""
    return [(each.depth, each.trace.message.message_id + "*" * each.is_loop) for each in ordered]


def test_histories_causes_and_copies_are_read_from_the_log() -> None:
    log = MemoryEventLog(MAILBOX)
    append(log, [send(1), send(2, cause="1", published=7_000), send(3, copy_of="1")])
    append(log, [received(1), received(2)])
    append(log, [MessageAcked(stream(1), 3, 1_000, 1), MessageExpired(stream(2), 3, 1_000, "purged")])
    one, two, three = TraceMessages(log)([found(3, 3), found(1, 1, Status.ACKED), found(2, 2)])
    assert [each.message.message_id for each in (one, two, three)] == ["1", "2", "3"]
    assert (one.cause, two.cause, three.copy_of) == ("", "1", "1")
    assert (one.published, two.published) == (5_000, 7_000)
    histories = [each.history for each in (one, two, three) if each.history is not None]
    statuses = [trace_messages.status_of(each) for each in histories]
    assert statuses == [Status.ACKED, Status.EXPIRED, Status.READY]
    assert all(each.is_complete for each in (one, two, three))


@pytest.mark.parametrize("status", [Status.DEAD, Status.ACKED, Status.IN_FLIGHT])
def test_a_history_that_is_too_far_in_the_log_is_known_to_be_incomplete(
    monkeypatch: pytest.MonkeyPatch, status: Status
) -> None:
    monkeypatch.setattr(trace_messages, "MAX_POSITIONS", 3)
    log = MemoryEventLog(MAILBOX)
    append(log, [send(1)])
    append(log, [received(1)])
    for number in range(2, 8):
        append(log, [send(number)])
    append(log, [MessageDeadLettered(stream(1), 3, 1_000, 1, "rejected", "boom", 1_099)])
    (each,) = TraceMessages(log)([found(1, 1, status)])
    assert each.is_complete == (status == Status.IN_FLIGHT)


def test_a_dead_letter_that_was_redriven_after_the_search_is_complete() -> None:
    log = MemoryEventLog(MAILBOX)
    append(log, [send(1)])
    append(log, [received(1)])
    append(log, [MessageDeadLettered(stream(1), 3, 1_000, 1, "rejected", "boom", 1_099)])
    append(log, [MessageRedriven(stream(1), 4, 1_000, 1_000, 2_000)])
    (each,) = TraceMessages(log)([found(1, 1, Status.DEAD)])
    assert each.is_complete


def test_a_message_that_retention_removed_or_that_is_another_has_no_history() -> None:
    log = MemoryEventLog(MAILBOX)
    append(log, [msgspec.structs.replace(send(1), topic="secret")])
    traces = TraceMessages(log)([found(1, 1), found(2, 9)])
    assert [each.history for each in traces] == [None, None]


def test_each_message_stands_below_its_cause_and_roots_in_the_order_of_the_log() -> None:
    ordered = order_by_cause(traced("", "1", "gone", "2", "1"))
    assert tree(ordered) == [(0, "1"), (1, "2"), (2, "4"), (1, "5"), (0, "3")]
    assert ordered[-1].parent is None


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        (("1",), [(0, "1*")]),
        (("2", "1"), [(0, "1*"), (1, "2")]),
        (("3", "1", "2", "2"), [(0, "1*"), (1, "2"), (2, "3"), (2, "4")]),
        (("2", "3", "2", ""), [(0, "4"), (0, "2*"), (1, "1"), (1, "3")]),
    ],
    ids=["itself", "two", "three and one beside", "caused by a loop"],
)
def test_loops_of_causes_begin_with_their_first_message(
    causes: tuple[str, ...], expected: list[tuple[int, str]]
) -> None:
    assert tree(order_by_cause(traced(*causes))) == expected


@given(st.lists(st.integers(0, 14).map(str), max_size=14))
def test_whatever_causes_senders_name_each_message_is_there_once(causes: list[str]) -> None:
    ordered = order_by_cause(traced(*causes))
    assert sorted(int(each.trace.message.message_id) for each in ordered) == [*range(1, len(causes) + 1)]
    places = {id(each.trace): index for index, each in enumerate(ordered)}
    for index, each in enumerate(ordered):
        if each.parent is not None and not each.is_loop:
            assert places[id(each.parent)] < index
            assert each.depth == ordered[places[id(each.parent)]].depth + 1


def test_a_long_chain_of_causes_is_ordered() -> None:
    ordered = order_by_cause(traced("", *map(str, range(1, 5_000))))
    assert ordered[-1].depth == 4_999
