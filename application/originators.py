"""Originator ids of the `eventsourcing` library, as our recorders take them."""

from uuid import UUID

from eventsourcing.persistence import ProgrammingError


def check_originator(originator_id: UUID | str) -> UUID:
    """Return the id of an aggregate.

    Raises: ProgrammingError when it is not a UUID.
    """
    if not isinstance(originator_id, UUID):
        raise ProgrammingError(f"Originator ids must be UUIDs, not {originator_id!r}.")
    return originator_id
