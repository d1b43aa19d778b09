"""The inbox worker: delivers each message of a stream once to a handler (SDS-047 `InboxConsumer`).

The worker counts attempts in the inbox. With a limit on the server, a message whose worker is killed during
the last delivery would be neither redelivered nor dead-lettered (nats-server#7817). A message that has
reached `max_deliver` attempts is dead-lettered without calling the handler again.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from typing import Literal, NamedTuple

import msgspec

from postroom.application.inbox.delivery import InboxDelivery
from postroom.application.inbox.request import aggregate_key
from postroom.application.metrics import Progress
from postroom.application.outbox.events import CORRELATION_ID
from postroom.application.ports.event_log import Clock
from postroom.application.ports.source import Source, SourceMessage
from postroom.application.telemetry import logger
from postroom.application.threads import cancel_and_wait, wait_at_most
from postroom.application.tracing import PROCESS, context_of, correlate, tracer
from postroom.domain.errors import DuplicateInboxMessage, NotFound, PostroomError
from postroom.domain.inbox import (
    Acknowledge,
    DeliveryPolicy,
    Redeliver,
    RouteToDeadLetter,
    Settlement,
)
from postroom.domain.policy import backoff_ms

FETCH_WAIT_MS = 500
IDLE_MS = 100
"""How long a worker with `until_idle` waits for messages before it ends."""
PAUSE_SECONDS = 1.0
"""Pause after the source failed."""
EXTENSIONS_PER_ACK_WAIT = 3
BEHIND_MS = 50
"""Delay between the redelivery of a failed message and the redelivery of messages waiting for it."""

StreamPosition = tuple[int, ...]
"""Position of a message in its stream."""
DeliveryOutcome = Literal["processed", "duplicate", "dead_lettered", "failed", "postponed"]


class DeliveryResult(msgspec.Struct, frozen=True):
    """Outcome of a delivery.

    Arguments:
        redeliver_ms: delay of the next delivery; None if the message is settled.
    """

    outcome: DeliveryOutcome
    redeliver_ms: int | None = None


class InboxWorker:
    """Consumer of a source that delivers messages in parallel, but messages of one lane in order.

    A lane is an aggregate or a message id, so a duplicate waits for the first delivery. After a failure,
    later messages of the lane that this worker receives are postponed until the failed one is redelivered. To
    process a whole stream in strict order, set its consumer's `max_ack_pending` to 1.

    Arguments:
        concurrency: maximum number of messages in progress.
        ack_wait_ms: how long the source waits for a message to be settled.
    """

    def __init__(
        self,
        source: Source,
        delivery: InboxDelivery,
        clock: Clock,
        policy: DeliveryPolicy,
        *,
        concurrency: int,
        ack_wait_ms: int,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._source = source
        self._delivery = delivery
        self._clock = clock
        self._policy = policy
        self._concurrency = concurrency
        self._ack_wait_ms = ack_wait_ms
        self._jitter = jitter
        self._lanes: dict[str, _Work] = {}
        self._holds: dict[str, dict[StreamPosition, _Hold]] = {}
        self._in_progress: dict[int, SourceMessage] = {}
        self._tasks: set[asyncio.Task[bool]] = set()
        self._acks: list[SourceMessage] = []
        self._acked: asyncio.Future[None] | None = None
        self._has_finished = asyncio.Event()
        self._stopping = False
        self.counts: Counter[DeliveryOutcome] = Counter()
        """Deliveries since the worker started, by outcome."""
        self.progress = Progress()
        """Fetches from the source."""

    @property
    def in_progress(self) -> int:
        """Return the number of messages in progress."""
        return len(self._in_progress)

    async def run(self, stop: asyncio.Event, *, until_idle: bool = False) -> None:
        """Process messages until `stop` is set, then finish those in progress.

        Arguments:
            until_idle: return when no message is in progress and none arrives.

        Raises: NotFound when the consumer was deleted.
        """
        self._stopping = False
        extender = asyncio.create_task(self._extend_deadlines())
        try:
            while not stop.is_set():
                messages = await self._fetch(stop, IDLE_MS if until_idle else FETCH_WAIT_MS)
                # Redeliveries arrive in any order.
                for message in sorted(messages, key=lambda each: stream_position(each.sequence)):
                    self._start(message)
                if until_idle and not messages and not self._tasks:
                    break
        finally:
            self._stopping = True
            try:
                if self._tasks:
                    await asyncio.wait(self._tasks)
            finally:
                await cancel_and_wait(extender, *self._tasks)

    async def _fetch(self, stop: asyncio.Event, wait_ms: int) -> list[SourceMessage]:
        """Fetch messages when fewer than `concurrency` are in progress."""
        while len(self._tasks) >= self._concurrency:
            self._has_finished.clear()
            await self._has_finished.wait()
            if stop.is_set():
                return []
        try:
            messages = list(await self._source.fetch(self._concurrency - len(self._tasks), wait_ms))
        except NotFound:
            raise
        except PostroomError as error:
            self.progress.failed()
            logger().retry("inbox.source_failed", error=str(error))
            await wait_at_most(PAUSE_SECONDS, stop.wait())
            return []
        self.progress.succeeded()
        return messages

    def _start(self, message: SourceMessage) -> None:
        lanes = (
            lane_key(message) or f"sequence {message.sequence}",
            f"id {self._delivery.message_id(message)}",
        )
        ahead = [self._lanes[lane] for lane in lanes if lane in self._lanes]
        task = asyncio.create_task(self._work(message, lanes, ahead))
        self._lanes.update(dict.fromkeys(lanes, _Work(stream_position(message.sequence), task)))
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: "asyncio.Task[bool]") -> None:
        self._tasks.discard(task)
        self._has_finished.set()

    async def _work(self, message: SourceMessage, lanes: Iterable[str], ahead: Sequence["_Work"]) -> bool:
        """Deliver and settle a message after those ahead of it; return whether nothing waits for it."""
        corr_id = message.headers.get(CORRELATION_ID) or str(self._delivery.message_id(message))
        self._in_progress[id(message)] = message
        try:
            with correlate(corr_id):
                return await self._settle_in_order(message, lanes, ahead)
        finally:
            del self._in_progress[id(message)]
            for lane in lanes:
                if lane in self._lanes and self._lanes[lane].task is asyncio.current_task():
                    del self._lanes[lane]

    async def _settle_in_order(
        self, message: SourceMessage, lanes: Iterable[str], ahead: Sequence["_Work"]
    ) -> bool:
        result = DeliveryResult("postponed", 0)
        try:
            if ahead:
                await asyncio.wait([work.task for work in ahead])
            if not self._stopping or self._is_last(message):
                result = await self._deliver_in_order(message, lanes, ahead)
            await self._settle(message, result)
        except PostroomError as error:  # not settled, so it is delivered again
            logger().warning("inbox.settling_failed", sequence=message.sequence, error=str(error))
        except Exception:
            logger().exception("inbox.defect", subject=message.subject, sequence=message.sequence)
            self._hold(message, lanes, self._clock.uptime() // 1_000, self._ack_wait_ms)
        return result.redeliver_ms is None

    async def _deliver_in_order(
        self, message: SourceMessage, lanes: Iterable[str], before: Sequence["_Work"]
    ) -> DeliveryResult:
        """Deliver a message, or postpone it while an earlier one of its lanes awaits redelivery.

        Holds end with time, which may pass while the worker is paused. So a message is also postponed if the
        one before it was.
        """
        now = self._clock.uptime() // 1_000
        at = stream_position(message.sequence)
        for lane in lanes:
            self._forget(lane, now)
        ahead = [hold.until for lane in lanes for key, hold in self._holds.get(lane, {}).items() if key < at]
        is_behind = any(work.position < at and not work.is_settled for work in before)
        if (ahead or is_behind) and not self._is_last(message):
            result = DeliveryResult("postponed", max(min(ahead, default=now) - now, 0) + BEHIND_MS)
        else:
            result = await self._deliver(message)
            now = self._clock.uptime() // 1_000
        for lane in lanes:
            self._holds.get(lane, {}).pop(at, None)
        if result.redeliver_ms is not None:
            self._hold(message, lanes, now, result.redeliver_ms)
            for lane in list(self._holds):
                self._forget(lane, now)
        return result

    def _hold(self, message: SourceMessage, lanes: Iterable[str], now: int, redeliver_ms: int) -> None:
        """Have later messages of its lanes wait for the redelivery of a message."""
        until = now + redeliver_ms
        for lane in lanes:
            holds = self._holds.setdefault(lane, {})
            holds[stream_position(message.sequence)] = _Hold(until, until + self._ack_wait_ms)

    def _forget(self, lane: str, now: int) -> None:
        """Remove expired holds of a lane, and the lane if none remains."""
        holds = self._holds.get(lane, {})
        for key in [key for key, hold in holds.items() if hold.forget_at <= now]:
            del holds[key]
        if not holds:
            self._holds.pop(lane, None)

    async def _deliver(self, message: SourceMessage) -> DeliveryResult:
        try:
            settlement = await self._deliver_traced(message)
        except DuplicateInboxMessage as duplicate:
            logger().info("inbox.duplicate", sequence=message.sequence, reason=str(duplicate))
            return DeliveryResult("duplicate")
        except PostroomError as error:
            return await self._postpone(message, error)
        match settlement:
            case Acknowledge():
                return DeliveryResult("processed")
            case RouteToDeadLetter():
                return DeliveryResult("dead_lettered")
            case Redeliver():
                logger().warning(
                    "inbox.delivery_failed",
                    subject=message.subject,
                    sequence=message.sequence,
                    redeliver_ms=settlement.delay_ms,
                )
                return DeliveryResult("failed", settlement.delay_ms)

    async def _deliver_traced(self, message: SourceMessage) -> Settlement:
        id_, caller = str(self._delivery.message_id(message)), context_of(message.headers)
        with tracer().span(PROCESS, (message.subject,), message_id=id_, parent=caller) as span:
            settlement = await self._delivery.deliver(message)
            if not isinstance(settlement, Acknowledge):
                span.fail("handler_failed")
            return settlement

    async def _postpone(self, message: SourceMessage, error: PostroomError) -> DeliveryResult:
        """Request redelivery of a message that couldn't be delivered; dead-letter it on the last delivery."""
        if self._is_last(message):
            await self._delivery.dead_letter(message, error)
            return DeliveryResult("dead_lettered")
        delay_ms = backoff_ms(self._policy, message.delivered, self._jitter())
        logger().warning(
            "inbox.delivery_impossible",
            subject=message.subject,
            sequence=message.sequence,
            error=str(error),
            redeliver_ms=delay_ms,
        )
        return DeliveryResult("failed", delay_ms)

    def _is_last(self, message: SourceMessage) -> bool:
        """Return whether the server won't deliver the message again."""
        limit = self._policy.server_limit
        return limit is not None and message.delivered >= limit

    async def _settle(self, message: SourceMessage, result: DeliveryResult) -> None:
        self.counts[result.outcome] += 1
        if result.redeliver_ms is None:
            await self._ack(message)
        else:
            await self._source.nack([message], result.redeliver_ms)

    async def _ack(self, message: SourceMessage) -> None:
        """Ack a message together with all others that are settled in this turn of the event loop."""
        self._acks.append(message)
        if self._acked is None:
            self._acked = asyncio.create_task(self._ack_all(), context=Context())  # of no message
        await asyncio.shield(self._acked)

    async def _ack_all(self) -> None:
        messages, self._acks, self._acked = self._acks, [], None
        await self._source.ack(messages)

    async def _extend_deadlines(self) -> None:
        """Extend the deadlines of messages in progress while their handlers run."""
        while True:
            await asyncio.sleep(self._ack_wait_ms / EXTENSIONS_PER_ACK_WAIT / 1_000)
            try:
                await self._source.extend(list(self._in_progress.values()))
            except PostroomError as error:
                logger().retry("inbox.extend_failed", error=str(error))


class _Work(NamedTuple):
    """The delivery of a message at a position; its task returns whether nothing waits for it."""

    position: StreamPosition
    task: "asyncio.Task[bool]"

    @property
    def is_settled(self) -> bool:
        """Return whether the delivery ended, and the message will not be delivered again."""
        return self.task.done() and not self.task.cancelled() and self.task.result()


class _Hold(msgspec.Struct, frozen=True):
    """A failed message for which later messages of its lanes wait; times in ms of uptime.

    Arguments:
        until: when it is redelivered.
        forget_at: when to stop waiting, assuming that another worker received it.
    """

    until: int
    forget_at: int


def stream_position(sequence: str) -> StreamPosition:
    """Return the number or numbers of a sequence, for sorting by position in the stream."""
    if sequence.isdecimal():
        return (int(sequence),)
    return tuple(int(part) for part in sequence.split("-") if part.isdecimal())


def lane_key(message: SourceMessage) -> str:
    """Return the lane of a message: its aggregate, or else its sequence."""
    return aggregate_key(message) or f"sequence {message.sequence}"
