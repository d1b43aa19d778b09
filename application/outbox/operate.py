"""Queries on an outbox, the monitor of its relay, and commands of operators on its failed events."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

import msgspec

from postroom.application.messaging import BacklogGauges, backlog_monitor, by_event_type
from postroom.application.metrics import Metric, Monitor
from postroom.application.outbox.capture import NOT_READ, held_form
from postroom.application.outbox.events import decide_on
from postroom.application.outbox.relay import OutboxRelay
from postroom.application.ports.event_log import Clock
from postroom.application.ports.outbox import (
    PARTITIONS,
    Backlog,
    Decision,
    OutboxClaim,
    OutboxRepository,
    OutboxRow,
    ReadRow,
)
from postroom.application.text import pluralize
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.outbox import (
    MAX_ERROR_CHARS,
    DiscardOutboxEvent,
    OutboxCommand,
    OutboxEvent,
    ReadOutboxRow,
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
    """Command that makes events due at once, with their attempts reset.

    Arguments:
        read_row: reads the rows that a capture could not read; None refuses them.
    """

    def __init__(self, repository: OutboxRepository, clock: Clock, read_row: ReadRow | None = None) -> None:
        self._repository = repository
        self._clock = clock
        self._read_row = read_row

    async def __call__(self, ids: Sequence[UUID]) -> int:
        """Retry events, all or none, and return how many of them had failed.

        Raises: NotFound for an unknown event, InvalidRequest for one that is published and for a held row
            that still can't be read.
        """
        count, refusals = await self._retry(ids)
        for refusal in refusals.values():
            raise refusal
        return count

    async def all(self) -> int:
        """Retry all parked events and return their number.

        Raises: InvalidRequest, after the others are retried, if there are held rows that can't be read.
        """
        count = 0
        refused: dict[UUID, InvalidRequest] = {}
        while parked := await self._find_parked(refused):
            retried, refusals = await self._retry(parked, is_partial=True)
            count += retried
            refused |= refusals
        for refusal in refused.values():
            raise InvalidRequest(
                f"{pluralize(count, 'event')} will be retried, and {len(refused):,} stay parked. {refusal}"
            )
        return count

    async def _find_parked(self, refused: Collection[UUID]) -> list[UUID]:
        parked = await self._repository.find_failed(PAGE + len(refused), only_parked=True)
        return [event.id for event in parked if event.id not in refused]

    async def _retry(
        self, ids: Sequence[UUID], *, is_partial: bool = False
    ) -> tuple[int, dict[UUID, InvalidRequest]]:
        """Retry events; return how many, and why rows can't be: then none is retried, unless `is_partial`."""
        retried: list[Decision] = []
        read: list[tuple[Decision, bytes]] = []
        refused: dict[UUID, InvalidRequest] = {}
        async with self._repository.claim(range(PARTITIONS), wait=True) as claim:
            now = self._clock.wall()
            for row in await _find(claim, ids):
                try:
                    if (held := self._read(row)) is None:
                        retried.append(decide_on(row, RetryOutboxEvent(), now))
                    else:
                        read.append((decide_on(row, ReadOutboxRow(held[0]), now), held[1]))
                except InvalidRequest as error:
                    refused[row.event.id] = error
            retried = [decision for decision in retried if decision.changes]
            if refused and not is_partial:
                return 0, refused
            await claim.retry(retried)
            await claim.replace(read)
        return len(retried) + len(read), refused

    def _read(self, row: OutboxRow) -> tuple[OutboxEvent, bytes] | None:
        """Return the event that is read from a held row, with its JSON payload; None for any other event.

        Raises: InvalidRequest if the row still can't be read.
        """
        event = row.event
        if not event.is_row:
            if event.status == "parked" and (event.publish_error or "").startswith(NOT_READ):
                raise InvalidRequest(
                    f"Outbox event {event.id} is a row that an earlier version parked without the types of "
                    "its columns, so it can't be read again: insert a corrected row into the captured table "
                    "(the payload of this event has the values), and discard this event."
                )
            return None
        if self._read_row is None or row.payload is None:
            raise InvalidRequest(
                f"Outbox event {event.id} is a row of a captured table that could not be read: retry it with "
                "the settings file that has its [capture]."
            )
        try:
            read = self._read_row(row.payload)
        except InvalidRequest as error:
            raise InvalidRequest(f"Outbox event {event.id} can't be retried. {error}") from None
        if read.unreadable is not None:
            raise InvalidRequest(
                f"Outbox event {event.id} still can't be published: {read.unreadable.rstrip('.')}. Correct "
                "[capture.columns] and retry it, or insert a corrected row and discard it."
            )
        return held_form(read)


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
    decisions = [decide_on(row, command(row), now) for row in await _find(claim, ids)]
    return [decision for decision in decisions if decision.changes]


async def _find(claim: OutboxClaim, ids: Sequence[UUID]) -> list[OutboxRow]:
    rows = {row.event.id: row for row in await claim.find(ids)}
    for id_ in ids:
        if id_ not in rows:
            raise NotFound(
                f"The outbox has no event {id_}: it was never recorded, was discarded, or was published and "
                "cleaned up; check the id."
            )
    return list(rows.values())


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


_GAUGES: Final = BacklogGauges(
    "postroom_outbox", "Unpublished events.", "Age of the oldest unpublished event; 0 without one."
)


def relay_monitor(
    relay: OutboxRelay,
    context: str,
    get_backlog: Callable[[], Awaitable[Backlog]],
    wall: Callable[[], int],
    stream_metrics: Callable[[], Sequence[Metric]],
    is_connected: Callable[[], bool],
) -> Monitor:
    """Return the monitor of a relay.

    Arguments:
        get_backlog: counts the unpublished events, over a connection of its own.
        wall: the wall clock, µs.
        stream_metrics: metrics of the connection to the stream.
        is_connected: returns whether the stream can be reached.
    """

    def collect_counts(labels: dict[str, str]) -> list[Metric]:
        counts = relay.counts
        return [
            by_event_type(
                "postroom_outbox_published",
                "Events published, by event type.",
                labels,
                relay.published_by_type,
            ),
            Metric(
                "postroom_outbox_failed",
                "counter",
                "Attempts to publish that failed and are repeated.",
                [(labels, counts.failed)],
            ),
            Metric("postroom_outbox_parked", "counter", "Events set aside.", [(labels, counts.parked)]),
            *stream_metrics(),
        ]

    return backlog_monitor(
        context, collect_counts, _GAUGES, get_backlog, wall, is_connected, ("relay", relay.progress)
    )
