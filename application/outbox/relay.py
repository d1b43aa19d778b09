"""The relay: publishes what stands in the outbox, and keeps the order of every aggregate (SDS-047 CMD-050).

Aggregates are spread over partitions. A relay claims some partitions, publishes a batch of their events,
notes what became of them, and lets go. Events of one aggregate go one after the other, each when the one
before is stored: sent together, a first one that failed and a second one that didn't would change places.

There is no cursor: every look at the outbox asks for whatever is unpublished, so that an event whose
transaction took long is found like any other.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from postroom.application.background import end
from postroom.application.outbox.decisions import decide_on
from postroom.application.outbox.message import headers_of
from postroom.application.ports.clock import Clock
from postroom.application.ports.hints import Hints
from postroom.application.ports.outbox_repository import PARTITIONS, OutboxClaim, OutboxRepository, Stored
from postroom.application.ports.publisher import Publisher
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.domain.outbox import MS, MarkFailed, MarkPublished, PublishPolicy
from postroom.domain.subject import EventSubject

PARTITIONS_AT_ONCE = 4
"""A relay leaves the others to those who run beside it."""
PAUSE_BASE_MS, PAUSE_MAX_MS = 250, 15_000
"""Between attempts to reach a database or a stream that is down."""
FRUITLESS_PAUSE = 4
"""How many times longer than a look that found nothing the pause after it is at least."""


class RelaySettings(msgspec.Struct, frozen=True):
    """Say how a relay works; times in ms.

    Arguments:
        batch: events published under one claim, at most.
        concurrency: aggregates whose events are published at the same time.
        poll_ms: how often to look for events when no hint comes.
        claim_ms: for how long a claim lasts; publishing stops when two thirds of it are over.
        policy: how often and how soon a refused event is tried again.
    """

    batch: int = 500
    concurrency: int = 256
    poll_ms: int = 500
    claim_ms: int = 30_000
    policy: PublishPolicy = PublishPolicy()


class Relayed(msgspec.Struct):
    """Count what became of events: published, refused and to be tried again, or refused for the last time."""

    published: int = 0
    failed: int = 0
    parked: int = 0


class OutboxRelay:
    """Publish the events of an outbox, as one of any number of relays.

    Arguments:
        context: the bounded context, first word of every subject.
        hints: wake it before the next poll; None only polls.
        random: draws numbers in [0, 1).
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
        settings: RelaySettings | None = None,
    ) -> None:
        self._repository = repository
        self._publisher = publisher
        self._clock = clock
        self._random = random
        self._context = context
        self._hints = hints
        self._settings = settings or RelaySettings()
        self._stopping = asyncio.Event()
        self.relayed = Relayed()

    def stop(self) -> None:
        """Let `run` return once the batch under way is noted."""
        self._stopping.set()

    async def run(self) -> None:
        """Relay events until told to stop, through outages of the database and of the stream."""
        failures = 0
        while not self._stopping.is_set():
            began = self._clock.uptime()
            try:
                found = await self.relay_once()
            except Unavailable as error:
                failures += 1
                pause = self._random() * min(PAUSE_MAX_MS, PAUSE_BASE_MS << min(failures, 10))
                logger().warning("outbox.unavailable", error=str(error), pause_ms=int(pause))
                await self._pause(pause, hinted=False)
                continue
            failures = 0
            if not found:
                # Looking takes long where very many events are held back: then it is done less often.
                took_ms = (self._clock.uptime() - began) / MS
                # Relays that poll at different moments find an event sooner than those that poll together.
                jitter = 0.75 + self._random() / 2
                await self._pause(
                    max(self._settings.poll_ms, FRUITLESS_PAUSE * took_ms) * jitter, hinted=True
                )

    async def relay_once(self) -> int:
        """Publish one batch from every partition that no other relay has claimed, and count what was found.

        Raises: Unavailable when the database or the stream can't be used; no attempt was counted for that.
        """
        first = int(self._random() * PARTITIONS)
        partitions = [(first + n) % PARTITIONS for n in range(PARTITIONS)]
        found = 0
        for n in range(0, PARTITIONS, PARTITIONS_AT_ONCE):
            if not self._stopping.is_set():
                found += await self._relay(partitions[n : n + PARTITIONS_AT_ONCE])
        return found

    async def _relay(self, partitions: Sequence[int]) -> int:
        async with self._repository.claim(partitions) as claim:
            if not claim.partitions:
                return 0
            deadline = self._clock.uptime() + self._settings.claim_ms * MS * 2 // 3
            stored = await claim.find_unpublished(self._clock.wall(), self._settings.batch)
            batch = _Batch(self._publisher, self._context, lambda: self._clock.uptime() < deadline)
            if stored:
                await batch.publish(stored, self._settings.concurrency)
                await self._note(claim, batch)
        # Only now: what was stored before the outage is noted, and the claim is over.
        if batch.outage is not None:
            raise batch.outage
        return len(stored)

    async def _note(self, claim: OutboxClaim, batch: "_Batch") -> None:
        """Write down what became of a batch, in the claim's transaction."""
        now, policy = self._clock.wall(), self._settings.policy
        published = [decide_on(stored, MarkPublished(subject), now) for stored, subject in batch.stored]
        failed = [
            decide_on(stored, MarkFailed(str(error), policy, self._random()), now)
            for stored, error in batch.refused
        ]
        await claim.mark_published(published)
        await claim.increment_attempts(failed)
        parked = [event for event, _ in failed if event.status == "parked"]
        for event in parked:
            logger().error(
                "outbox.parked",
                outbox_id=str(event.id),
                event_type=event.event_type,
                error=event.publish_error,
            )
        self.relayed.published += len(published)
        self.relayed.failed += len(failed) - len(parked)
        self.relayed.parked += len(parked)

    async def _pause(self, ms: float, *, hinted: bool) -> None:
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(self._stopping.wait())]
        if hinted and self._hints is not None:
            waits.append(asyncio.create_task(self._hints.wait()))
        try:
            await asyncio.wait(waits, timeout=ms / 1_000, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(*waits)


class _Batch:
    """One batch on its way to the stream, and what became of it.

    Arguments:
        may_go_on: tells whether the claim lasts long enough to publish one more event.
    """

    def __init__(self, publisher: Publisher, context: str, may_go_on: Callable[[], bool]) -> None:
        self._publisher = publisher
        self._context = context
        self._may_go_on = may_go_on
        self._started = 0
        self._last_stored = 0
        self._silent: list[tuple[int, Stored, Unavailable]] = []
        self.stored: list[tuple[Stored, EventSubject]] = []
        self.refused: list[tuple[Stored, Exception]] = []
        self.outage: Unavailable | None = None

    async def publish(self, events: Sequence[Stored], concurrency: int) -> None:
        """Publish events: of one aggregate one after the other, of several at the same time."""
        lanes: dict[tuple[str, str], list[Stored]] = {}
        for each in events:
            lanes.setdefault((each.event.aggregate_type, each.event.aggregate_id), []).append(each)
        waiting = iter(lanes.values())
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(lanes))):
                workers.create_task(self._work(waiting))
        # A stream that stored what was sent later is there: then it is the event that it doesn't answer to.
        for start, stored, error in self._silent:
            if start < self._last_stored:
                self.refused.append((stored, error))
            else:
                self.outage = error

    async def _work(self, lanes: Iterator[list[Stored]]) -> None:
        for lane in lanes:
            for stored in lane:
                if self._silent or not self._may_go_on():
                    return
                if not await self._publish_one(stored):
                    break  # the later ones of this aggregate wait for it

    async def _publish_one(self, stored: Stored) -> bool:
        event = stored.event
        self._started += 1
        start = self._started
        try:
            subject = _subject(self._context, event.event_type, event.event_version)
            await self._publisher.publish(subject.value, stored.payload, headers_of(event))
        except InvalidRequest as error:
            self.refused.append((stored, error))
            return False
        except Unavailable as error:
            self._silent.append((start, stored, error))
            return False
        self._last_stored = max(self._last_stored, start)
        self.stored.append((stored, subject))
        return True


@lru_cache(maxsize=4_096)
def _subject(context: str, event_type: str, event_version: int) -> EventSubject:
    return EventSubject(context, event_type, event_version)
