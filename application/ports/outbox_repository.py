"""Port: the outbox table of a bounded context, as relays and operators use it (SDS-047 PORT-047-001)."""

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol
from uuid import UUID

import msgspec

from postroom.domain.outbox import OutboxChange, OutboxEvent

PARTITIONS = 16
"""Groups of aggregates, by a hash of type and id. All relays must agree on it, so it never changes."""


class Backlog(msgspec.Struct, frozen=True):
    """Number of unpublished events or unsettled messages, and the oldest one's time (SDS-047 QRY-050, 051).

    Arguments:
        oldest_at: µs UTC; None without events, or if none has a representable time.
    """

    count: int
    oldest_at: int | None


class OutboxRow(NamedTuple):
    """A row of the outbox table.

    Arguments:
        payload: as it is published, JSON or bytes; None if it can't be read.
        has_history: False for an event inserted by plain SQL, until its first change.
        unreadable: why the event can't be published; None if it can.
    """

    event: OutboxEvent
    payload: bytes | None
    has_history: bool = True
    unreadable: str | None = None


class Decision(NamedTuple):
    """The new state of an outbox event, and the new events of its history."""

    event: OutboxEvent
    changes: Sequence[OutboxChange]


class Kind(NamedTuple):
    """What a target's name of an event depends on: events of one kind are published at one name."""

    aggregate_type: str
    event_type: str
    event_version: int


class OutboxClaim(Protocol):
    """Exclusive access to some partitions of the outbox, in one transaction."""

    @property
    def partitions(self) -> Sequence[int]:
        """Return the claimed partitions."""

    async def find_unpublished(self, now: int, limit: int) -> Sequence[OutboxRow]:
        """Return events to publish, oldest first: those of one aggregate in the order of recording.

        Events that are parked, or due after `now` (µs UTC), are omitted with all later events of their
        aggregates. An event that can't be read is returned as an unreadable row, and the others as usual.
        """

    async def find_besides(self, now: int, limit: int, kinds: Collection[Kind]) -> Sequence[OutboxRow]:
        """Return events to publish as `find_unpublished` does, except events of some kinds.

        An event of these kinds holds back the later events of its aggregate.
        """

    async def find(self, ids: Sequence[UUID]) -> Sequence[OutboxRow]:
        """Return the events with these ids that are in the outbox."""

    async def mark_published(self, decisions: Sequence[Decision]) -> None:
        """Record that the stream stored events (SDS-047 CMD-050)."""

    async def increment_attempts(self, decisions: Sequence[Decision]) -> None:
        """Record failed attempts, with the times of the next ones, and parked events."""

    async def retry(self, decisions: Sequence[Decision]) -> None:
        """Make events due at once."""

    async def replace(self, decisions: Sequence[tuple[Decision, bytes]]) -> None:
        """Make held rows due at once, as the events and JSON payloads that were read from them."""

    async def discard(self, decisions: Sequence[Decision]) -> None:
        """Remove events without publishing them; their histories remain."""


class OutboxRepository(Protocol):
    """Access to outbox events; every adapter passes `tests/conformance/outbox_repository.py`.

    Raises: Unavailable when the database can't be used.
    """

    def claim(
        self, partitions: Sequence[int], *, wait: bool = False
    ) -> AbstractAsyncContextManager[OutboxClaim]:
        """Get exclusive access to partitions while the context manager lasts.

        The claim ends with the connection at the latest, and after the idle time that the adapter is
        configured with. Changes are committed when the context ends without an error.

        Arguments:
            wait: wait for partitions that others have claimed instead of omitting them.
        """

    async def find_failed(self, limit: int, *, only_parked: bool) -> Sequence[OutboxEvent]:
        """Return events whose publishing failed, oldest first: those to be retried, and those parked."""

    async def backlog(self) -> Backlog:
        """Count unpublished events (SDS-047 QRY-050)."""

    async def delete_published(self, before: int, limit: int) -> int | None:
        """Delete up to `limit` events published before a time (µs UTC); None if another process does so."""

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""
