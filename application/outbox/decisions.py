"""How a command on an outbox event becomes what a repository writes."""

from postroom.application.ports.outbox_repository import Decided, Stored
from postroom.domain.outbox import OutboxCommand, decide, evolve


def decide_on(stored: Stored, command: OutboxCommand, now: int) -> Decided:
    """Return the new state of a stored event, and the events that lead there; none where nothing changes.

    An event that was inserted by plain SQL gets the beginning of its history now.
    """
    event, changes = stored.event, decide(command, stored.event, now)
    for change in changes:
        event = evolve(event, change)
    return Decided(event, (*stored.began, *changes) if changes else ())
