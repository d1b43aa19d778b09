"""Decisions on outbox events loaded from the table."""

from msgspec.structs import replace

from postroom.application.ports.outbox_repository import Decision, OutboxRow
from postroom.domain.outbox import (
    OutboxCommand,
    OutboxEvent,
    OutboxEventRecorded,
    OutboxRowHeld,
    decide,
    evolve,
    record_of,
)


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
    first = replace(event, version=1, retry_at=None)
    return record_of(first, now, OutboxRowHeld if event.is_row else OutboxEventRecorded)
