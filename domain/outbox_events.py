"""Events of the OutboxEvent aggregate (SDS-047 section 2.1)."""

from uuid import UUID

import msgspec

from postroom.domain.record import Event


class OutboxEventRecorded(Event, frozen=True, gc=False):
    """The event was written to the outbox in the transaction that caused it; its row has the payload.

    Arguments:
        occurred_at: µs since 1970 UTC; None if the row's time can't be represented.
        traceparent, tracestate, baggage: W3C trace context of the transaction.
        attributes: headers that the service adds.
        is_binary: whether the payload is bytes, which its row has in base64.
        publish_at: time before which the event is not published, µs since 1970 UTC.
    """

    aggregate_type: str
    aggregate_id: str
    event_type: str
    event_version: int
    occurred_at: int | None
    correlation_id: str | None
    causation_id: str | None
    traceparent: str | None
    attributes: dict[str, str] = msgspec.field(default_factory=dict)
    is_binary: bool = False
    publish_at: int | None = None
    tracestate: str | None = None
    baggage: str | None = None


class OutboxRowHeld(OutboxEventRecorded, frozen=True, gc=False):
    """A row of a captured table that can't be read was moved to the outbox; the payload is the row."""


class OutboxRowRead(OutboxEventRecorded, frozen=True, gc=False):
    """An operator had a held row read with other settings: from here on it is this event, due at once."""


class OutboxEventPublished(Event, frozen=True, gc=False):
    """The stream stored the event (SDS-047 EVT-047-001)."""

    event_type: str
    subject: str

    @property
    def outbox_id(self) -> UUID:
        """Return the id of the outbox event."""
        return UUID(bytes=self.stream)

    @property
    def published_at(self) -> int:
        """Return when it was published, µs since 1970 UTC."""
        return self.at


class OutboxPublishFailed(Event, frozen=True, gc=False):
    """The stream refused the event; the relay retries it at `retry_at`, or never if that is None."""

    attempt: int
    error: str
    retry_at: int | None


class OutboxEventParked(Event, frozen=True, gc=False):
    """The event can't be published: it and later events of its aggregate wait for an operator."""

    attempts: int
    error: str


class OutboxEventRetried(Event, frozen=True, gc=False):
    """An operator made the event due at once and reset its attempts."""


class OutboxEventDiscarded(Event, frozen=True, gc=False):
    """An operator removed the event from the outbox without publishing it.

    Arguments:
        payload: JSON; empty if it couldn't be read, with the cause at the end of `reason`.
    """

    reason: str
    payload: bytes


OutboxChange = (
    OutboxEventRecorded
    | OutboxRowHeld
    | OutboxRowRead
    | OutboxEventPublished
    | OutboxPublishFailed
    | OutboxEventParked
    | OutboxEventRetried
    | OutboxEventDiscarded
)
