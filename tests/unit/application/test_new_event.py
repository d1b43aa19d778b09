from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import msgspec
import pytest
import uuid_utils

from postroom.application.outbox.message import headers_of
from postroom.application.outbox.new_event import NewEvent, RecordedEvent, check_size, record_event
from postroom.domain.errors import FutureEvent, InvalidOutboxEvent
from postroom.domain.outbox import evolve

NOW = 1_800_000_000_000_000
AT = datetime(2027, 1, 15, 8, 0, tzinfo=UTC)


class Total(msgspec.Struct):
    total: float


ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def recorded(payload: Any = None, **fields: Any) -> RecordedEvent:
    about = {"aggregate_type": "order", "aggregate_id": "o-1", "event_type": "order_placed"}
    return record_event(NewEvent(payload=payload, **(about | fields)), NOW, lambda: ID)


def test_an_event_without_id_and_time_gets_both() -> None:
    event, payload, _ = recorded({"total": 5})
    assert (UUID(bytes=event.stream), event.occurred_at, payload) == (ID, NOW, b'{"total":5}')


def test_a_time_of_any_zone_is_the_same_moment() -> None:
    elsewhere = AT.astimezone(timezone(timedelta(hours=-7)))
    assert recorded(occurred_at=AT)[0].occurred_at == recorded(occurred_at=elsewhere)[0].occurred_at == NOW


def test_a_time_without_zone_is_refused() -> None:
    with pytest.raises(InvalidOutboxEvent, match="has no time zone"):
        recorded(occurred_at=AT.replace(tzinfo=None))


def test_an_event_of_the_future_is_refused() -> None:
    with pytest.raises(FutureEvent, match="has an occurred_at 1 µs in the future"):
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
        (float("nan"), "the payload is not JSON: Out of range float"),
        ({"totals": [1.5, float("inf")]}, "the payload is not JSON: Out of range float"),
        ({"total": {"net": -float("inf")}, "note": None}, "the payload is not JSON: Out of range float"),
        (Total(float("nan")), "the payload is not JSON: Out of range float"),
        (msgspec.Raw(b"NaN"), "the payload is not JSON"),
        (msgspec.Raw(b"1e999"), "the payload is not JSON: Number out of range"),
    ],
)
def test_a_payload_that_could_not_be_stored_and_published_is_refused(payload: Any, problem: str) -> None:
    with pytest.raises(InvalidOutboxEvent, match=problem):
        recorded(payload)


def test_a_payload_larger_than_the_limit_is_refused() -> None:
    check_size(ID, 1_000, 1_000)
    with pytest.raises(InvalidOutboxEvent, match="has 1,001 bytes as published, more than 1,000"):
        check_size(ID, 1_001, 1_000)


def test_null_is_json() -> None:
    assert recorded({"total": None}).payload == b'{"total":null}'


WRONG = [7.5, True, b"o-1", ["o-1"], {"id": 1}, float("nan")]


@pytest.mark.parametrize("field", ["aggregate_type", "aggregate_id", "event_type", "traceparent"])
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_field_of_a_wrong_type_is_named(field: str, value: Any) -> None:
    kind = type(value).__name__
    with pytest.raises(InvalidOutboxEvent, match=f"{field} must be text.*; it was {kind}"):
        recorded(**{field: value})


@pytest.mark.parametrize("value", [None, "1", 1.0, True, b"1"], ids=repr)
def test_an_event_version_that_is_no_integer_is_named(value: Any) -> None:
    with pytest.raises(InvalidOutboxEvent, match="event_version must be an integer; it was "):
        recorded(event_version=value)


@pytest.mark.parametrize("value", [0, "2027-01-15", AT.date(), True], ids=repr)
def test_an_occurred_at_that_is_no_datetime_is_named(value: Any) -> None:
    with pytest.raises(InvalidOutboxEvent, match="occurred_at must be a datetime with a time zone; it was "):
        recorded(occurred_at=value)


def test_a_time_before_the_year_1_in_utc_is_refused() -> None:
    early = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1)))
    with pytest.raises(InvalidOutboxEvent, match="is before the year 1 in UTC"):
        recorded(occurred_at=early)


@pytest.mark.parametrize("field", ["id", "correlation_id", "causation_id"])
@pytest.mark.parametrize("value", [b"0" * 16, 7, True, "x" * 1_000], ids=["bytes", "int", "bool", "long"])
def test_an_id_that_is_no_uuid_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidOutboxEvent, match=f"event's {field} must be a UUID; it was .{{1,80}}\\.$"):
        recorded(**{field: value})


def test_only_new_events_are_recorded() -> None:
    with pytest.raises(InvalidOutboxEvent, match="The outbox records NewEvent objects; this is a dict"):
        record_event({"event_type": "order_placed"}, NOW, lambda: ID)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -5, 2**70, UUID(int=7)], ids=repr)
def test_an_aggregate_id_that_is_an_integer_or_a_uuid_is_text(value: Any) -> None:
    assert recorded(aggregate_id=value).event.aggregate_id == str(value)


def test_a_number_of_any_size_is_json() -> None:
    assert recorded(2**70).payload == b"1180591620717411303424"


def test_a_backslash_before_u0000_is_no_nul_character() -> None:
    assert recorded("\\u0000").payload == b'"\\\\u0000"'


def test_ids_of_other_libraries_are_ids() -> None:
    id_ = uuid_utils.uuid7()
    event, *_ = recorded(id=id_, correlation_id=str(id_))
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
