from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest
import uuid_utils

from postroom.application.cloudevents import CloudEvent
from postroom.application.outbox.events import headers_of
from postroom.application.outbox.new_event import NewEvent, RecordedEvent, check_size, record_event
from postroom.application.tracing import PUBLISH, TraceContext, tracer
from postroom.domain.errors import FutureEvent, InvalidOutboxEvent
from postroom.domain.outbox import evolve

NOW = 1_800_000_000_000_000
AT = datetime(2027, 1, 15, 8, 0, tzinfo=UTC)
NAIVE = AT.replace(tzinfo=None)
TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


class Total(msgspec.Struct):
    total: float


class Line(pydantic.BaseModel):
    price: Decimal
    site: pydantic.HttpUrl = pydantic.HttpUrl("https://shop.example/")
    at: datetime = AT


class Order(pydantic.BaseModel):
    id: UUID
    lines: list[Line]


@dataclass
class Visit:
    at: datetime


ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


EMPTY = msgspec.Raw(b"{}")


def recorded(payload: Any = EMPTY, **fields: Any) -> RecordedEvent:
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
        (None, "the payload is None; pass {} if the event has no data"),
        (NAIVE, "the payload has the time 2027-01-15 08:00:00 without a time zone; use datetime.now"),
        ({"visits": [{"at": NAIVE}]}, "the payload has the time 2027-01-15 08:00:00 without a time zone"),
        ([Visit(NAIVE)], "the payload has the time 2027-01-15 08:00:00 without a time zone"),
        ({"line": Line(price=Decimal(1), at=NAIVE)}, "the payload has the time 2027-01-15 08:00:00 without"),
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


@pytest.mark.parametrize(
    "field",
    [
        "aggregate_type",
        "aggregate_id",
        "event_type",
        "traceparent",
        "tracestate",
        "baggage",
        "correlation_id",
        "causation_id",
    ],
)
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


@pytest.mark.parametrize("value", [b"0" * 16, 7, True, "x" * 1_000], ids=["bytes", "int", "bool", "long"])
def test_an_id_that_is_no_uuid_is_named(value: Any) -> None:
    with pytest.raises(InvalidOutboxEvent, match=r"event's id must be a UUID; it was .{1,80}\.$"):
        recorded(id=value)


@pytest.mark.parametrize("text", ["request 1", "Zoë/1", "x" * 255, str(UUID(int=1)), "\xa0"])
def test_the_ids_of_a_conversation_and_a_cause_are_any_text_of_a_cloud_event(text: str) -> None:
    event, *_ = recorded(correlation_id=text, causation_id=text)
    assert (event.correlation_id, event.causation_id) == (text, text)
    attributes = {"specversion": "1.0", "id": "1", "source": "/sea", "type": "t", "correlationid": text}
    assert CloudEvent(attributes).attributes["correlationid"] == text


@pytest.mark.parametrize("field", ["correlation_id", "causation_id"])
@pytest.mark.parametrize("text", ["", "x" * 256, "a\nb", "a\x00", "a\x85", "\ud800"], ids=ascii)
def test_other_texts_are_no_ids_of_a_conversation(field: str, text: str) -> None:
    with pytest.raises(InvalidOutboxEvent, match=f"its {field} must be 1 to 255 characters without control"):
        recorded(**{field: text})


def test_a_model_of_pydantic_is_a_payload_at_any_depth() -> None:
    line = Line(price=Decimal("1.50"))
    as_json = line.model_dump(mode="json")
    assert as_json["site"] == "https://shop.example/"
    order = Order(id=ID, lines=[line])
    assert msgspec.json.decode(recorded(order).payload) == {"id": str(ID), "lines": [as_json]}
    assert msgspec.json.decode(recorded({"lines": [line], "note": None}).payload) == {
        "lines": [as_json],
        "note": None,
    }


def test_text_that_looks_like_a_time_and_times_with_a_zone_are_payloads() -> None:
    assert recorded({"at": "2027-01-15T08:00:00"}).payload == b'{"at":"2027-01-15T08:00:00"}'
    assert recorded({"at": AT, "text": "2027-01-15T08:00:00"}).payload.startswith(b'{"at":"2027-01-15T08')


def test_state_and_baggage_of_a_trace_are_recorded_with_it() -> None:
    event, *_ = recorded(traceparent=TRACE, tracestate="shop=1", baggage="user=5")
    assert (event.traceparent, event.tracestate, event.baggage) == (TRACE, "shop=1", "user=5")
    current = TraceContext("c" * 32, "d" * 16, trace_state="now=1", baggage={"a": "ü"})
    with tracer().span(PUBLISH, parent=current):
        inherited, own = recorded().event, recorded(traceparent=TRACE).event
    assert (inherited.traceparent, inherited.tracestate) == (current.traceparent, "now=1")
    assert inherited.baggage == "a=%C3%BC"
    assert (own.traceparent, own.tracestate, own.baggage) == (TRACE, None, None)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tracestate": "a=1"}, "has a tracestate, but no traceparent"),
        ({"traceparent": TRACE, "tracestate": "x" * 513}, "its tracestate must be 1 to 512 printable ASCII"),
        ({"traceparent": TRACE, "tracestate": ""}, "its tracestate must be 1 to 512 printable ASCII"),
        ({"baggage": "a=1\r\nX: 1"}, "its baggage must be 1 to 8,192 printable ASCII"),
        ({"baggage": "a=ü"}, "its baggage must be 1 to 8,192 printable ASCII"),
    ],
)
def test_a_trace_context_that_no_header_can_have_is_refused(fields: Any, problem: str) -> None:
    with pytest.raises(InvalidOutboxEvent, match=problem):
        recorded(**fields)


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
    event, *_ = recorded(id=id_, correlation_id=id_)
    assert (UUID(bytes=event.stream), event.correlation_id) == (UUID(str(id_)), str(id_))


def test_headers_say_all_that_is_known_of_an_event_and_no_more() -> None:
    whole = recorded(
        occurred_at=AT,
        event_version=2,
        correlation_id=UUID(int=1),
        causation_id="order 1",
        traceparent=TRACE,
        tracestate="shop=1",
        baggage="user=5",
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
        "Causation-Id": "order 1",
        "traceparent": TRACE,
        "tracestate": "shop=1",
        "baggage": "user=5",
    }
    assert headers_of(evolve(None, recorded(occurred_at=AT, event_version=2).event)) == bare
