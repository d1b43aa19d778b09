"""New events, as a service passes them to its outbox."""

import json
import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from postroom.application.outbox.events import BAGGAGE, TRACEPARENT, TRACESTATE
from postroom.application.outbox.formats import check_attributes
from postroom.application.tracing import outgoing_headers
from postroom.domain.errors import InvalidOutboxEvent
from postroom.domain.outbox import RecordOutboxEvent, decide
from postroom.domain.outbox_events import OutboxEventRecorded
from postroom.domain.subject import CorrelationContext

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_YEAR_1 = (datetime(1, 1, 1, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_NAIVE = re.compile(rb'"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?"')
"""A datetime without a time zone, or text that looks like one."""
_decode = msgspec.json.Decoder().decode


class NewEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event to record in the outbox (SDS-047 section 2.1 `OutboxEvent`).

    Arguments:
        aggregate_type, aggregate_id: the aggregate that the event is about; its events keep their order. Ids
            that are integers or UUIDs are stored as text.
        event_type: one token of the subject `{context}.event.{event_type}.v{event_version}`.
        payload: any value that JSON can represent, except None, and models of pydantic; `msgspec.Raw` holds
            encoded JSON. Datetimes have a time zone. Bytes are published unchanged and need a `content_type`.
        occurred_at: with a time zone; None means now.
        correlation_id, causation_id: UUIDs, or text of up to 255 characters.
        traceparent, tracestate, baggage: W3C trace context, published as the headers of these names; without
            a traceparent, the current trace's.
        id: globally unique; None generates a UUIDv7.
        content_type: media type of the payload, published as the header `Content-Type`.
        attributes: additional headers, up to 16 KiB of names and values.
        publish_at: with a time zone; the event, and later events of its aggregate, wait in the outbox until
            then. None or a time in the past publishes it as soon as possible.
        event_version: of the form of the payload, from 1.
    """

    aggregate_type: str
    aggregate_id: str | int | UUID
    event_type: str
    payload: Any
    event_version: int = 1
    occurred_at: datetime | None = None
    correlation_id: str | UUID | None = None
    causation_id: str | UUID | None = None
    traceparent: str | None = None
    tracestate: str | None = None
    baggage: str | None = None
    id: UUID | None = None
    content_type: str | None = None
    attributes: Mapping[str, str] = {}
    publish_at: datetime | None = None


class RecordedEvent(NamedTuple):
    """The stored form of a new event.

    Arguments:
        event: the first event of its history.
        payload: JSON; for bytes, text in base64.
        data_bytes: size of a payload of bytes; None for JSON.
    """

    event: OutboxEventRecorded
    payload: bytes
    data_bytes: int | None = None


def record_event(new: NewEvent, now: int, make_id: Callable[[], UUID]) -> RecordedEvent:
    """Validate a new event and return its stored form.

    Arguments:
        now: µs since 1970 UTC.
        make_id: generates the id of an event without one.

    Raises: InvalidOutboxEvent (SDS-047 POL-047-001), FutureEvent (POL-047-002).
    """
    if not isinstance(new, NewEvent):
        raise InvalidOutboxEvent(f"The outbox records NewEvent objects; this is a {_type_name(new)}.")
    id_ = make_id() if new.id is None else _uuid(new.id, "id")
    _check_types(id_, new)
    data = _binary(new)
    trace = _trace(new)
    command = RecordOutboxEvent(
        id_,
        new.aggregate_type,
        str(new.aggregate_id),
        new.event_type,
        new.event_version,
        now if new.occurred_at is None else _micros(id_, new.occurred_at, "occurred_at"),
        CorrelationContext(
            _correlation_id(id_, new.correlation_id, "correlation_id"),
            _correlation_id(id_, new.causation_id, "causation_id"),
        ),
        trace.get(TRACEPARENT),
        check_attributes(id_, new.attributes, new.content_type),
        data is not None,
        None if new.publish_at is None else _micros(id_, new.publish_at, "publish_at"),
        trace.get(TRACESTATE),
        trace.get(BAGGAGE),
    )
    (event,) = decide(command, None, now)
    assert isinstance(event, OutboxEventRecorded)
    if data is None:
        return RecordedEvent(event, _json(id_, new.payload))
    return RecordedEvent(event, b'"%s"' % b64encode(data), len(data))


def check_size(id_: UUID, published_bytes: int, max_bytes: int) -> None:
    """Raise `InvalidOutboxEvent` if a payload in its published form exceeds the limit."""
    if published_bytes > max_bytes:
        raise InvalidOutboxEvent(
            f"Outbox event {id_}: the payload has {published_bytes:,} bytes as published, more than "
            f"{max_bytes:,}; send a reference to the data instead, or raise max_payload_bytes and NATS's "
            "max_payload."
        )


def _check_types(id_: UUID, new: NewEvent) -> None:
    for name, types, expected in (
        ("aggregate_type", str, "text"),
        ("aggregate_id", str | int | UUID, "text, an integer or a UUID"),
        ("event_type", str | None, "text"),
        ("event_version", int, "an integer"),
        ("occurred_at", datetime | None, "a datetime with a time zone"),
        ("traceparent", str | None, "text"),
        ("tracestate", str | None, "text"),
        ("baggage", str | None, "text"),
        ("publish_at", datetime | None, "a datetime with a time zone"),
    ):
        value = getattr(new, name)
        if isinstance(value, bool) or not isinstance(value, types):
            raise InvalidOutboxEvent(
                f"Outbox event {id_}: {name} must be {expected}; it was {_type_name(value)}."
            )


def _type_name(value: object) -> str:
    return "None" if value is None else type(value).__qualname__


def _uuid(value: Any, name: str) -> UUID:
    try:
        return (
            value if type(value) is UUID else UUID(str(value))
        )  # other libraries define their own UUID classes
    except ValueError:
        raise InvalidOutboxEvent(f"An outbox event's {name} must be a UUID; it was {value!r:.80}.") from None


def _correlation_id(id_: UUID, value: object, name: str) -> str | None:
    """Return the id of a conversation or a cause as text; a UUID in its canonical form."""
    if value is None or isinstance(value, str):
        return value
    if type(value).__name__ != "UUID":  # other libraries define their own UUID classes
        raise InvalidOutboxEvent(
            f"Outbox event {id_}: {name} must be text or a UUID; it was {_type_name(value)}."
        )
    return str(_uuid(value, name))


def _trace(new: NewEvent) -> Mapping[str, str]:
    """Return the trace context of an event as headers: its own, or the current one."""
    own = ((TRACEPARENT, new.traceparent), (TRACESTATE, new.tracestate), (BAGGAGE, new.baggage))
    headers = {name: value for name, value in own if value is not None}
    return headers if new.traceparent is not None else outgoing_headers() | headers


def _micros(id_: UUID, at: datetime, name: str) -> int:
    if at.tzinfo is None:
        raise InvalidOutboxEvent(f"Outbox event {id_}: {name} {at} has no time zone; use datetime.now(UTC).")
    micros = (at - _EPOCH) // timedelta(microseconds=1)
    if micros < _YEAR_1:
        raise InvalidOutboxEvent(f"Outbox event {id_}: {name} {at} is before the year 1 in UTC.")
    return micros


def _binary(new: NewEvent) -> bytes | None:
    """Return a payload of bytes, or None for JSON."""
    payload = new.payload
    is_binary = new.content_type is not None and isinstance(payload, bytes | bytearray | memoryview)
    return bytes(payload) if is_binary else None


def _json(id_: UUID, payload: Any) -> bytes:
    if payload is None:
        raise InvalidOutboxEvent(
            f"Outbox event {id_}: the payload is None; pass {{}} if the event has no data."
        )
    if isinstance(payload, bytes | bytearray | memoryview):
        raise InvalidOutboxEvent(
            f"Outbox event {id_}: the payload is bytes; wrap JSON as msgspec.Raw, or set content_type to "
            "publish them as they are."
        )
    try:
        text = _encode(payload)
        if isinstance(payload, msgspec.Raw):
            _decode(text)
        else:
            if b"null" in text:  # msgspec encodes NaN and infinity as null; json rejects them
                json.dumps(msgspec.to_builtins(payload, str_keys=True, enc_hook=_dump), allow_nan=False)
            if _NAIVE.search(text):
                _check_times(id_, payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidOutboxEvent(f"Outbox event {id_}: the payload is not JSON: {error}.") from error
    if _NUL.search(text):
        raise InvalidOutboxEvent(
            f"Outbox event {id_}: the payload has a NUL character, which PostgreSQL can't store; remove it."
        )
    return text


def _dump(value: Any) -> Any:
    """Return a model of pydantic as values of JSON, as `Encoder.enc_hook`."""
    if not _is_model(value):
        raise TypeError(f"{_type_name(value)} has no form in JSON")
    return value.model_dump(mode="json")


def _is_model(value: object) -> bool:
    return callable(getattr(type(value), "model_dump", None))  # of pydantic, which need not be installed


def _check_times(id_: UUID, payload: Any) -> None:
    """Raise `InvalidOutboxEvent` if a payload has a datetime without a time zone."""
    values = [
        msgspec.to_builtins(
            payload,
            builtin_types=(datetime,),
            str_keys=True,
            enc_hook=lambda value: value.model_dump() if _is_model(value) else None,
        )
    ]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            values += value
        elif isinstance(value, datetime) and value.tzinfo is None:
            raise InvalidOutboxEvent(
                f"Outbox event {id_}: the payload has the time {value} without a time zone; use "
                "datetime.now(UTC), or pass text."
            )


_encode = msgspec.json.Encoder(enc_hook=_dump).encode
