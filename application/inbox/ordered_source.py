"""The source of an ordered worker: its share of the queue in the inbox's database (ADR 0088).

One worker at a time copies messages from the stream to the queue, in the order of the stream, and
acknowledges them to the stream. Each worker delivers the messages of its partitions. Order does not depend on
leases or clocks: messages are only added directly after the last one of the queue, and a worker that holds a
message also holds all earlier unsettled ones of its lane.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from typing import NamedTuple
from uuid import UUID

import msgspec

from postroom.application.inbox.request import lane_of, partition_of, share
from postroom.application.ports.event_log import Clock
from postroom.application.ports.inbox import InboxQueue, NewMessage, QueuedMessage, Retry
from postroom.application.ports.source import OrderedStream, SourceMessage
from postroom.application.telemetry import logger
from postroom.application.threads import background_task, wait_at_most
from postroom.domain.errors import PostroomError, Unavailable

READ_LIMIT = 500
READ_WAIT_MS = 500
MAX_QUEUED = 5_000
"""Length of the queue at which the stream is not read."""
TURN_MS = 2_000
PREFETCH = 500
"""Messages read from the queue at once."""
POLL_SECONDS = 0.1
"""Interval at which a worker polls the queue for messages that another worker added."""
PAUSE_SECONDS = 1.0
"""Pause after a failure of the stream or the database."""
SHORT_TICK_SECONDS = 0.25
"""Interval at which a worker checks its partitions until it has its share."""
RENEWALS_PER_LEASE = 3


class OrderedSource:
    """The messages of a worker's partitions; see `Source`. `sharing` runs it.

    Arguments:
        message_id: returns the id of a message in the inbox.
        lease_ms: time after which other workers may claim partitions that were not renewed.
        ack_wait_ms: how long the worker holds a message that is not settled or extended.
    """

    def __init__(
        self,
        queue: InboxQueue,
        stream: OrderedStream,
        message_id: Callable[[SourceMessage], UUID],
        clock: Clock,
        *,
        lease_ms: int,
        ack_wait_ms: int,
    ) -> None:
        self._queue = queue
        self._stream = stream
        self._message_id = message_id
        self._clock = clock
        self._lease_ms = lease_ms
        self._ack_wait_ms = ack_wait_ms
        self._incarnation = ""
        self._held: dict[int, _HeldMessage] = {}
        self._buffer: deque[QueuedMessage] = deque()
        self._failed_lanes: Counter[int] = Counter()
        self._postponed_lanes: Counter[int] = Counter()
        self._draining: frozenset[int] = frozenset()
        self._settlements = _SettlementWriter(queue, self._release)
        self._wake = asyncio.Event()
        self._reads = 0
        self._may_read = True
        self._failure: PostroomError | None = None
        self._epochs: dict[int, int] = {}

    @property
    def partitions(self) -> frozenset[int]:
        """Return the partitions of this worker."""
        return frozenset(self._epochs)

    async def fetch(self, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        """Return up to `limit` messages of this worker's partitions; see `Source.fetch`.

        While this worker reads the stream, the result is empty only after a read returned no messages.

        Raises: NotFound if the consumer was deleted.
        """
        deadline = self._now() + wait_ms
        reads = self._reads
        while True:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if not self._buffer:
                await self._fill(max(limit, PREFETCH))
            if self._buffer:
                return [self._take() for _ in range(min(limit, len(self._buffer)))]
            left = deadline - self._now()
            if left <= 0 and (self._reads > reads + 1 or not self._may_read):
                return []
            self._wake.clear()
            await wait_at_most(
                min(left / 1_000, POLL_SECONDS) if left > 0 else POLL_SECONDS, self._wake.wait()
            )

    async def ack(self, messages: Sequence[SourceMessage]) -> None:
        """Remove messages from the queue soon; see `Source.ack`.

        The next message of the lane need not wait for that. If it fails, the messages are delivered again, as
        duplicates, which the inbox knows by then.
        """
        self._settlements.remove([message.token.position for message in messages])

    async def nack(self, messages: Sequence[SourceMessage], delay_ms: int) -> None:
        """Return messages to the queue for a delay; see `Source.nack`."""
        tokens = [message.token for message in messages]
        lanes = Counter(each.lane for each in tokens)
        # Later messages of the lane must not be delivered before it.
        self._buffer = deque(each for each in self._buffer if each.lane not in lanes)
        self._failed_lanes += lanes
        retries = [Retry(each.position, each.partition, each.epoch, delay_ms) for each in tokens if delay_ms]
        try:
            await self._settlements.postpone(retries)
        finally:
            self._release([each.position for each in tokens])
            self._postponed_lanes += lanes

    async def extend(self, messages: Sequence[SourceMessage]) -> None:
        """Hold messages for longer; see `Source.extend`."""
        for message in messages:
            self._hold(message.token)

    async def flush(self) -> None:
        """Wait until all acknowledged messages are removed from the queue, or could not be."""
        await self._settlements.flush()

    async def close(self) -> None:
        """Do nothing, as `sharing` ends it."""

    # -- messages that the worker holds ---

    async def _fill(self, limit: int) -> None:
        now = self._now()
        for position in [position for position, each in self._held.items() if each.until <= now]:
            del self._held[position]
        # Rows that were read before a failure was written may contain messages that must wait for it.
        self._failed_lanes -= self._postponed_lanes
        self._postponed_lanes.clear()
        rows = await self._queue.next(limit, self._held, self._draining)
        self._buffer.extend(
            each for each in rows if each.lane not in self._failed_lanes and self._may_take(each)
        )

    def _may_take(self, queued: QueuedMessage) -> bool:
        return queued.partition not in self._draining and self._epochs.get(queued.partition) == queued.epoch

    def _take(self) -> SourceMessage:
        queued = self._buffer.popleft()
        self._hold(queued)
        return msgspec.structs.replace(queued.message, token=queued)

    def _hold(self, queued: QueuedMessage) -> None:
        self._held[queued.position] = _HeldMessage(queued.partition, self._now() + self._ack_wait_ms)

    def _release(self, positions: Iterable[int]) -> None:
        """Stop holding messages, after they are settled in the database or could not be."""
        for position in positions:
            self._held.pop(position, None)

    def _now(self) -> int:
        return self._clock.uptime() // 1_000

    # -- partitions ---

    async def open(self) -> None:
        """Open the queue, and claim partitions.

        Raises: NotFound if the consumer does not exist, Unavailable if the stream or database can't be used.
        """
        state = await self._stream.state()
        await self._queue.open(state)
        self._incarnation = state.incarnation
        await self._share()

    async def share_partitions(self) -> None:
        """Renew, claim and release partitions until cancelled."""
        renewed_at = self._now()
        is_settled = False
        while True:
            await asyncio.sleep(
                self._lease_ms / RENEWALS_PER_LEASE / 1_000
                if is_settled
                else min(SHORT_TICK_SECONDS, self._lease_ms / RENEWALS_PER_LEASE / 1_000)
            )
            try:
                is_settled = await self._share()
                if self._now() - renewed_at >= self._lease_ms:
                    await self._check_incarnation()
                    renewed_at = self._now()
            except Unavailable as error:
                logger().retry("inbox.lease_failed", error=str(error))
            except PostroomError as error:
                self._failure = error

    async def _share(self) -> bool:
        """Renew, claim and release partitions once; return whether this worker has its share."""
        await self._queue.renew(self._lease_ms)
        ownership = await self._queue.claim()
        size = share(ownership.workers)
        if ownership.epochs.keys() != self._epochs.keys():
            logger().info("inbox.partitions", count=len(ownership.epochs), workers=ownership.workers)
        self._epochs = dict(ownership.epochs)
        order = sorted(self._epochs, key=lambda each: (each in self._draining, each))
        self._draining = frozenset(order[size:])
        self._buffer = deque(filter(self._may_take, self._buffer))
        # A partition is released when none of its messages is held, so that no other worker delivers one too.
        free = self._draining - {each.partition for each in self._held.values()}
        if free:
            for partition in free:
                del self._epochs[partition]
            await self._queue.release(free)
            self._draining -= free
        return len(self._epochs) == size and not self._draining

    async def _check_incarnation(self) -> None:
        """Open the queue again if the stream or its consumer was recreated."""
        state = await self._stream.state()
        if state.incarnation != self._incarnation:
            logger().warning("inbox.consumer_replaced", why="the stream or its consumer was recreated")
            await self._queue.open(state)
            self._incarnation = state.incarnation

    # -- the stream ---

    async def read_stream(self) -> None:
        """Copy messages from the stream to the queue, while it is this worker's turn, until cancelled."""
        is_checked = True
        while True:
            try:
                if not is_checked:
                    await self._check_incarnation()
                    is_checked = True
                pause = await self._read()
            except Unavailable as error:
                is_checked = self._may_read = False
                logger().retry("inbox.source_failed", error=str(error))
                pause = PAUSE_SECONDS
            except PostroomError as error:
                self._may_read, self._failure = False, error
                pause = PAUSE_SECONDS
            if pause:
                await asyncio.sleep(pause)

    async def _read(self) -> float:
        """Copy the next messages to the queue; return the seconds to wait before the next call."""
        turn = await self._queue.take_turn(TURN_MS, MAX_QUEUED)
        self._may_read = turn is not None
        if turn is None:
            return TURN_MS / 4_000
        if turn.queued >= MAX_QUEUED:
            self._reads += 1
            return POLL_SECONDS
        messages = await self._stream.read(turn.sequence, READ_LIMIT, READ_WAIT_MS)
        if messages:
            new = [self._new(message) for message in messages]
            if not await self._queue.add(turn.sequence, int(messages[-1].sequence), new):
                return 0.0  # another worker had a turn meanwhile, so the next call takes a turn again
            await self._stream.ack(messages)
        else:
            self._reads += 1
        self._wake.set()
        return 0.0

    def _new(self, message: SourceMessage) -> NewMessage:
        lane = lane_of(message, self._message_id(message))
        return NewMessage(partition_of(lane), lane, message)


@asynccontextmanager
async def sharing(source: OrderedSource, queue: InboxQueue) -> AsyncIterator[None]:
    """Share the queue with other workers for the duration of the context.

    Raises: NotFound if the consumer does not exist, Unavailable if the stream or database can't be used.
    """
    await source.open()
    try:
        async with background_task(source.share_partitions()), background_task(source.read_stream()):
            yield
    finally:
        await source.flush()
        with suppress(PostroomError):
            await queue.leave()


class _HeldMessage(NamedTuple):
    """A message that the worker holds, until a time in ms of uptime unless it is extended."""

    partition: int
    until: int


class _SettlementWriter:
    """Groups settlements: those that arrive while a statement runs are written by the next one.

    Arguments:
        release: called with the positions of removed messages, after the statement.
    """

    def __init__(self, queue: InboxQueue, release: Callable[[Iterable[int]], None]) -> None:
        self._queue = queue
        self._release = release
        self._settled: list[int] = []
        self._retries: list[tuple[Sequence[Retry], asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    def remove(self, positions: Iterable[int]) -> None:
        """Remove messages from the queue with the next statement."""
        self._settled += positions
        self._start()

    async def postpone(self, retries: Sequence[Retry]) -> None:
        """Postpone messages.

        Raises: Unavailable when the database can't be used.
        """
        if not retries:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._retries.append((retries, done))
        self._start()
        await done

    async def flush(self) -> None:
        """Wait until all settlements are written, or could not be."""
        if self._writer is not None:
            await self._writer

    def _start(self) -> None:
        if self._writer is None or self._writer.done():
            # Without a message's correlation id.
            self._writer = asyncio.create_task(self._write(), context=Context())

    async def _write(self) -> None:
        while self._settled or self._retries:
            settled, self._settled = self._settled, []
            retries, self._retries = self._retries, []
            error: Exception | None = None
            try:
                await self._queue.settle(settled, [each for group, _ in retries for each in group])
            except Exception as failure:
                error = failure
                if settled:
                    logger().retry("inbox.settling_failed", messages=len(settled), error=str(failure))
            self._release(settled)
            for _, done in retries:
                if done.done():  # the caller was cancelled
                    continue
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)
