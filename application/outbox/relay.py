"""Relay of an outbox: publishes batches in the order of each aggregate (SDS-047 CMD-050)."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from postroom.application.metrics import Progress, count_label
from postroom.application.outbox.events import decide_on
from postroom.application.outbox.formats import EventRoute, FormatName, MessageFormat, PostroomFormat
from postroom.application.ports.event_log import Clock, Hints
from postroom.application.ports.outbox import (
    PARTITIONS,
    Kind,
    NotStored,
    OutboxClaim,
    OutboxRepository,
    OutboxRow,
    Publisher,
)
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import cancel_and_wait
from postroom.application.tracing import PUBLISH, correlate, outgoing_headers, read_context, tracer
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.domain.outbox import MS, MarkFailed, MarkPublished, OutboxEvent, ParkOutboxEvent, PublishPolicy
from postroom.domain.policy import DAY_MS, SECOND_MS, OutageBackoff, backoff_ms


class PublishBatch:
    """Events of one claim, in one or more batches, and the results of publishing the last batch.

    Arguments:
        has_time: returns whether the right to publish lasts long enough for one more event.
    """

    def __init__(
        self, publisher: Publisher, route: EventRoute, format_: MessageFormat, has_time: Callable[[], bool]
    ) -> None:
        self._publisher = publisher
        self._route = route
        self._format = format_
        self._has_time = has_time
        self._started = 0
        self._last_published = 0
        self._unanswered: list[tuple[int, OutboxRow, Unavailable]] = []
        self.silent: set[Kind] = set()
        """Kinds of the events that the target did not confirm; no more of them are published."""
        self.published: list[tuple[OutboxRow, str]] = []
        self.refused: list[tuple[OutboxRow, str]] = []
        self.unreadable: list[tuple[OutboxRow, str]] = []
        self.outage: Unavailable | None = None

    async def publish(self, rows: Sequence[OutboxRow], concurrency: int) -> None:
        """Publish events: sequentially within an aggregate, up to `concurrency` aggregates in parallel."""
        self.published, self.refused, self.unreadable = [], [], []
        lanes: dict[tuple[str, str], list[OutboxRow]] = {}
        for row in rows:
            lanes.setdefault((row.event.aggregate_type, row.event.aggregate_id), []).append(row)
        waiting = iter(lanes.values())
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(lanes))):
                workers.create_task(self._work(waiting))
        # If the target stored an event sent later, it is up, and the missing answer is due to this event.
        unanswered, self._unanswered, self.outage = self._unanswered, [], None
        for start, row, error in unanswered:
            if start < self._last_published:
                self.refused.append((row, str(error)))
            else:
                self._unanswered.append((start, row, error))
                self.outage = error

    async def _work(self, lanes: Iterator[list[OutboxRow]]) -> None:
        for lane in lanes:
            for row in lane:
                if not self._has_time():
                    return
                if _kind(row.event) in self.silent:
                    break
                with correlate(correlation_of(row.event)):
                    is_published = await self._publish_one(row)
                if not is_published:
                    break  # later events of this aggregate wait for it

    async def _publish_one(self, row: OutboxRow) -> bool:
        event = row.event
        if row.unreadable is not None or row.payload is None:
            reason = row.unreadable or "its payload can't be read"
            self.unreadable.append((row, f"The event can't be published: {reason}. Correct or discard it."))
            return False
        self._started += 1
        start = self._started
        try:
            subject = self._route.name_of(event)
            parent = read_context(event.traceparent, event.tracestate, event.baggage)
            with tracer().span(PUBLISH, (subject,), message_id=str(event.id), parent=parent):
                message = self._format.write(event, row.payload)
                headers = message.headers | outgoing_headers()
                await self._publisher.publish(subject, message.payload, headers)
        except (InvalidRequest, NotStored) as error:
            self.refused.append((row, str(error)))
            return False
        except Unavailable as error:
            self._unanswered.append((start, row, error))
            self.silent.add(_kind(event))
            return False
        except Exception as error:  # one event's defect must not stop the others
            logger().exception("outbox.defect", outbox_id=str(event.id))
            self.refused.append((row, summarize(error)))
            return False
        self._last_published = max(self._last_published, start)
        self.published.append((row, subject))
        return True


def _kind(event: OutboxEvent) -> Kind:
    return Kind(event.aggregate_type, event.event_type, event.event_version)


def correlation_of(event: OutboxEvent) -> str:
    """Return the correlation id of an event, or else its id, for logs."""
    return event.correlation.correlation_id or str(event.id)


class OutboxSettings(msgspec.Struct, frozen=True):
    """Configuration of an outbox: `[outbox]` of the settings file; times in ms.

    Arguments:
        to: URL of the target of `postroom outbox relay`; None uses the URL of `[nats]`.
        topic: template of subject, topic or routing key (`EventRoute`); None uses the default of the target.
        exchange: exchange of RabbitMQ; empty for the default exchange, whose routing keys are queue names.
        batch: maximum number of events published under one claim.
        concurrency: maximum number of aggregates published in parallel.
        poll_ms: poll interval when no hint arrives.
        claim_ms: duration of a claim; publishing stops after two thirds of it, and a publish may take 5 s.
        max_attempts: refusals after which an event is parked.
        backoff_base_ms, backoff_max_ms: bounds of the exponential backoff, which has full jitter.
        hints: listen for notifications of new events.
        retention_ms: age at which published events are deleted.
        cleanup_every_ms: interval of cleanups by a relay; 0 leaves them to `postroom outbox cleanup`.
        keep_history: keep the histories of deleted events in `aggregate_events`.
        format: the form in which events are published.
        source: `source` of events that are published as CloudEvents; empty for `/` and the context.
    """

    batch: Annotated[int, Meta(ge=1, le=10_000)] = 500
    concurrency: Annotated[int, Meta(ge=1)] = 256
    poll_ms: Annotated[int, Meta(ge=10)] = 500
    claim_ms: Annotated[int, Meta(ge=20_000)] = 30_000
    max_attempts: Annotated[int, Meta(ge=1)] = 20
    backoff_base_ms: Annotated[int, Meta(ge=1)] = SECOND_MS
    backoff_max_ms: Annotated[int, Meta(ge=1)] = 300 * SECOND_MS
    hints: bool = True
    retention_ms: Annotated[int, Meta(ge=0)] = 7 * DAY_MS
    cleanup_every_ms: Annotated[int, Meta(ge=0)] = 600 * SECOND_MS
    keep_history: bool = False
    to: str | None = None
    topic: str | None = None
    exchange: str = ""
    format: FormatName = "postroom"
    source: str = ""

    @property
    def policy(self) -> PublishPolicy:
        """Return the policy for retries of refused events."""
        return PublishPolicy(self.max_attempts, self.backoff_base_ms, self.backoff_max_ms)


PARTITIONS_AT_ONCE = 4
"""Partitions claimed together; other relays can claim the rest."""
BACKOFF = OutageBackoff(250, 15_000)
"""Backoff while the database or the target is down."""
MAX_TYPES = 100
QUIET_MS, LOST_MS = 2_000, 15_000
"""Time without an event after which a relay asks for a hint of the next one, and its pause then."""
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
        second: the same outbox over another connection; a relay that is behind publishes two batches at once.
        hints: wake-ups between polls; None only polls.
        route: where events are published; None takes the subjects of SDS-047.
        format_: the form of their messages; None takes Postroom's.

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
        second: OutboxRepository | None = None,
        hints: Hints | None = None,
        settings: OutboxSettings | None = None,
        route: EventRoute | None = None,
        format_: MessageFormat | None = None,
    ) -> None:
        self._repository = repository
        self._publisher = publisher
        self._clock = clock
        self._random = random
        self._route = route or EventRoute(context)
        self._format = format_ or PostroomFormat()
        self._hints = hints
        self._settings = settings or OutboxSettings()
        self._second = second if self._settings.concurrency > 1 else None
        self._is_behind = False
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
        failures, found_at = 0, self._clock.uptime()
        while not self._stopping.is_set():
            start = self._clock.uptime()
            try:
                count = await self.relay_once()
                is_quiet = not count and start - found_at >= QUIET_MS * MS
                watched_ms = await self._watched_ms() if is_quiet else 0
            except Unavailable as error:
                failures += 1
                self.progress.failed()
                pause = backoff_ms(self._backoff, failures, self._random())
                logger().retry("outbox.unavailable", error=str(error), pause_ms=pause)
                await self._pause(pause, hinted=False)
                continue
            failures = 0
            self.progress.succeeded()
            if count:
                found_at = start
            else:
                # Polling is expensive while very many events are held back.
                poll_duration_ms = (self._clock.uptime() - start) / MS
                # Relays that poll at different times find events sooner than relays that poll in step.
                jitter = 0.75 + self._random() / 2
                pause_ms = max(self._settings.poll_ms, IDLE_PAUSE_FACTOR * poll_duration_ms) * jitter
                await self._pause(max(pause_ms, watched_ms), hinted=True)

    async def _watched_ms(self) -> float:
        """Return how long the relay need not poll: hints announce new events, and no other event is due."""
        if self._hints is None or not self._hints.watch():
            return 0
        due = await self._repository.next_retry()
        return LOST_MS if due is None else min(LOST_MS, (due - self._clock.wall()) / MS)

    async def relay_once(self) -> int:
        """Publish one batch from every partition that is not claimed; return the number of events.

        Raises: Unavailable when the database can't be used, or when the target did not confirm an event and
            confirmed none that was sent later; no attempts of such events are counted.
        """
        first = int(self._random() * PARTITIONS)
        partitions = [(first + n) % PARTITIONS for n in range(PARTITIONS)]
        groups = (partitions[n : n + PARTITIONS_AT_ONCE] for n in range(0, PARTITIONS, PARTITIONS_AT_ONCE))
        self._outage = None
        repositories = [self._repository]
        if self._second is not None and self._is_behind:
            repositories.append(self._second)
        concurrency = self._settings.concurrency // len(repositories)

        count = 0

        async def relay_groups(repository: OutboxRepository) -> None:
            nonlocal count
            for group in groups:
                relayed = await self._relay(repository, group, concurrency)
                count += relayed

        for error in await asyncio.gather(*map(relay_groups, repositories), return_exceptions=True):
            if error is not None:
                raise error
        self._is_behind = count >= self._settings.batch
        if self._outage is not None:
            raise self._outage
        return count

    async def _relay(self, repository: OutboxRepository, partitions: Sequence[int], concurrency: int) -> int:
        if self._stopping.is_set():
            return 0
        async with repository.claim(partitions) as claim:
            if not claim.partitions:
                return 0
            deadline = self._clock.uptime() + self._settings.claim_ms * MS * 2 // 3
            rows = await claim.find_unpublished(self._clock.wall(), self._settings.batch)
            batch = PublishBatch(
                self._publisher, self._route, self._format, lambda: self._clock.uptime() < deadline
            )
            count = published = 0
            while rows:
                await batch.publish(rows, concurrency)
                await self._record(claim, batch)
                count += len(rows)
                published += len(batch.published)
                if batch.outage is None or self._stopping.is_set() or self._clock.uptime() >= deadline:
                    break
                # The batch may be full of events for one stream without a leader: others can be published.
                rows = await claim.find_besides(self._clock.wall(), self._settings.batch, batch.silent)
        # Raised after the commit, so that events stored before the outage are marked published. It was no
        # outage if the target stored other events afterwards.
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
