"""The published form of an outbox event: the payload as data, all other fields and attributes as headers."""

from datetime import UTC, datetime, timedelta

from postroom.domain.outbox import OutboxEvent

MESSAGE_ID = "Nats-Msg-Id"
EVENT_TYPE = "Event-Type"
EVENT_VERSION = "Event-Version"
OCCURRED_AT = "Occurred-At"
AGGREGATE_TYPE = "Aggregate-Type"
AGGREGATE_ID = "Aggregate-Id"
CORRELATION_ID = "Correlation-Id"
CAUSATION_ID = "Causation-Id"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
BAGGAGE = "baggage"
CONTENT_TYPE = "Content-Type"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def headers_of(event: OutboxEvent) -> dict[str, str]:
    """Return the headers of an event's message, without those of absent fields.

    `Occurred-At` is RFC 3339 in UTC with microseconds.
    """
    assert event.occurred_at is not None, "rows without a readable time are parked, not published"
    headers = {
        MESSAGE_ID: str(event.id),
        EVENT_TYPE: event.event_type,
        EVENT_VERSION: str(event.event_version),
        OCCURRED_AT: rfc_3339(event.occurred_at),
        AGGREGATE_TYPE: event.aggregate_type,
        AGGREGATE_ID: event.aggregate_id,
    }
    if event.correlation.correlation_id is not None:
        headers[CORRELATION_ID] = event.correlation.correlation_id
    if event.correlation.causation_id is not None:
        headers[CAUSATION_ID] = event.correlation.causation_id
    headers |= trace_headers(event)
    return headers | event.attributes if event.attributes else headers


def trace_headers(event: OutboxEvent) -> dict[str, str]:
    """Return the headers with the trace context of an event, without those of absent fields."""
    fields = ((TRACEPARENT, event.traceparent), (TRACESTATE, event.tracestate), (BAGGAGE, event.baggage))
    return {name: value for name, value in fields if value is not None}


def rfc_3339(at: int) -> str:
    """Return a time in µs since 1970 UTC as RFC 3339 with microseconds."""
    text = (_EPOCH + timedelta(microseconds=at)).isoformat(timespec="microseconds")
    return text.replace("+00:00", "Z")
