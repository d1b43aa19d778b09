import json
from base64 import b64encode
from collections.abc import Mapping
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.application.inbox.dead_letters import DeadLetterPublisher, read_dead_letter
from postroom.application.inbox.delivery import identify
from postroom.application.inbox.request import Unreadable, aggregate_key, inbox_id, read_request
from postroom.application.inbox.worker import stream_position
from postroom.application.ports.inbox import HandlerRequest
from postroom.application.ports.outbox import PublishAck
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest
from postroom.domain.inbox import RouteToDeadLetter

HEADERS = st.dictionaries(
    st.sampled_from(["Nats-Msg-Id", "Event-Type", "Event-Version", "Occurred-At", "Aggregate-Id", "X"]),
    st.text(max_size=20),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
DATA = st.binary(max_size=200) | JSON.map(msgspec.json.encode)


def message(data: bytes, headers: dict[str, str], subject: str = "a.event.b.v1") -> SourceMessage:
    return SourceMessage(subject, data, headers, 1, "7", None)


@given(DATA, HEADERS)
def test_any_message_is_a_request_or_unreadable(data: bytes, headers: dict[str, str]) -> None:
    given_ = message(data, headers)
    assert identify(given_, "STREAM") == identify(given_, "STREAM")
    try:
        request = read_request(given_)
    except Unreadable:
        return
    assert request.payload == msgspec.json.decode(data)
    assert request.content_type is None
    assert request.event_type
    msgspec.json.encode(request)


@given(JSON)
def test_a_payload_reaches_the_handler_as_it_was(payload: object) -> None:
    assert read_request(message(msgspec.json.encode(payload), {})).payload == payload


@given(
    st.dictionaries(
        st.sampled_from(["id", "time", "subject", "eventversion", "data", "x"]), JSON | st.floats()
    )
)
def test_any_structured_cloud_event_is_a_request_that_can_be_sent_or_unreadable(
    fields: dict[str, object],
) -> None:
    required = {"specversion": "1.0", "id": "1", "source": "/shop", "type": "order.placed"}
    document = json.dumps(required | fields).encode()
    event = message(document, {"Content-Type": "application/cloudevents+json"})
    assert identify(event, "STREAM") == identify(event, "STREAM")
    try:
        msgspec.json.encode(read_request(event))
    except Unreadable:
        return


@pytest.mark.parametrize("version", ["", "x", "-1", "1.5", "9" * 5_000, "²"])
def test_a_version_that_is_none_is_taken_from_the_subject(version: str) -> None:
    request = read_request(message(b"{}", {"Event-Version": version}, "a.event.b.v3"))
    assert request.event_version == 3


CLOUD_EVENT = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/shop", "ce-type": "order.placed"}


def test_a_cloud_event_is_a_request_with_its_attributes_in_both_modes() -> None:
    more = {
        "eventversion": "3",
        "correlationid": "c",
        "causationid": "b",
        "time": "2026-01-15T10:00:00+02:00",
    }
    headers = CLOUD_EVENT | {f"ce-{name}": value for name, value in more.items()}
    attributes = {name.removeprefix("ce-"): value for name, value in headers.items()}
    structured = msgspec.json.encode(attributes | {"data": {"total": 12}})
    expected = HandlerRequest(
        "/shop|1",
        "a.event.b.v1",
        "order.placed",
        3,
        "2026-01-15T08:00:00.000000Z",
        "c",
        "b",
        {"total": 12},
        attributes,
    )
    assert read_request(message(b'{"total": 12}', headers)) == expected
    assert read_request(message(structured, {"content-type": "application/cloudevents"})) == expected
    assert read_request(message(b"", CLOUD_EVENT)).payload is None


@given(st.binary(min_size=1), st.sampled_from(["image/png", "text/plain; charset=utf-8", "text/jsonp"]))
def test_data_of_another_type_than_json_is_bytes_in_every_form(data: bytes, media_type: str) -> None:
    attributes = {name.removeprefix("ce-"): value for name, value in CLOUD_EVENT.items()}
    structured = {"content-type": "application/cloudevents+json"}
    base64 = attributes | {"datacontenttype": media_type, "data_base64": b64encode(data).decode()}
    requests = [
        read_request(message(data, CLOUD_EVENT | {"ce-datacontenttype": media_type})),
        read_request(message(data, CLOUD_EVENT | {"content-type": media_type})),
        read_request(message(msgspec.json.encode(base64), structured)),
        read_request(message(data, {"Content-Type": media_type})),
    ]
    assert {(request.payload, request.content_type) for request in requests} == {(data, media_type)}
    for request in requests:
        assert msgspec.json.decode(msgspec.json.encode(request), type=HandlerRequest) == request


def test_data_of_a_structured_event_is_text_or_bytes_also_without_a_media_type() -> None:
    attributes = {name.removeprefix("ce-"): value for name, value in CLOUD_EVENT.items()}
    structured = {"content-type": "application/cloudevents+json"}
    contents = ({"data_base64": "NQ=="}, {"data": "5"}, {"data": "5", "datacontenttype": "text/plain"})
    requests = [
        read_request(message(msgspec.json.encode(attributes | each), structured)) for each in contents
    ]
    assert [(request.payload, request.content_type) for request in requests] == [
        (b"5", "application/octet-stream"),
        ("5", None),
        (b"5", "text/plain"),
    ]


def test_source_and_id_of_a_cloud_event_identify_it_unless_it_has_a_message_id() -> None:
    ids = [
        identify(message(data, headers), "STREAM")
        for data, headers in (
            (b"1", CLOUD_EVENT),
            (b"2", CLOUD_EVENT | {"ce-subject": "x"}),
            (b"1", CLOUD_EVENT | {"ce-source": "/other"}),
            (b"1", CLOUD_EVENT | {"Nats-Msg-Id": "1"}),
        )
    ]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    assert inbox_id(read_request(message(b"1", CLOUD_EVENT)).message_id) == ids[0]
    assert identify(message(b"1", CLOUD_EVENT | {"ce-id": ""}), "S") == identify(message(b"1", {}), "S")


def test_the_partition_key_of_a_cloud_event_is_its_lane() -> None:
    keyed = CLOUD_EVENT | {"ce-partitionkey": "o-1"}
    same = keyed | {"ce-id": "2"}
    assert aggregate_key(message(b"1", keyed)) == aggregate_key(message(b"1", same)) is not None
    assert aggregate_key(message(b"1", keyed | {"ce-source": "/other"})) != aggregate_key(message(b"1", same))
    assert aggregate_key(message(b"1", CLOUD_EVENT)) is None
    assert aggregate_key(message(b"1", keyed | {"ce-type": ""})) is None


@pytest.mark.parametrize(
    ("headers", "data", "reason"),
    [
        (CLOUD_EVENT | {"ce-source": ""}, b"1", "has no source"),
        (CLOUD_EVENT | {"ce-time": "0001-01-01T00:00:00+10:00"}, b"1", "is not a time in RFC 3339"),
        (CLOUD_EVENT | {"ce-datacontenttype": "text/x+json"}, b"{", "is not JSON"),
        (
            CLOUD_EVENT | {"ce-subject": "%C0%A0"},
            b"1",
            "'ce-subject' .* not percent-encoded",
        ),
        (CLOUD_EVENT, b"{", "is not JSON"),
        ({"Content-Type": "application/cloudevents+avro"}, b"1", "only JSON can be read"),
        ({"Content-Type": "application/cloudevents-batch+json"}, b"[]", "is a batch"),
        ({"Content-Type": "application/cloudevents+json"}, b"[]", "is a batch"),
        ({"Content-Type": "application/cloudevents+json"}, b"{}", "is not a CloudEvent"),
    ],
)
def test_an_invalid_cloud_event_is_unreadable(headers: dict[str, str], data: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        read_request(message(data, headers))


def test_a_message_of_the_relay_is_no_cloud_event_whatever_its_attributes_are() -> None:
    request = read_request(message(b"1", CLOUD_EVENT | {"Event-Type": "order_placed"}))
    assert (request.event_type, request.attributes) == ("order_placed", None)
    assert b"attributes" not in msgspec.json.encode(request)


def test_a_uuid_is_its_own_id_and_any_other_text_has_one_of_its_own() -> None:
    id_ = UUID("550e8400-e29b-41d4-a716-446655440000")
    assert inbox_id(str(id_)) == id_
    assert inbox_id("order-1") != inbox_id("order-2")
    with pytest.raises(Unreadable, match="255 characters"):
        inbox_id("x" * 256)


def test_places_are_compared_as_numbers() -> None:
    assert sorted(["10", "9", "100"], key=stream_position) == ["9", "10", "100"]
    assert sorted(["5-10", "5-9", "4-11"], key=stream_position) == ["4-11", "5-9", "5-10"]


class _Stored:
    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.messages: list[SourceMessage] = []
        self._max_bytes = max_bytes

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        if len(payload) > self._max_bytes:
            raise InvalidRequest("The message is too large.")
        self.messages.append(SourceMessage(subject, payload, headers, 1, "1", None))
        return PublishAck("DLQ", 1, duplicate=False)

    async def close(self) -> None:
        return


@given(DATA, HEADERS)
async def test_a_dead_letter_gives_the_message_back(data: bytes, headers: dict[str, str]) -> None:
    stored = _Stored()
    letters = DeadLetterPublisher(stored, "sea", "STREAM", "consumer")
    await letters.publish(
        message(data, headers), "id", RouteToDeadLetter("poison", "why"), 2, 1_766_959_200_000_000
    )
    (letter,) = stored.messages
    assert letter.subject == "sea.dlq.a.event.b.v1"
    original_id = "".join(filter(str.isprintable, headers.get("Nats-Msg-Id", "")))
    expected = {"Nats-Msg-Id": "dlq:consumer:id", "Postroom-Original-Msg-Id": original_id}
    assert letter.headers == {name: value for name, value in expected.items() if value}
    record = read_dead_letter(letter)
    assert (record.message_id, record.attempts, record.stream) == ("id", 2, "STREAM")
    assert record.at == "2025-12-28T22:00:00+00:00"
    back = record.message
    assert (back.subject, back.headers, back.sequence) == ("a.event.b.v1", headers, "7")
    assert back.data == data or back.data.strip() == data.strip()


@pytest.mark.parametrize(("max_bytes", "has_data"), [(50_000, True), (20_000, False)])
async def test_a_dead_letter_that_fits_has_all_headers_in_full(max_bytes: int, has_data: bool) -> None:
    stored = _Stored(max_bytes)
    headers = {f"Header-{number}-{'x' * 100}": "y" * 101 for number in range(60)}
    letters = DeadLetterPublisher(stored, "sea", "STREAM", "consumer")
    await letters.publish(message(b"z" * 20_000, headers), "id", RouteToDeadLetter("poison", "why"), 1, 0)
    record = read_dead_letter(stored.messages[0])
    assert record.headers == headers
    assert bool(record.message.data) == has_data


@pytest.mark.parametrize("subject", ["a." * 2_000 + "b", "a.b\u00a0c", "a..b", "a.>", "a.*.b"])
async def test_a_subject_that_cannot_be_published_to_is_hashed(subject: str) -> None:
    stored = _Stored()
    dead_letters = DeadLetterPublisher(stored, "sea", "STREAM", "consumer")
    await dead_letters.publish(message(b"{}", {}, subject), "id", RouteToDeadLetter("poison", "why"), 1, 0)
    (letter,) = stored.messages
    assert letter.subject.startswith("sea.dlq.hashed_subject.")
    assert len(letter.subject) < 100
    assert read_dead_letter(letter).original_subject == subject


@pytest.mark.parametrize("data", [b"", b"{}", b"no json", b'{"message_id": 1}', b"\xff"])
def test_a_message_that_is_no_dead_letter_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="is not a dead letter of Postroom"):
        read_dead_letter(message(data, {}, "sea.dlq.x"))


def test_a_context_is_one_word_of_a_subject() -> None:
    for wrong in ("", "se a", "sea.events", "*"):
        with pytest.raises(InvalidRequest, match="The context"):
            DeadLetterPublisher(_Stored(), wrong, "STREAM", "consumer")
