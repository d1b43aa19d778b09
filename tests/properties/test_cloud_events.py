"""CloudEvents as the official SDK writes and reads them: the oracle of our codec (ADR 0091)."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from cloudevents.core.v1.event import CloudEvent as SdkEvent
from hypothesis import given
from hypothesis import strategies as st

from postroom.application.cloudevents import (
    AMQP,
    ATTRIBUTES,
    KAFKA,
    MAILBOX,
    NATS,
    Binding,
    CloudEvent,
    CloudEventMessage,
    Mode,
    is_cloud_event,
    read_message,
    write_message,
)
from postroom.domain.errors import InvalidRequest
from tests.support.cloud_events import RABBITMQ, attributes_of, read_by_sdk, write_by_sdk

BINDINGS = st.sampled_from([NATS, KAFKA, AMQP, MAILBOX])
MODES = st.sampled_from(["binary", "structured"])
VALUES = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1) | st.sampled_from(
    ["%41", "100%", 'a "b"']
)
"""Among them what looks like percent-encoding."""
NAMES = st.from_regex(r"[a-z0-9]{1,20}", fullmatch=True).filter(
    lambda name: name not in {*ATTRIBUTES, "data"}
)
TIMES = st.datetimes(datetime(1970, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001  # of UTC
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
JSON_DATA = st.tuples(
    st.sampled_from(["application/json", "application/x.order+json", "text/json; charset=utf-8"]),
    DOCUMENTS.map(lambda value: json.dumps(value).encode()),
)
WRONG_DATA = st.tuples(st.just("application/json"), st.binary(min_size=1))
BYTES_DATA = st.tuples(st.sampled_from(["image/png", "application/x-proto"]), st.binary(min_size=1))


@st.composite
def events(
    draw: st.DrawFn, contents: st.SearchStrategy[tuple[str, bytes]] = JSON_DATA | BYTES_DATA
) -> CloudEvent:
    """Return an event with attributes of any text, whose time has microseconds."""
    media_type, data = draw(contents)
    required = {name: draw(VALUES) for name in ("id", "source", "type")}
    time = draw(TIMES).isoformat(timespec="microseconds").replace("+00:00", "Z")
    attributes = required | {"specversion": "1.0", "time": time, "datacontenttype": media_type}
    optional = draw(st.dictionaries(st.sampled_from(["subject", "dataschema"]), VALUES))
    return CloudEvent(attributes | optional | draw(st.dictionaries(NAMES, VALUES, max_size=3)), data)


def value_of(event: CloudEvent) -> Any:
    """Return the data as the SDK does from a message in binary mode."""
    if event.has_json:
        return json.loads(event.data or b"")
    try:
        return (event.data or b"").decode()
    except UnicodeDecodeError:
        return event.data


def reread(message: CloudEventMessage, binding: Binding) -> CloudEvent:
    """Return the event of a message as we read it."""
    assert is_cloud_event(message.headers.items())
    headers, encoded = message.headers.items(), binding.is_percent_encoded
    return read_message(headers, message.payload, is_percent_encoded=encoded)


@given(event=events(), binding=BINDINGS, mode=MODES)
def test_the_sdk_reads_what_we_write(event: CloudEvent, binding: Binding, mode: Mode) -> None:
    message = write_message(event, binding, mode)
    read = read_by_sdk(binding, message.payload, message.headers)
    assert attributes_of(read) == event.attributes
    expected = event.data if mode == "structured" and not event.has_json else value_of(event)
    assert read.get_data() == expected


@given(event=events(), binding=BINDINGS | st.just(RABBITMQ), mode=MODES)
def test_we_read_what_the_sdk_writes(event: CloudEvent, binding: Binding, mode: Mode) -> None:
    time = datetime.fromisoformat(event.attributes["time"])
    if binding is AMQP and mode == "binary":  # its timestamps have milliseconds
        time = time.replace(microsecond=time.microsecond // 1_000 * 1_000)
    data = {"value": value_of(event)} if event.has_json else event.data  # the SDK writes no other JSON
    sdk = SdkEvent(dict(event.attributes) | {"time": time}, data)
    message = write_by_sdk(sdk, binding, mode)
    read = reread(message, binding)
    assert read.time_us == CloudEvent({**event.attributes, "time": time.isoformat()}).time_us
    assert dict(read.attributes) | {"time": ""} == dict(event.attributes) | {"time": ""}
    assert (json.loads(read.data or b"") if event.has_json else read.data) == data


@given(event=events(JSON_DATA | BYTES_DATA | WRONG_DATA), binding=BINDINGS, mode=MODES)
def test_we_read_what_we_write_byte_for_byte(event: CloudEvent, binding: Binding, mode: Mode) -> None:
    message = write_message(event, binding, mode)
    if binding is NATS:
        assert all(value.isascii() and value.isprintable() for value in message.headers.values())
    read = reread(message, binding)
    assert read == event


@given(st.binary() | DOCUMENTS.map(lambda value: json.dumps({"specversion": value}).encode()))
def test_any_document_is_an_event_or_refused(document: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_message([("content-type", "Application/CloudEvents+JSON; charset=utf-8")], document)


@given(st.dictionaries(st.sampled_from(["ce-id", "CE_type", "cloudEvents:source", "ce-x"]), st.text()))
def test_any_headers_are_an_event_or_refused(headers: dict[str, str]) -> None:
    headers["ce-specversion"] = "1.0"
    try:
        event = read_message(headers.items(), b"", is_percent_encoded=True)
    except InvalidRequest:
        return
    assert event.attributes["id"]
