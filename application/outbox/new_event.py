"""Events as a service hands them to its outbox."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from postroom.domain.errors import InvalidOutboxEvent
from postroom.domain.outbox import OutboxEventRecorded, RecordOutboxEvent, decide
from postroom.domain.subject import CorrelationContext

MAX_PAYLOAD_BYTES = 1_000_000
"""What fits into a message of a NATS server as it is installed, with headers and some room."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class NewEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe an event to record in the outbox (SDS-047 section 2.1 `OutboxEvent`).

    Arguments:
        aggregate_type, aggregate_id: what the event is about; events of one aggregate keep their order.
        event_type: one word of the subject `{context}.event.{event_type}.v{event_version}`.
        payload: anything JSON can say; `msgspec.Raw` is taken for JSON already.
        occurred_at: with a time zone; None is now.
        traceparent: W3C trace context, published as the header of that name.
        id: unique for ever; None makes a UUIDv7.
    """

    aggregate_type: str
    aggregate_id: str
    event_type: str
    payload: Any
    event_version: int = 1
    occurred_at: datetime | None = None
    correlation_id: UUID | None = None
    causation_id: UUID | None = None
    traceparent: str | None = None
    id: UUID | None = None


class Recorded(NamedTuple):
    """What recording an event amounts to: the event of its history, and its payload as JSON."""

    event: OutboxEventRecorded
    payload: bytes


def decide_recorded(
    new: NewEvent, now: int, make_id: Callable[[], UUID], max_payload_bytes: int = MAX_PAYLOAD_BYTES
) -> Recorded:
    """Return what a new event is recorded as.

    Arguments:
        now: µs since 1970 UTC.

    Raises: InvalidOutboxEvent (SDS-047 POL-047-001), FutureEvent (POL-047-002).
    """
    id_ = make_id() if new.id is None else _uuid(new.id, "id")
    command = RecordOutboxEvent(
        id_,
        new.aggregate_type,
        new.aggregate_id,
        new.event_type,
        new.event_version,
        now if new.occurred_at is None else _micros(id_, new.occurred_at),
        CorrelationContext(
            None if new.correlation_id is None else _uuid(new.correlation_id, "correlation_id"),
            None if new.causation_id is None else _uuid(new.causation_id, "causation_id"),
        ),
        new.traceparent,
    )
    (event,) = decide(command, None, now)
    assert isinstance(event, OutboxEventRecorded)
    return Recorded(event, _json(id_, new.payload, max_payload_bytes))


def _uuid(given: Any, name: str) -> UUID:
    try:
        return given if type(given) is UUID else UUID(str(given))  # other libraries have UUIDs of their own
    except ValueError:
        raise InvalidOutboxEvent(f"An outbox event's {name} must be a UUID; it was {given!r}.") from None


def _micros(id_: UUID, at: datetime) -> int:
    if at.tzinfo is None:
        raise InvalidOutboxEvent(
            f"Outbox event {id_}: occurred_at {at} has no time zone; use datetime.now(UTC)."
        )
    return (at - _EPOCH) // timedelta(microseconds=1)


def _json(id_: UUID, payload: Any, max_bytes: int) -> bytes:
    if isinstance(payload, bytes | bytearray | memoryview):
        raise InvalidOutboxEvent(
            f"Outbox event {id_}: the payload is bytes; wrap JSON as msgspec.Raw, or pass what it stands for."
        )
    try:
        text = _encode(payload)
        if isinstance(payload, msgspec.Raw):
            _decode(text)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidOutboxEvent(f"Outbox event {id_}: the payload is not JSON: {error}.") from error
    if _NUL.search(text):
        raise InvalidOutboxEvent(
            f"Outbox event {id_}: the payload has a NUL character, which PostgreSQL can't keep; leave it out."
        )
    if len(text) > max_bytes:
        raise InvalidOutboxEvent(
            f"Outbox event {id_}: the payload has {len(text):,} bytes, more than {max_bytes:,}; send a "
            "reference to the data instead, or raise max_payload_bytes and NATS's max_payload."
        )
    return text
