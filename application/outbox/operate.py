"""Queries on an outbox, and commands of operators on events that can't be published."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec

from postroom.application.outbox.decisions import decide_on
from postroom.application.ports.clock import Clock
from postroom.application.ports.outbox_repository import (
    PARTITIONS,
    Backlog,
    Decision,
    OutboxClaim,
    OutboxRepository,
    OutboxRow,
)
from postroom.domain.errors import NotFound
from postroom.domain.outbox import (
    MAX_ERROR_CHARS,
    DiscardOutboxEvent,
    OutboxCommand,
    OutboxEvent,
    RetryOutboxEvent,
)

PAGE = 100
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class OutboxBacklog(msgspec.Struct, frozen=True):
    """Backlog of an outbox (SDS-047 QRY-050): number of unpublished events, and when the oldest occurred."""

    context: str
    count: int
    oldest_at: datetime | None


class FailedEvent(msgspec.Struct, frozen=True):
    """An event that could not be published.

    Arguments:
        occurred_at: None if it is outside the years 1 to 9999.
        retry_at: None if the event is parked.
    """

    id: UUID
    event_type: str
    event_version: int
    aggregate_type: str
    aggregate_id: str
    occurred_at: datetime | None
    parked: bool
    attempts: int
    error: str | None
    retry_at: datetime | None


class GetOutboxBacklog:
    """The query for the number of unpublished events (SDS-047 QRY-050)."""

    def __init__(self, repository: OutboxRepository, context: str) -> None:
        self._repository = repository
        self._context = context

    async def __call__(self) -> OutboxBacklog:
        """Return the backlog of the context."""
        backlog: Backlog = await self._repository.backlog()
        return OutboxBacklog(self._context, backlog.count, _time(backlog.oldest_at))


class ListFailedEvents:
    """The query for the events that could not be published."""

    def __init__(self, repository: OutboxRepository) -> None:
        self._repository = repository

    async def __call__(self, limit: int, *, only_parked: bool = False) -> list[FailedEvent]:
        """Return up to `limit` events, oldest first."""
        return [
            _failed_event(each) for each in await self._repository.find_failed(limit, only_parked=only_parked)
        ]


class RetryOutboxEvents:
    """Command that makes events due at once, with their attempts reset."""

    def __init__(self, repository: OutboxRepository, clock: Clock) -> None:
        self._repository = repository
        self._clock = clock

    async def __call__(self, ids: Sequence[UUID]) -> int:
        """Retry events, all or none, and return how many of them had failed.

        Raises: NotFound for an unknown event, InvalidRequest for one that is published.
        """
        async with self._repository.claim(range(PARTITIONS), wait=True) as claim:
            decisions = await _decide(claim, ids, lambda _: RetryOutboxEvent(), self._clock.wall())
            await claim.retry(decisions)
            return len(decisions)

    async def all(self) -> int:
        """Retry all parked events and return their number."""
        count = 0
        while parked := await self._repository.find_failed(PAGE, only_parked=True):
            count += await self([event.id for event in parked])
        return count


class DiscardOutboxEvents:
    """Command that removes unpublished events from the outbox; their histories keep the payloads."""

    def __init__(self, repository: OutboxRepository, clock: Clock) -> None:
        self._repository = repository
        self._clock = clock

    async def __call__(self, ids: Sequence[UUID], reason: str) -> int:
        """Discard events, all or none, and return their number.

        An unreadable payload is lost, which is added to the reason in the event's history.

        Raises: NotFound for an unknown event, InvalidRequest for one that is published.
        """
        async with self._repository.claim(range(PARTITIONS), wait=True) as claim:
            decisions = await _decide(claim, ids, lambda row: _discard(row, reason), self._clock.wall())
            await claim.discard(decisions)
            return len(decisions)


def _discard(row: OutboxRow, reason: str) -> DiscardOutboxEvent:
    if row.payload is None:
        lost = f" (payload lost: {row.unreadable})"
        reason = reason[: MAX_ERROR_CHARS - len(lost)] + lost
    return DiscardOutboxEvent(reason, row.payload or b"")


async def _decide(
    claim: OutboxClaim, ids: Sequence[UUID], command: Callable[[OutboxRow], OutboxCommand], now: int
) -> list[Decision]:
    rows = {row.event.id: row for row in await claim.find(ids)}
    for id_ in ids:
        if id_ not in rows:
            raise NotFound(
                f"The outbox has no event {id_}: it was never recorded, was discarded, or was published and "
                "cleaned up; check the id."
            )
    decisions = [decide_on(row, command(row), now) for row in rows.values()]
    return [decision for decision in decisions if decision.changes]


def _failed_event(event: OutboxEvent) -> FailedEvent:
    return FailedEvent(
        event.id,
        event.event_type,
        event.event_version,
        event.aggregate_type,
        event.aggregate_id,
        _time(event.occurred_at),
        event.status == "parked",
        event.publish_attempts,
        event.publish_error,
        _time(event.retry_at),
    )


def _time(at: int | None) -> datetime | None:
    return None if at is None else _EPOCH + timedelta(microseconds=at)
