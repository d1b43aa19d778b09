from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import msgspec
import pytest
import uuid_utils

from postroom.application.outbox.message import headers_of
from postroom.application.outbox.new_event import NewEvent, Recorded, decide_recorded
from postroom.domain.errors import FutureEvent, InvalidOutboxEvent
from postroom.domain.outbox import evolve

NOW = 1_800_000_000_000_000
AT = datetime(2027, 1, 15, 8, 0, tzinfo=UTC)
ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def recorded(payload: Any = None, max_bytes: int = 1_000, **fields: Any) -> Recorded:
    event = NewEvent(
        aggregate_type="order", aggregate_id="o-1", event_type="order_placed", payload=payload, **fields
    )
    return decide_recorded(event, NOW, lambda: ID, max_bytes)


def test_an_event_without_id_and_time_gets_both() -> None:
    event, payload = recorded({"total": 5})
    assert (UUID(bytes=event.stream), event.occurred_at, payload) == (ID, NOW, b'{"total":5}')


def test_a_time_of_any_zone_is_the_same_moment() -> None:
    elsewhere = AT.astimezone(timezone(timedelta(hours=-7)))
    assert recorded(occurred_at=AT)[0].occurred_at == recorded(occurred_at=elsewhere)[0].occurred_at == NOW


def test_a_time_without_zone_is_refused() -> None:
    with pytest.raises(InvalidOutboxEvent, match="has no time zone"):
        recorded(occurred_at=AT.replace(tzinfo=None))


def test_an_event_of_the_future_is_refused() -> None:
    with pytest.raises(FutureEvent, match="would have occurred 1 µs in the future"):
        recorded(occurred_at=AT + timedelta(microseconds=1))


def test_json_is_taken_as_it_is() -> None:
    assert recorded(msgspec.Raw(b'{ "a" : 1 }')).payload == b'{ "a" : 1 }'


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (b"{}", "the payload is bytes; wrap JSON as msgspec.Raw"),
        (msgspec.Raw(b"{'a': 1}"), "the payload is not JSON"),
        (msgspec.Raw(b""), "the payload is not JSON"),
        (object(), "the payload is not JSON"),
        ("\ud800", "the payload is not JSON"),
        ("a\x00b", "has a NUL character"),
        (msgspec.Raw(b'"\\\\\\u0000"'), "has a NUL character"),
        ("x" * 999, "the payload has 1,001 bytes, more than 1,000"),
    ],
)
def test_a_payload_that_could_not_be_stored_and_published_is_refused(payload: Any, problem: str) -> None:
    with pytest.raises(InvalidOutboxEvent, match=problem):
        recorded(payload)


def test_a_number_of_any_size_is_json() -> None:
    assert recorded(2**70).payload == b"1180591620717411303424"


def test_a_backslash_before_u0000_is_no_nul_character() -> None:
    assert recorded("\\u0000").payload == b'"\\\\u0000"'


def test_ids_of_other_libraries_are_ids() -> None:
    id_ = uuid_utils.uuid7()
    event, _ = recorded(id=id_, correlation_id=str(id_))
    assert UUID(bytes=event.stream) == event.correlation_id == UUID(str(id_))
    with pytest.raises(InvalidOutboxEvent, match="causation_id must be a UUID; it was 'order-1'"):
        recorded(causation_id="order-1")


def test_headers_say_all_that_is_known_of_an_event_and_no_more() -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    whole = recorded(
        occurred_at=AT,
        event_version=2,
        correlation_id=UUID(int=1),
        causation_id=UUID(int=2),
        traceparent=trace,
    )
    bare = {
        "Nats-Msg-Id": str(ID),
        "Event-Type": "order_placed",
        "Event-Version": "2",
        "Occurred-At": "2027-01-15T08:00:00.000000Z",
        "Aggregate-Type": "order",
        "Aggregate-Id": "o-1",
    }
    assert headers_of(evolve(None, whole.event)) == bare | {
        "Correlation-Id": "00000000-0000-0000-0000-000000000001",
        "Causation-Id": "00000000-0000-0000-0000-000000000002",
        "traceparent": trace,
    }
    assert headers_of(evolve(None, recorded(occurred_at=AT, event_version=2).event)) == bare
