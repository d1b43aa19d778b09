"""Given what happened to an outbox event, when a command comes, then this follows. Times are µs."""

import re
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from postroom.domain.errors import FutureEvent, InvalidOutboxEvent, InvalidRequest, Rejected
from postroom.domain.outbox import (
    MAX_ERROR_CHARS,
    MS,
    DiscardOutboxEvent,
    MarkFailed,
    MarkPublished,
    OutboxCommand,
    OutboxEvent,
    PublishPolicy,
    ReadOutboxRow,
    RecordOutboxEvent,
    RetryOutboxEvent,
    decide,
    evolve,
)
from postroom.domain.outbox_events import (
    OutboxChange,
    OutboxEventDiscarded,
    OutboxEventParked,
    OutboxEventPublished,
    OutboxEventRecorded,
    OutboxEventRetried,
    OutboxPublishFailed,
    OutboxRowHeld,
)
from postroom.domain.subject import CorrelationContext

ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")
STREAM = ID.bytes
SUBJECT = "sea.event.order_placed.v1"
POLICY = PublishPolicy(max_attempts=3, backoff_base_ms=100, backoff_max_ms=1_000)
RECORDED = OutboxEventRecorded(STREAM, 1, 1_000, "order", "o-1", "order_placed", 1, 900, None, None, None)


def record(**fields: Any) -> RecordOutboxEvent:
    given: dict[str, Any] = {
        "id": ID,
        "aggregate_type": "order",
        "aggregate_id": "o-1",
        "event_type": "order_placed",
        "event_version": 1,
        "occurred_at": 900,
    }
    return RecordOutboxEvent(**(given | fields))


def refused(error: str = "no stream", jitter: float = 0.5) -> MarkFailed:
    return MarkFailed(error, POLICY, jitter)


class Scenario:
    def __init__(self, *history: OutboxChange) -> None:
        self.event: OutboxEvent | None = None
        for change in history:
            self.event = evolve(self.event, change)

    def when(self, command: OutboxCommand, now: int) -> list[OutboxChange]:
        return decide(command, self.event, now)


def test_an_event_is_recorded_as_it_happened() -> None:
    correlation = CorrelationContext("request 1", str(UUID(int=2)))
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    command = record(correlation=correlation, traceparent=trace, event_version=3)
    assert Scenario().when(command, 1_000) == [
        OutboxEventRecorded(
            STREAM, 1, 1_000, "order", "o-1", "order_placed", 3, 900, "request 1", str(UUID(int=2)), trace
        )
    ]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"id": None}, "must have an id"),
        ({"event_type": None}, "must have an event type"),
        ({"event_type": ""}, "must have an event type"),
        ({"event_type": "order.placed"}, "without dots, spaces or wildcards"),
        ({"event_type": "order placed"}, "without dots, spaces or wildcards"),
        ({"event_type": "*"}, "without dots, spaces or wildcards"),
        ({"event_type": ">"}, "without dots, spaces or wildcards"),
        ({"event_type": "order_placed\n"}, "without dots, spaces or wildcards"),
        ({"aggregate_type": ""}, "aggregate's type must be 1 to 512 characters"),
        ({"aggregate_id": ""}, "aggregate's id must be 1 to 512 characters"),
        ({"aggregate_id": "o-1\r\nNats-Msg-Id: x"}, "without control characters"),
        ({"aggregate_id": "o\x001"}, "without control characters"),
        ({"aggregate_id": "o-1\n"}, "without control characters"),
        ({"aggregate_id": "\ud800"}, "without control characters"),
        ({"event_version": 0}, "must be at least 1"),
        ({"event_version": 2**31}, "must be at least 1"),
        ({"traceparent": "00-abc"}, "is not a W3C traceparent"),
    ],
)
def test_an_event_that_lacks_what_it_needs_is_refused_as_invalid_outbox(
    fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidOutboxEvent, match=problem) as refusal:
        Scenario().when(record(**fields), 1_000)
    assert refusal.value.code == "INVALID_OUTBOX"


def test_an_event_of_the_future_is_refused_as_future_event() -> None:
    with pytest.raises(FutureEvent, match="has an occurred_at 1 µs in the future") as refusal:
        Scenario().when(record(occurred_at=1_001), 1_000)
    assert refusal.value.code == "FUTURE_EVENT"


TYPES = st.none() | st.sampled_from(["", "order_placed"]) | st.text(max_size=5)


@given(id_=st.none() | st.uuids(), event_type=TYPES)
def test_what_is_recorded_has_an_id_and_an_event_type(id_: UUID | None, event_type: str | None) -> None:
    """Policy POL-047-001 refuses nothing else."""
    command = record(id=id_, event_type=event_type)
    if id_ is None or not re.fullmatch(r"[\w-]+", event_type or ""):
        with pytest.raises(InvalidOutboxEvent) as refusal:
            Scenario().when(command, 1_000)
        assert refusal.value.code == "INVALID_OUTBOX"
        return
    (recorded,) = Scenario().when(command, 1_000)
    assert isinstance(recorded, OutboxEventRecorded)
    assert (recorded.stream, recorded.event_type) == (id_.bytes, event_type)


@given(now=st.integers(2, 1 << 60), ahead=st.integers(-2, 2))
def test_what_is_recorded_is_not_of_the_future(now: int, ahead: int) -> None:
    """Policy POL-047-002, to the microsecond."""
    command = record(occurred_at=now + ahead)
    if ahead > 0:
        with pytest.raises(FutureEvent) as refusal:
            Scenario().when(command, now)
        assert refusal.value.code == "FUTURE_EVENT"
        return
    (recorded,) = Scenario().when(command, now)
    assert isinstance(recorded, OutboxEventRecorded)
    assert recorded.occurred_at == now + ahead


def test_an_event_of_this_very_moment_is_recorded() -> None:
    assert len(Scenario().when(record(occurred_at=1_000), 1_000)) == 1


def test_an_event_is_recorded_once() -> None:
    with pytest.raises(InvalidOutboxEvent, match="is already recorded"):
        Scenario(RECORDED).when(record(), 2_000)


def test_what_the_stream_stored_is_published() -> None:
    (event,) = Scenario(RECORDED).when(MarkPublished(SUBJECT), 2_000)
    assert event == OutboxEventPublished(STREAM, 2, 2_000, "order_placed", "sea.event.order_placed.v1")
    assert isinstance(event, OutboxEventPublished)
    assert (event.outbox_id, event.published_at) == (ID, 2_000)


def test_being_published_twice_changes_nothing() -> None:
    published = OutboxEventPublished(STREAM, 2, 2_000, "order_placed", SUBJECT)
    assert Scenario(RECORDED, published).when(MarkPublished(SUBJECT), 3_000) == []
    assert Scenario(RECORDED, published).when(refused(), 3_000) == []


def test_a_refused_event_is_tried_again_after_a_random_part_of_a_growing_pause() -> None:
    assert Scenario(RECORDED).when(refused(jitter=0.5), 2_000) == [
        OutboxPublishFailed(STREAM, 2, 2_000, 1, "no stream", 2_000 + 100 * MS)
    ]
    once = OutboxPublishFailed(STREAM, 2, 2_000, 1, "no stream", 2_500)
    assert Scenario(RECORDED, once).when(refused(jitter=0.5), 3_000) == [
        OutboxPublishFailed(STREAM, 3, 3_000, 2, "no stream", 3_000 + 200 * MS)
    ]


def test_an_event_that_is_refused_for_the_last_time_is_parked() -> None:
    history: list[OutboxChange] = [
        RECORDED,
        OutboxPublishFailed(STREAM, 2, 2_000, 1, "a", 2_500),
        OutboxPublishFailed(STREAM, 3, 3_000, 2, "b", 3_500),
    ]
    changes = Scenario(*history).when(refused("c"), 4_000)
    assert changes == [
        OutboxPublishFailed(STREAM, 4, 4_000, 3, "c", None),
        OutboxEventParked(STREAM, 5, 4_000, 3, "c"),
    ]
    parked = Scenario(*history, *changes)
    assert parked.event is not None
    assert (parked.event.status, parked.event.publish_error, parked.event.retry_at) == ("parked", "c", None)
    assert parked.when(refused(), 5_000) == []


def test_an_operator_gives_a_parked_event_fresh_attempts() -> None:
    parked = OutboxEventParked(STREAM, 3, 2_000, 3, "c")
    history: list[OutboxChange] = [RECORDED, OutboxPublishFailed(STREAM, 2, 2_000, 3, "c", None), parked]
    changes = Scenario(*history).when(RetryOutboxEvent(), 5_000)
    assert changes == [OutboxEventRetried(STREAM, 4, 5_000)]
    assert Scenario(*history, *changes).when(refused(jitter=0), 6_000) == [
        OutboxPublishFailed(STREAM, 5, 6_000, 1, "no stream", 6_000)
    ]


def test_a_held_row_is_retried_as_the_event_that_is_read_from_it_and_not_as_the_row() -> None:
    held = OutboxRowHeld(*astuple(RECORDED))
    history: list[OutboxChange] = [held, OutboxEventParked(STREAM, 2, 2_000, 0, "its payload is NULL")]
    parked = Scenario(*history)
    assert parked.event is not None
    assert parked.event.is_row
    with pytest.raises(InvalidRequest, match="is a row of a captured table that can't be read"):
        parked.when(RetryOutboxEvent(), 5_000)
    read = replace(evolve(None, RECORDED), id=UUID(int=7), event_type="order_moved", attributes={"a": "1"})
    changes = parked.when(ReadOutboxRow(read), 5_000)
    assert Scenario(*history, *changes).event == replace(read, id=ID, version=3, retry_at=5_000)


def test_retrying_what_never_failed_changes_nothing() -> None:
    assert Scenario(RECORDED).when(RetryOutboxEvent(), 2_000) == []


def test_a_discarded_event_keeps_its_payload_in_its_history() -> None:
    changes = Scenario(RECORDED).when(DiscardOutboxEvent("too large", b'{"a": 1}'), 2_000)
    assert changes == [OutboxEventDiscarded(STREAM, 2, 2_000, "too large", b'{"a": 1}')]
    with pytest.raises(InvalidRequest, match="is already discarded"):
        Scenario(RECORDED, *changes).when(RetryOutboxEvent(), 3_000)


@pytest.mark.parametrize("command", [RetryOutboxEvent(), DiscardOutboxEvent("why", b"{}")])
def test_an_operator_can_do_nothing_about_a_published_event(command: OutboxCommand) -> None:
    published = OutboxEventPublished(STREAM, 2, 2_000, "order_placed", SUBJECT)
    with pytest.raises(InvalidRequest, match="is already published; nothing was changed"):
        Scenario(RECORDED, published).when(command, 3_000)


def test_nothing_happens_to_an_event_before_it_is_recorded() -> None:
    with pytest.raises(InvalidOutboxEvent, match="The outbox event does not exist"):
        Scenario().when(MarkPublished(SUBJECT), 1_000)
    with pytest.raises(ValueError, match="can't start with OutboxEventRetried"):
        evolve(None, OutboxEventRetried(STREAM, 1, 1_000))


def test_of_a_long_error_the_beginning_is_kept() -> None:
    (event,) = Scenario(RECORDED).when(refused("\x00" + "x" * 5_000), 2_000)
    assert isinstance(event, OutboxPublishFailed)
    assert event.error == "x" * MAX_ERROR_CHARS


COMMANDS = st.one_of(
    st.builds(MarkPublished, st.just(SUBJECT)),
    st.builds(MarkFailed, st.text(max_size=5), st.just(POLICY), st.floats(0, 1, exclude_max=True)),
    st.just(RetryOutboxEvent()),
    st.just(DiscardOutboxEvent("why", b"{}")),
    st.builds(record),
)


@given(st.lists(COMMANDS, max_size=30))
def test_whatever_is_asked_versions_count_on_and_an_event_ends_in_one_way_only(
    commands: list[OutboxCommand],
) -> None:
    event = evolve(None, RECORDED)
    now, ends = 2_000, 0
    for command in commands:
        now += 1
        try:
            changes = decide(command, event, now)
        except Rejected:
            changes = []
        for change in changes:
            assert (change.stream, change.version, change.at) == (STREAM, event.version + 1, now)
            event = evolve(event, change)
            ends += isinstance(change, OutboxEventPublished | OutboxEventDiscarded)
        assert ends == (event.status in ("published", "discarded"))
        assert (event.published_at is not None) == (event.status == "published")
        assert event.publish_attempts <= POLICY.max_attempts + (event.status == "published")
        assert event.retry_at is None or event.status == "waiting"
