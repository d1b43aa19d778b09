"""What operators ask of an outbox, and do to events that can't be published."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec

from postroom.application.outbox.decisions import decide_on
from postroom.application.ports.clock import Clock
from postroom.application.ports.outbox_repository import (
    PARTITIONS,
    Backlog,
    Decided,
    OutboxClaim,
    OutboxRepository,
    Stored,
)
from postroom.domain.errors import NotFound
from postroom.domain.outbox import DiscardOutboxEvent, OutboxCommand, RetryOutboxEvent

PAGE = 100
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class OutboxBacklog(msgspec.Struct, frozen=True):
    """Answer to SDS-047 QRY-050: how many events are unpublished, and since when the oldest is."""

    context: str
    count: int
    oldest_at: datetime | None


class FailedEvent(msgspec.Struct, frozen=True):
    """Tell of an event that the stream refused; `retry_at` is None for one that is parked."""

    id: UUID
    event_type: str
    event_version: int
    aggregate_type: str
    aggregate_id: str
    occurred_at: datetime
    parked: bool
    attempts: int
    error: str | None
    retry_at: datetime | None


class GetOutboxBacklog:
    """Count what is unpublished (SDS-047 QRY-050)."""

    def __init__(self, repository: OutboxRepository, context: str) -> None:
        self._repository = repository
        self._context = context

    async def __call__(self) -> OutboxBacklog:
        """Return the backlog of the context."""
        backlog: Backlog = await self._repository.backlog()
        return OutboxBacklog(self._context, backlog.count, _time(backlog.oldest_at))


class ListFailedEvents:
    """List the events that the stream refused."""

    def __init__(self, repository: OutboxRepository) -> None:
        self._repository = repository

    async def __call__(self, limit: int, *, only_parked: bool = False) -> list[FailedEvent]:
        """Return up to `limit` of them, oldest first."""
        return [_failed(each) for each in await self._repository.find_failed(limit, only_parked=only_parked)]


class RetryOutboxEvents:
    """Have events tried again at once, with fresh attempts."""

    def __init__(self, repository: OutboxRepository, clock: Clock) -> None:
        self._repository = repository
        self._clock = clock

    async def __call__(self, ids: Sequence[UUID]) -> int:
        """Retry these events, all or none, and return how many had failed.

        Raises: NotFound for an unknown one, InvalidRequest for one that is published.
        """
        async with self._repository.claim(range(PARTITIONS), wait=True) as claim:
            decided = await _decide(claim, ids, lambda _: RetryOutboxEvent(), self._clock.wall())
            await claim.retry(decided)
            return len(decided)

    async def all(self) -> int:
        """Retry all that are parked, and return how many."""
        count = 0
        while parked := await self._repository.find_failed(PAGE, only_parked=True):
            count += await self([each.event.id for each in parked])
        return count


class DiscardOutboxEvents:
    """Take events out of the outbox unpublished; their payloads stay in their histories."""

    def __init__(self, repository: OutboxRepository, clock: Clock) -> None:
        self._repository = repository
        self._clock = clock

    async def __call__(self, ids: Sequence[UUID], reason: str) -> int:
        """Discard these events, all or none, and return how many.

        Raises: NotFound for an unknown one, InvalidRequest for one that is published.
        """
        async with self._repository.claim(range(PARTITIONS), wait=True) as claim:
            decided = await _decide(
                claim, ids, lambda stored: DiscardOutboxEvent(reason, stored.payload), self._clock.wall()
            )
            await claim.discard(decided)
            return len(decided)


async def _decide(
    claim: OutboxClaim, ids: Sequence[UUID], command: Callable[[Stored], OutboxCommand], now: int
) -> list[Decided]:
    found = {stored.event.id: stored for stored in await claim.find(ids)}
    for id_ in ids:
        if id_ not in found:
            raise NotFound(
                f"The outbox has no event {id_}: it was never recorded, or was discarded, or was published "
                "long ago; check the id."
            )
    decided = [decide_on(stored, command(stored), now) for stored in found.values()]
    return [each for each in decided if each.changes]


def _failed(stored: Stored) -> FailedEvent:
    event = stored.event
    return FailedEvent(
        event.id,
        event.event_type,
        event.event_version,
        event.aggregate_type,
        event.aggregate_id,
        _EPOCH + timedelta(microseconds=event.occurred_at),
        event.status == "parked",
        event.publish_attempts,
        event.publish_error,
        _time(event.retry_at),
    )


def _time(at: int | None) -> datetime | None:
    return None if at is None else _EPOCH + timedelta(microseconds=at)
