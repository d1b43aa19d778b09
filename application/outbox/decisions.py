"""Decisions on outbox events loaded from the table."""

from postroom.application.ports.outbox_repository import Decision, OutboxRow
from postroom.domain.outbox import OutboxCommand, OutboxEvent, OutboxEventRecorded, decide, evolve


def decide_on(row: OutboxRow, command: OutboxCommand, now: int) -> Decision:
    """Return the new state of an event, and the events to append to its history; empty if nothing changes.

    The history of an event that was inserted by plain SQL starts with its first change.
    """
    event, changes = row.event, decide(command, row.event, now)
    for change in changes:
        event = evolve(event, change)
    if changes and not row.has_history:
        changes.insert(0, _recorded_event(row.event, now))
    return Decision(event, changes)


def record_only(row: OutboxRow, now: int) -> Decision:
    """Return the first event of the history of an event that has none."""
    return Decision(row.event, [_recorded_event(row.event, now)])


def _recorded_event(event: OutboxEvent, now: int) -> OutboxEventRecorded:
    return OutboxEventRecorded(
        event.id.bytes,
        1,
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
        tracestate=event.tracestate,
        baggage=event.baggage,
    )
