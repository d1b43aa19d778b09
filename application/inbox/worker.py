"""The inbox worker: takes messages from a stream and has each dealt with once (SDS-047 `InboxConsumer`).

The worker counts the attempts itself, in the inbox, and lets no server count them: a server that reaches its
limit stops delivering, and a message whose worker was killed during the last delivery would then be in no
queue and no dead letter (nats-server#7817). A message that comes once more than it may is dead-lettered
without being tried.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Literal
from uuid import UUID

import msgspec

from postroom.application.background import end
from postroom.application.inbox.dead_letters import DeadLetters
from postroom.application.inbox.request import Unreadable, inbox_id, read_request
from postroom.application.outbox.message import AGGREGATE_ID, AGGREGATE_TYPE, MESSAGE_ID
from postroom.application.ports.clock import Clock
from postroom.application.ports.event_handler import EventHandler
from postroom.application.ports.inbox_repository import InboxRepository
from postroom.application.ports.source import Source, SourceMessage
from postroom.application.telemetry import logger
from postroom.domain.errors import DuplicateInboxMessage, NotFound, PostroomError
from postroom.domain.inbox import (
    Acknowledge,
    DeadLetter,
    DeliveryPolicy,
    HandlerResult,
    InboxMessage,
    Redeliver,
    Settlement,
    settle,
    spent,
)
from postroom.domain.policy import backoff_ms

FETCH_WAIT_MS = 500
IDLE_MS = 100
"""How long nothing must come until a worker that ends when idle does."""
PAUSE_SECONDS = 1.0
"""How long to wait after the source failed."""
KEEPS_PER_ACK_WAIT = 3
BEHIND_MS = 50
"""How much later than a failed message those that wait for it come again."""

Place = tuple[int, ...]
"""Where a message stands in its stream."""
Ending = Literal["processed", "duplicate", "dead_lettered", "failed", "postponed"]


class Ended(msgspec.Struct, frozen=True):
    """What a delivery came to.

    Arguments:
        redeliver_ms: in how many ms the message comes again; None when it is settled.
    """

    ending: Ending
    redeliver_ms: int | None = None


class Delivery:
    """Have one message dealt with, and note in the inbox and on the dead-letter subject what became of it."""

    def __init__(
        self,
        inbox: InboxRepository,
        handler: EventHandler,
        dead_letters: DeadLetters,
        clock: Clock,
        policy: DeliveryPolicy,
        *,
        stream: str,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Take the ports, and the name of the stream that messages without an id are named after."""
        self._inbox = inbox
        self._handler = handler
        self._dead_letters = dead_letters
        self._clock = clock
        self._policy = policy
        self._stream = stream
        self._jitter = jitter

    async def deliver(self, message: SourceMessage) -> Settlement:
        """Deal with a delivery, and return what is left to do: to acknowledge it, or to ask for it again.

        A dead letter has been published when this returns `DeadLetter`.

        Raises:
            DuplicateInboxMessage: it was dealt with before; acknowledge it.
            PostroomError: the inbox or the dead-letter subject can't be used; ask for it again.
        """
        message_id = identify(message, self._stream)
        known = await self._inbox.insert(message_id, message.subject, self._clock.wall())
        settlement = spent(known, self._policy) or settle(
            await ask(self._handler, message, message_id),
            known.attempts,
            message.delivered,
            self._policy,
            self._jitter(),
        )
        await self._note(message, known, settlement)
        return settlement

    async def give_up(self, message: SourceMessage, error: PostroomError) -> None:
        """Dead-letter a message that the inbox can't be told of, since its server won't deliver it again."""
        letter = DeadLetter("max_deliver", str(error))
        await self._publish(message, identify(message, self._stream), letter, message.delivered)

    async def _note(self, message: SourceMessage, known: InboxMessage, settlement: Settlement) -> None:
        match settlement:
            case Acknowledge():
                await self._inbox.mark_processed(known.message_id, self._now(known))
            case DeadLetter():
                # Published first: whatever ends us in between, the message is either there or comes again.
                await self._publish(message, known.message_id, settlement, known.attempts)
                await self._inbox.mark_dead_lettered(
                    known.message_id, f"{settlement.reason}: {settlement.last_error}", self._now(known)
                )
            case Redeliver():
                await self._inbox.record_error(known.message_id, settlement.last_error, self._now(known))

    async def _publish(
        self, message: SourceMessage, message_id: UUID, letter: DeadLetter, attempts: int
    ) -> None:
        await self._dead_letters.publish(message, str(message_id), letter, attempts, self._clock.wall())
        logger().warning(
            "inbox.dead_lettered",
            message_id=str(message_id),
            subject=message.subject,
            reason=letter.reason,
            last_error=letter.last_error,
            attempts=attempts,
        )

    def _now(self, message: InboxMessage) -> int:
        # Another worker whose clock is ahead may have received it first.
        return max(self._clock.wall(), message.received_at)


async def ask(handler: EventHandler, message: SourceMessage, message_id: UUID) -> HandlerResult:
    """Hand a message to its handler and return what it said.

    Arguments:
        message_id: what the message is called where it doesn't say so itself.
    """
    try:
        request = read_request(message)
    except Unreadable as error:
        return HandlerResult("unreadable", str(error))
    if not request.message_id:
        request = msgspec.structs.replace(request, message_id=str(message_id))
    try:
        return await handler.handle(request)
    except Exception as error:
        logger().exception("inbox.handler_defect", message_id=request.message_id)
        return HandlerResult("failed", repr(error))


class InboxWorker:
    """Deliver messages of a source, several at a time, those of one aggregate one after another.

    A message that fails holds back the later ones of its aggregate until it comes again, and each of these
    the ones after it, as far as this worker sees them; for the strict order of a whole stream, give its
    consumer a `max_ack_pending` of 1.

    Arguments:
        concurrency: messages in hand at once.
        ack_wait_ms: how long the source waits for a message to be settled.
    """

    def __init__(
        self,
        source: Source,
        delivery: Delivery,
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
        self._lanes: dict[str, asyncio.Task[None]] = {}
        self._held: dict[str, dict[Place, _Hold]] = {}
        self._in_hand: dict[int, SourceMessage] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.counts: Counter[Ending] = Counter()
        """How deliveries ended since the worker started."""

    async def run(self, stop: asyncio.Event, *, until_idle: bool = False) -> None:
        """Work until told to stop, and then finish what is in hand.

        Arguments:
            until_idle: stop as soon as nothing is in hand and nothing comes.

        Raises: NotFound when the consumer is gone.
        """
        self._stopping = False
        keeper = asyncio.create_task(self._keep())
        try:
            while not stop.is_set():
                fetched = await self._fetch(stop, IDLE_MS if until_idle else FETCH_WAIT_MS)
                # What comes again comes in no order.
                for message in sorted(fetched, key=lambda each: place(each.sequence)):
                    self._start(message)
                if until_idle and not fetched and not self._tasks:
                    break
        finally:
            self._stopping = True
            try:
                if self._tasks:
                    await asyncio.wait(self._tasks)
            finally:
                await end(keeper, *self._tasks)

    async def _fetch(self, stop: asyncio.Event, wait_ms: int) -> list[SourceMessage]:
        """Return what comes while there is room for it."""
        if len(self._tasks) >= self._concurrency:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                return []
        try:
            return list(await self._source.fetch(self._concurrency - len(self._tasks), wait_ms))
        except NotFound:
            raise
        except PostroomError as error:
            logger().warning("inbox.source_failed", error=str(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_SECONDS):
                    await stop.wait()
            return []

    def _start(self, message: SourceMessage) -> None:
        lane = lane_of(message)
        task = asyncio.create_task(self._work(message, lane, self._lanes.get(lane)))
        self._lanes[lane] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, message: SourceMessage, lane: str, ahead: asyncio.Task[None] | None) -> None:
        self._in_hand[id(message)] = message
        try:
            if ahead is not None:
                await asyncio.wait([ahead])
            if self._stopping and not self._is_last(message):
                await self._settle(message, Ended("postponed", 0))
            else:
                await self._settle(message, await self._end(message, lane))
        except PostroomError as error:  # not settled: it comes again by itself
            logger().warning("inbox.settling_failed", sequence=message.sequence, error=str(error))
        except Exception:
            logger().exception("inbox.defect", subject=message.subject, sequence=message.sequence)
        finally:
            del self._in_hand[id(message)]
            if self._lanes.get(lane) is asyncio.current_task():
                del self._lanes[lane]

    async def _end(self, message: SourceMessage, lane: str) -> Ended:
        """Deliver a message, unless an earlier one of its aggregate is still to come again."""
        now = self._clock.uptime() // 1_000
        at = place(message.sequence)
        held = {key: hold for key, hold in self._held.get(lane, {}).items() if now < hold.forget_at}
        ahead = [hold.until for key, hold in held.items() if key < at]
        if ahead and not self._is_last(message):
            ended = Ended("postponed", max(min(ahead) - now, 0) + BEHIND_MS)
        else:
            ended = await self._delivered(message)
            now = self._clock.uptime() // 1_000
        held.pop(at, None)
        if ended.redeliver_ms is not None:
            until = now + ended.redeliver_ms
            held[at] = _Hold(until, until + self._ack_wait_ms)
            self._forget(now)
        if held:
            self._held[lane] = held
        else:
            self._held.pop(lane, None)
        return ended

    def _forget(self, now: int) -> None:
        """Forget the aggregates all of whose messages another worker must have got."""
        for lane, held in list(self._held.items()):
            if all(hold.forget_at <= now for hold in held.values()):
                del self._held[lane]

    async def _delivered(self, message: SourceMessage) -> Ended:
        try:
            settlement = await self._delivery.deliver(message)
        except DuplicateInboxMessage as duplicate:
            logger().info("inbox.duplicate", sequence=message.sequence, reason=str(duplicate))
            return Ended("duplicate")
        except PostroomError as error:
            return await self._postpone(message, error)
        match settlement:
            case Acknowledge():
                return Ended("processed")
            case DeadLetter():
                return Ended("dead_lettered")
            case Redeliver():
                logger().warning(
                    "inbox.delivery_failed",
                    subject=message.subject,
                    sequence=message.sequence,
                    error=settlement.last_error,
                    redeliver_ms=settlement.delay_ms,
                )
                return Ended("failed", settlement.delay_ms)

    async def _postpone(self, message: SourceMessage, error: PostroomError) -> Ended:
        """Deal with a message that couldn't be delivered at all: it waits, or its server forgets it."""
        if self._is_last(message):
            await self._delivery.give_up(message, error)
            return Ended("dead_lettered")
        delay_ms = backoff_ms(self._policy, message.delivered, self._jitter())
        logger().warning(
            "inbox.delivery_impossible",
            subject=message.subject,
            sequence=message.sequence,
            error=str(error),
            redeliver_ms=delay_ms,
        )
        return Ended("failed", delay_ms)

    def _is_last(self, message: SourceMessage) -> bool:
        """Tell whether the message's server won't deliver it again, whatever we ask for."""
        limit = self._policy.server_limit
        return limit is not None and message.delivered >= limit

    async def _settle(self, message: SourceMessage, ended: Ended) -> None:
        self.counts[ended.ending] += 1
        if ended.redeliver_ms is None:
            await self._source.ack([message])
        else:
            await self._source.nak([message], ended.redeliver_ms)

    async def _keep(self) -> None:
        """Keep what is in hand from being delivered again, for as long as its handler works."""
        while True:
            await asyncio.sleep(self._ack_wait_ms / KEEPS_PER_ACK_WAIT / 1_000)
            try:
                await self._source.keep(list(self._in_hand.values()))
            except PostroomError as error:
                logger().warning("inbox.keeping_failed", error=str(error))


class _Hold(msgspec.Struct, frozen=True):
    """A message is to come again, and later ones of its aggregate wait for it; in ms of uptime.

    Arguments:
        until: when it comes.
        forget_at: when to wait no longer; another worker must have got it.
    """

    until: int
    forget_at: int


def identify(message: SourceMessage, stream: str) -> UUID:
    """Return the id of a message in the inbox; one without an id is named after its place in the stream."""
    try:
        return inbox_id(message.headers.get(MESSAGE_ID) or f"{stream}/{message.sequence}")
    except Unreadable:
        return inbox_id(f"{stream}/{message.sequence}")


def place(sequence: str) -> Place:
    """Return what sorts messages as they stand in their stream: the number, or numbers, of the sequence."""
    return tuple(int(part) for part in sequence.split("-") if part.isdecimal())


def lane_of(message: SourceMessage) -> str:
    """Return what messages have in common that must be delivered one after another."""
    headers = message.headers
    if AGGREGATE_ID in headers:
        return f"{headers.get(AGGREGATE_TYPE, '')}/{headers[AGGREGATE_ID]}"
    return f"#{message.sequence}"
