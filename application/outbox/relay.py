"""The relay: publishes the events of an outbox in the order of each aggregate (SDS-047 CMD-050).

Aggregates are hashed to partitions. A relay claims some partitions, publishes a batch of their events,
records the results, and releases the claim. Events of one aggregate are published one at a time: with several
in flight, the next could be stored although one before it failed.

There is no cursor: every poll selects all unpublished events, so an event whose transaction commits late is
published like any other.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from postroom.application.background import cancel_and_wait
from postroom.application.metrics import count_label
from postroom.application.monitor import Progress
from postroom.application.outbox.decisions import decide_on
from postroom.application.outbox.formats import MessageFormat, PostroomFormat
from postroom.application.outbox.publish_batch import PublishBatch, correlation_of
from postroom.application.outbox.route import Route
from postroom.application.outbox.settings import OutboxSettings
from postroom.application.ports.clock import Clock
from postroom.application.ports.hints import Hints
from postroom.application.ports.outbox_repository import PARTITIONS, OutboxClaim, OutboxRepository
from postroom.application.ports.publisher import Publisher
from postroom.application.telemetry import logger
from postroom.domain.errors import Unavailable
from postroom.domain.outbox import MS, MarkFailed, MarkPublished, ParkOutboxEvent
from postroom.domain.policy import OutageBackoff, backoff_ms

PARTITIONS_AT_ONCE = 4
"""Partitions claimed together; other relays can claim the rest."""
BACKOFF = OutageBackoff(250, 15_000)
"""Backoff while the database or the target is down."""
MAX_TYPES = 100
IDLE_PAUSE_FACTOR = 4
"""The pause after a poll without events is at least this many times the poll's duration."""


class RelayCounts(msgspec.Struct):
    """Numbers of events that were published, that failed and will be retried, and that were parked."""

    published: int = 0
    failed: int = 0
    parked: int = 0


class OutboxRelay:
    """Publisher of the events of an outbox; any number of relays may run in parallel.

    Arguments:
        random: returns uniform random numbers in [0, 1).
        context: the bounded context, first token of every subject.
        hints: wake-ups between polls; None only polls.
        route: where events are published; None takes the subjects of SDS-047.
        format_: the form of their messages; None takes that of Postroom.

    Raises: InvalidRequest if the context is no token of a subject.
    """

    def __init__(
        self,
        repository: OutboxRepository,
        publisher: Publisher,
        clock: Clock,
        random: Callable[[], float],
        context: str,
        *,
        hints: Hints | None = None,
        settings: OutboxSettings | None = None,
        route: Route | None = None,
        format_: MessageFormat | None = None,
    ) -> None:
        self._repository = repository
        self._publisher = publisher
        self._clock = clock
        self._random = random
        self._route = route or Route(context)
        self._format = format_ or PostroomFormat()
        self._hints = hints
        self._settings = settings or OutboxSettings()
        self._backoff = BACKOFF.within(self._settings.backoff_max_ms)
        self._stopping = asyncio.Event()
        self._outage: Unavailable | None = None
        self.counts = RelayCounts()
        self.published_by_type: Counter[str] = Counter()
        """Events published by type; the types after the first hundred are counted together."""
        self.progress = Progress()

    def stop(self) -> None:
        """Make `run` return after the current batch is recorded."""
        self._stopping.set()

    async def run(self) -> None:
        """Relay events until stopped, through outages of the database and of the target."""
        failures = 0
        while not self._stopping.is_set():
            start = self._clock.uptime()
            try:
                count = await self.relay_once()
            except Unavailable as error:
                failures += 1
                self.progress.failed()
                pause = backoff_ms(self._backoff, failures, self._random())
                logger().warning("outbox.unavailable", error=str(error), pause_ms=pause)
                await self._pause(pause, hinted=False)
                continue
            failures = 0
            self.progress.succeeded()
            if not count:
                # Polling is expensive while very many events are held back.
                poll_duration_ms = (self._clock.uptime() - start) / MS
                # Relays that poll at different times find events sooner than relays that poll in step.
                jitter = 0.75 + self._random() / 2
                await self._pause(
                    max(self._settings.poll_ms, IDLE_PAUSE_FACTOR * poll_duration_ms) * jitter, hinted=True
                )

    async def relay_once(self) -> int:
        """Publish one batch from every partition that is not claimed; return the number of events.

        Raises: Unavailable when the database can't be used, or when the target did not confirm an event and
            confirmed none that was sent later; no attempts of such events are counted.
        """
        first = int(self._random() * PARTITIONS)
        partitions = [(first + n) % PARTITIONS for n in range(PARTITIONS)]
        count, self._outage = 0, None
        for n in range(0, PARTITIONS, PARTITIONS_AT_ONCE):
            if not self._stopping.is_set():
                count += await self._relay(partitions[n : n + PARTITIONS_AT_ONCE])
        if self._outage is not None:
            raise self._outage
        return count

    async def _relay(self, partitions: Sequence[int]) -> int:
        async with self._repository.claim(partitions) as claim:
            if not claim.partitions:
                return 0
            deadline = self._clock.uptime() + self._settings.claim_ms * MS * 2 // 3
            rows = await claim.find_unpublished(self._clock.wall(), self._settings.batch)
            batch = PublishBatch(
                self._publisher, self._route, self._format, lambda: self._clock.uptime() < deadline
            )
            count = published = 0
            while rows:
                await batch.publish(rows, self._settings.concurrency)
                await self._record(claim, batch)
                count += len(rows)
                published += len(batch.published)
                if batch.outage is None or self._stopping.is_set() or self._clock.uptime() >= deadline:
                    break
                # The batch may be full of events for one stream without a leader: others can be published.
                rows = await claim.find_besides(self._clock.wall(), self._settings.batch, batch.silent)
        # Told after the commit, so that events stored before the outage are marked published. It was none if
        # the target stored other events afterwards.
        if batch.outage is not None or published:
            self._outage = batch.outage
        return count

    async def _record(self, claim: OutboxClaim, batch: PublishBatch) -> None:
        """Record the results of a batch in the claim's transaction."""
        now, policy = self._clock.wall(), self._settings.policy
        published = [decide_on(row, MarkPublished(subject), now) for row, subject in batch.published]
        failed = [
            decide_on(row, MarkFailed(error, policy, self._random()), now) for row, error in batch.refused
        ]
        failed += [decide_on(row, ParkOutboxEvent(reason), now) for row, reason in batch.unreadable]
        await claim.mark_published(published)
        await claim.increment_attempts(failed)
        parked = [event for event, _ in failed if event.status == "parked"]
        for event in parked:
            logger().error(
                "outbox.parked",
                outbox_id=str(event.id),
                corr_id=correlation_of(event),
                event_type=event.event_type,
                error=event.publish_error,
            )
        self.counts.published += len(published)
        for row, _ in batch.published:
            count_label(self.published_by_type, row.event.event_type, MAX_TYPES)
        self.counts.failed += len(failed) - len(parked)
        self.counts.parked += len(parked)

    async def _pause(self, ms: float, *, hinted: bool) -> None:
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(self._stopping.wait())]
        if hinted and self._hints is not None:
            waits.append(asyncio.create_task(self._hints.wait()))
        try:
            await asyncio.wait(waits, timeout=ms / 1_000, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(*waits)
