"""Port: the outbox table of a bounded context, as relays and operators see it (SDS-047 PORT-047-001)."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol
from uuid import UUID

import msgspec

from postroom.domain.outbox import OutboxChange, OutboxEvent

PARTITIONS = 16
"""Groups of aggregates, by a hash of their names. All relays must agree on it, so it never changes."""


class Backlog(msgspec.Struct, frozen=True):
    """Answer to SDS-047 QRY-050 and QRY-051: how many wait, and since when the oldest does (µs, UTC)."""

    count: int
    oldest_at: int | None


class Stored(NamedTuple):
    """An event as it stands in the outbox, and its payload as JSON.

    Arguments:
        began: the beginning of its history where it has none yet, because it was inserted by plain SQL.
    """

    event: OutboxEvent
    payload: bytes
    began: tuple[OutboxChange, ...] = ()


class Decided(NamedTuple):
    """What was decided on an event: its new state, and the new events of its history."""

    event: OutboxEvent
    changes: Sequence[OutboxChange]


class OutboxClaim(Protocol):
    """Some partitions of the outbox, in one transaction that ends with the claim."""

    @property
    def partitions(self) -> Sequence[int]:
        """Return the partitions that nobody else may change meanwhile."""

    async def find_unpublished(self, now: int, limit: int) -> Sequence[Stored]:
        """Return events to publish, oldest first: those of one aggregate in the order they were recorded.

        What waits for a retry until after `now` (µs, UTC) or is parked is left out, and so are the later
        events of its aggregate.
        """

    async def find(self, ids: Sequence[UUID]) -> Sequence[Stored]:
        """Return those of these events that are in the outbox."""

    async def mark_published(self, decided: Sequence[Decided]) -> None:
        """Note that events are on the stream (SDS-047 CMD-050)."""

    async def increment_attempts(self, decided: Sequence[Decided]) -> None:
        """Note that publishing events failed, when they are tried again, and which are parked."""

    async def retry(self, decided: Sequence[Decided]) -> None:
        """Have events tried again at once."""

    async def discard(self, decided: Sequence[Decided]) -> None:
        """Remove events unpublished; their histories stay."""


class OutboxRepository(Protocol):
    """Find and mark outbox events; every adapter passes `tests/conformance/outbox_repository.py`.

    Raises: Unavailable when the database can't be used.
    """

    def claim(
        self, partitions: Sequence[int], *, wait: bool = False
    ) -> AbstractAsyncContextManager[OutboxClaim]:
        """Be the only one to change the events of partitions, for as long as the context lasts.

        The claim ends with the connection at the latest, and when nothing was heard of it for as long as the
        adapter was told. What was noted is kept when the context ends without an error.

        Arguments:
            wait: for partitions that others have claimed, instead of leaving them out.
        """

    async def find_failed(self, limit: int, *, only_parked: bool) -> Sequence[Stored]:
        """Return events that were refused, oldest first: those tried again, and those parked."""

    async def backlog(self) -> Backlog:
        """Count what is unpublished (SDS-047 QRY-050)."""

    async def delete_published(self, before: int, limit: int) -> int | None:
        """Remove up to `limit` events published before a time (µs, UTC); None when somebody else is at it."""

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""
