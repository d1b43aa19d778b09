"""The OutboxEvent aggregate: an event from its recording until it is published (SDS-047 section 2.1)."""

import re
from typing import Literal
from uuid import UUID

import msgspec
from msgspec.structs import replace

from postroom.domain.errors import FutureEvent, InvalidOutboxEvent, InvalidRequest
from postroom.domain.outbox_events import (
    OutboxChange,
    OutboxEventDiscarded,
    OutboxEventParked,
    OutboxEventPublished,
    OutboxEventRecorded,
    OutboxEventRetried,
    OutboxPublishFailed,
    OutboxRowHeld,
    OutboxRowRead,
)
from postroom.domain.policy import SECOND_MS, backoff_ms
from postroom.domain.subject import MAX_CORRELATION_CHARS, CorrelationContext, check_token, is_correlation_id

MS = 1_000
"""Microseconds in a millisecond."""
MAX_TEXT_CHARS = 512
MAX_STATE_CHARS = 512
MAX_BAGGAGE_CHARS = 8_192
"""Sizes of `tracestate` and `baggage` that W3C requires everyone to pass on."""
MAX_ERROR_CHARS = 1_000
"""Longer error texts are truncated."""

# Types and ids of aggregates are published as headers, which can't contain line breaks.
_TEXT = re.compile(rf"[^\x00-\x1f\x7f\ud800-\udfff]{{1,{MAX_TEXT_CHARS}}}\Z")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")

Status = Literal["waiting", "parked", "published", "discarded"]


class OutboxEvent(msgspec.Struct, frozen=True, gc=False):
    """State of an event in the outbox: the fold of its history (SDS-047 section 2.1); times in µs UTC.

    Arguments:
        occurred_at: None if the row's time can't be represented.
        publish_attempts: attempts since the event was recorded, or since an operator retried it.
        retry_at: time of the first attempt of a delayed event, or of the next one after a refusal; None if
            neither, or if the event is parked.
        attributes, is_binary: see `OutboxEventRecorded`.
        is_row: whether the payload is a row of a captured table, which can't be published.
    """

    id: UUID
    version: int
    aggregate_type: str
    aggregate_id: str
    event_type: str
    event_version: int
    occurred_at: int | None
    correlation: CorrelationContext
    traceparent: str | None = None
    published_at: int | None = None
    publish_attempts: int = 0
    publish_error: str | None = None
    retry_at: int | None = None
    status: Status = "waiting"
    attributes: dict[str, str] = {}
    is_binary: bool = False
    tracestate: str | None = None
    baggage: str | None = None
    is_row: bool = False


class PublishPolicy(msgspec.Struct, frozen=True):
    """Number and spacing of attempts to publish an event; times in ms.

    Arguments:
        max_attempts: refusals after which the event is parked.
        backoff_base_ms, backoff_max_ms: bounds of the exponential backoff, which has full jitter.
    """

    max_attempts: int = 20
    backoff_base_ms: int = SECOND_MS
    backoff_max_ms: int = 300 * SECOND_MS


class RecordOutboxEvent(msgspec.Struct, frozen=True):
    """Command that writes an event to the outbox; times are in µs since 1970 UTC."""

    id: UUID | None
    aggregate_type: str
    aggregate_id: str
    event_type: str | None
    event_version: int
    occurred_at: int
    correlation: CorrelationContext = CorrelationContext()
    traceparent: str | None = None
    attributes: dict[str, str] = {}
    is_binary: bool = False
    publish_at: int | None = None
    tracestate: str | None = None
    baggage: str | None = None


class MarkPublished(msgspec.Struct, frozen=True):
    """Command that records that the target stored the event at `subject` (SDS-047 CMD-050)."""

    subject: str


class MarkFailed(msgspec.Struct, frozen=True):
    """Command that records a refusal by the stream; `jitter` is a uniform random number in [0, 1)."""

    error: str
    policy: PublishPolicy
    jitter: float


class ParkOutboxEvent(msgspec.Struct, frozen=True):
    """Command that parks an event that further attempts could not publish."""

    error: str


class RetryOutboxEvent(msgspec.Struct, frozen=True):
    """Command that makes a parked or failing event due at once, with its attempts reset."""


class ReadOutboxRow(msgspec.Struct, frozen=True):
    """Command that makes a held row due at once, as the event that was read from it."""

    event: OutboxEvent


class DiscardOutboxEvent(msgspec.Struct, frozen=True):
    """Command that removes an unpublished event from the outbox; its history keeps the `payload`."""

    reason: str
    payload: bytes


OutboxCommand = (
    RecordOutboxEvent
    | MarkPublished
    | MarkFailed
    | ParkOutboxEvent
    | RetryOutboxEvent
    | ReadOutboxRow
    | DiscardOutboxEvent
)


def decide(command: OutboxCommand, event: OutboxEvent | None, now: int) -> list[OutboxChange]:
    """Return the events that a command causes; none if it changes nothing.

    Arguments:
        event: current state; None before the event is recorded.
        now: µs since 1970 UTC.

    Raises:
        InvalidOutboxEvent: a required field is missing or invalid (SDS-047 POL-047-001), or the event exists.
        FutureEvent: `occurred_at` is after `now` (SDS-047 POL-047-002).
        InvalidRequest: an operator's command for an event that is already published or discarded.
    """
    if isinstance(command, RecordOutboxEvent):
        return [_record(command, event, now)]
    if event is None:
        raise InvalidOutboxEvent("The outbox event does not exist; record it first.")
    match command:
        case MarkPublished():
            return _publish(event, command.subject, now)
        case MarkFailed():
            return _fail(event, command, now)
        case ParkOutboxEvent():
            return _park(event, command.error, now)
        case RetryOutboxEvent():
            return _retry(event, now)
        case ReadOutboxRow():
            _require_unpublished(event)
            read = replace(command.event, id=event.id, version=event.version + 1, retry_at=now)
            return [record_of(read, now, OutboxRowRead)]
        case DiscardOutboxEvent():
            _require_unpublished(event)
            reason = truncate_error(command.reason)
            return [OutboxEventDiscarded(event.id.bytes, event.version + 1, now, reason, command.payload)]


def evolve(event: OutboxEvent | None, change: OutboxChange) -> OutboxEvent:
    """Return the outbox event after one more event of its history."""
    if isinstance(change, OutboxEventRecorded):
        return OutboxEvent(
            UUID(bytes=change.stream),
            change.version,
            change.aggregate_type,
            change.aggregate_id,
            change.event_type,
            change.event_version,
            change.occurred_at,
            CorrelationContext(change.correlation_id, change.causation_id),
            change.traceparent,
            retry_at=change.publish_at,
            attributes=change.attributes,
            is_binary=change.is_binary,
            tracestate=change.tracestate,
            baggage=change.baggage,
            is_row=isinstance(change, OutboxRowHeld),
        )
    if event is None:
        raise ValueError(f"The history of an outbox event can't start with {type(change).__name__}.")
    event = replace(event, version=change.version)
    match change:
        case OutboxEventPublished():
            return replace(
                event,
                status="published",
                published_at=change.at,
                publish_attempts=event.publish_attempts + 1,
                publish_error=None,
                retry_at=None,
            )
        case OutboxPublishFailed():
            return replace(
                event, publish_attempts=change.attempt, publish_error=change.error, retry_at=change.retry_at
            )
        case OutboxEventParked():
            return replace(event, status="parked", publish_error=change.error, retry_at=None)
        case OutboxEventRetried():
            return replace(event, status="waiting", publish_attempts=0, retry_at=change.at)
        case OutboxEventDiscarded():
            return replace(event, status="discarded", retry_at=None)


def record_of(
    event: OutboxEvent, now: int, kind: type[OutboxEventRecorded] = OutboxEventRecorded
) -> OutboxEventRecorded:
    """Return the event that starts a history with the whole state of an outbox event, at its version."""
    return kind(
        event.id.bytes,
        event.version,
        now,
        event.aggregate_type,
        event.aggregate_id,
        event.event_type,
        event.event_version,
        event.occurred_at,
        event.correlation.correlation_id,
        event.correlation.causation_id,
        event.traceparent,
        event.attributes,
        event.is_binary,
        event.retry_at,
        event.tracestate,
        event.baggage,
    )


def _record(command: RecordOutboxEvent, event: OutboxEvent | None, now: int) -> OutboxEventRecorded:
    if event is not None:
        raise InvalidOutboxEvent(f"Outbox event {event.id} is already recorded; give each event its own id.")
    if command.id is None:
        raise InvalidOutboxEvent("An outbox event must have an id; give it a UUID.")
    if not command.event_type:
        raise InvalidOutboxEvent(
            f"Outbox event {command.id} must have an event type, such as order_placed; it has none."
        )
    try:
        check_token(command.event_type, "The event type")
    except InvalidRequest as error:
        raise InvalidOutboxEvent(f"Outbox event {command.id}: {error}") from None
    for name, text in (("type", command.aggregate_type), ("id", command.aggregate_id)):
        if not _TEXT.match(text):
            raise InvalidOutboxEvent(
                f"Outbox event {command.id}: its aggregate's {name} must be 1 to {MAX_TEXT_CHARS} characters "
                f"without control characters; it was {text[:80]!r}."
            )
    if not 1 <= command.event_version < 2**31:
        raise InvalidOutboxEvent(
            f"Outbox event {command.id}: its version must be at least 1; it was {command.event_version}."
        )
    _check_correlation(command)
    _check_trace(command)
    if command.occurred_at > now:
        raise FutureEvent(
            f"Outbox event {command.id} has an occurred_at {command.occurred_at - now:,} µs in the future; "
            "omit occurred_at, or correct the clock."
        )
    return OutboxEventRecorded(
        command.id.bytes,
        1,
        now,
        command.aggregate_type,
        command.aggregate_id,
        command.event_type,
        command.event_version,
        command.occurred_at,
        command.correlation.correlation_id,
        command.correlation.causation_id,
        command.traceparent,
        command.attributes,
        command.is_binary,
        command.publish_at if command.publish_at is not None and command.publish_at > now else None,
        command.tracestate,
        command.baggage,
    )


def _check_correlation(command: RecordOutboxEvent) -> None:
    ids = command.correlation
    for name, text in (("correlation_id", ids.correlation_id), ("causation_id", ids.causation_id)):
        if text is not None and not is_correlation_id(text):
            raise InvalidOutboxEvent(
                f"Outbox event {command.id}: its {name} must be 1 to {MAX_CORRELATION_CHARS} characters "
                f"without control characters; it was {text[:80]!r}."
            )


def _check_trace(command: RecordOutboxEvent) -> None:
    if command.traceparent is not None and not _TRACEPARENT.match(command.traceparent):
        raise InvalidOutboxEvent(
            f"Outbox event {command.id}: {command.traceparent[:80]!r} is not a W3C traceparent."
        )
    if command.tracestate is not None and command.traceparent is None:
        raise InvalidOutboxEvent(
            f"Outbox event {command.id} has a tracestate, but no traceparent; pass both, or neither."
        )
    for name, text, most in (
        ("tracestate", command.tracestate, MAX_STATE_CHARS),
        ("baggage", command.baggage, MAX_BAGGAGE_CHARS),
    ):
        if text is not None and not (0 < len(text) <= most and text.isascii() and text.isprintable()):
            raise InvalidOutboxEvent(
                f"Outbox event {command.id}: its {name} must be 1 to {most:,} printable ASCII characters, as "
                f"W3C defines the header; it was {text[:80]!r}."
            )


def _publish(event: OutboxEvent, subject: str, now: int) -> list[OutboxChange]:
    if event.status in ("published", "discarded"):
        return []
    return [OutboxEventPublished(event.id.bytes, event.version + 1, now, event.event_type, subject)]


def _fail(event: OutboxEvent, command: MarkFailed, now: int) -> list[OutboxChange]:
    if event.status != "waiting":
        return []
    stream, attempt, error = event.id.bytes, event.publish_attempts + 1, truncate_error(command.error)
    if attempt >= command.policy.max_attempts:
        return [
            OutboxPublishFailed(stream, event.version + 1, now, attempt, error, None),
            OutboxEventParked(stream, event.version + 2, now, attempt, error),
        ]
    retry_at = now + backoff_ms(command.policy, attempt, command.jitter) * MS
    return [OutboxPublishFailed(stream, event.version + 1, now, attempt, error, retry_at)]


def _park(event: OutboxEvent, error: str, now: int) -> list[OutboxChange]:
    if event.status != "waiting":
        return []
    error = truncate_error(error)
    return [OutboxEventParked(event.id.bytes, event.version + 1, now, event.publish_attempts, error)]


def _retry(event: OutboxEvent, now: int) -> list[OutboxChange]:
    _require_unpublished(event)
    if event.is_row:
        raise InvalidRequest(
            f"Outbox event {event.id} is a row of a captured table that can't be read; retry it with the "
            "settings of its capture."
        )
    if event.status == "waiting" and event.publish_attempts == 0:
        return []
    return [OutboxEventRetried(event.id.bytes, event.version + 1, now)]


def _require_unpublished(event: OutboxEvent) -> None:
    if event.status in ("published", "discarded"):
        raise InvalidRequest(f"Outbox event {event.id} is already {event.status}; nothing was changed.")


def truncate_error(text: str) -> str:
    """Return an error text that any database can store: of limited length, without NUL or surrogates."""
    return text.replace("\x00", "")[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode()
