"""The source of an ordered worker: its share of the queue in the inbox's database (ADR 0088).

One worker at a time takes the messages of the stream into the queue, in the order of the stream, and
acknowledges them there. Each worker delivers those of its partitions. Order doesn't rest on leases or clocks:
messages are added only right after the last one of the queue, and a worker with a message in hand has all
earlier unsettled ones of its lane in hand, too.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from typing import NamedTuple
from uuid import UUID

import msgspec

from postroom.application.background import background_task, wait_at_most
from postroom.application.inbox.partitions import lane_of, partition_of, share
from postroom.application.ports.clock import Clock
from postroom.application.ports.inbox_queue import InboxQueue, NewMessage, QueuedMessage, Retry
from postroom.application.ports.ordered_stream import OrderedStream
from postroom.application.ports.source import SourceMessage
from postroom.application.telemetry import logger
from postroom.domain.errors import PostroomError, Unavailable

READ_LIMIT = 500
READ_WAIT_MS = 500
MOST_QUEUED = 5_000
"""Length of the queue at which the stream is not read further."""
TURN_MS = 2_000
PREFETCH = 100
"""Messages read from the queue at once."""
POLL_SECONDS = 0.1
"""Interval at which a worker looks for messages that another one added."""
PAUSE_SECONDS = 1.0
"""Pause after stream or database failed."""
SHORT_TICK_SECONDS = 0.25
"""Interval at which a worker looks at its partitions while they are not its share."""
RENEWALS_PER_LEASE = 3


class OrderedSource:
    """Messages of a worker's partitions, each until it is acked; see `Source`. Shared by `sharing`.

    Arguments:
        message_id: returns the id of a message in the inbox.
        lease_ms: time after which other workers may claim the partitions if they were not renewed.
        ack_wait_ms: how long a message that is neither settled nor extended stays in hand.
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
        self._hand: dict[int, _InHand] = {}
        self._buffer: deque[QueuedMessage] = deque()
        self._failed_lanes: Counter[int] = Counter()
        self._postponed_lanes: Counter[int] = Counter()
        self._draining: frozenset[int] = frozenset()
        self._settling = _Settling(queue)
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

        A worker that reads the stream returns none only after it found none there.

        Raises: NotFound when the consumer was deleted.
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
        """Remove messages from the queue; see `Source.ack`."""
        await self._settle([message.token for message in messages], [])

    async def nack(self, messages: Sequence[SourceMessage], delay_ms: int) -> None:
        """Return messages to the queue for a delay; see `Source.nack`."""
        tokens = [message.token for message in messages]
        lanes = Counter(each.lane for each in tokens)
        # Later ones of its lane would be in hand without it.
        self._buffer = deque(each for each in self._buffer if each.lane not in lanes)
        self._failed_lanes += lanes
        retries = [Retry(each.position, each.partition, each.epoch, delay_ms) for each in tokens if delay_ms]
        try:
            await self._settle([], retries, [each.position for each in tokens])
        finally:
            self._postponed_lanes += lanes

    async def extend(self, messages: Sequence[SourceMessage]) -> None:
        """Keep messages in hand; see `Source.extend`."""
        for message in messages:
            self._keep(message.token)

    async def close(self) -> None:
        """Do nothing: the context of `sharing` ends it."""

    # -- messages in hand ---

    async def _fill(self, limit: int) -> None:
        now = self._now()
        for position in [position for position, each in self._hand.items() if each.until <= now]:
            del self._hand[position]
        # What was read before a failure was written may have messages that wait for the failed one.
        self._failed_lanes -= self._postponed_lanes
        self._postponed_lanes.clear()
        rows = await self._queue.next(limit, self._hand, self._draining)
        self._buffer.extend(
            each for each in rows if each.lane not in self._failed_lanes and self._may_take(each)
        )

    def _may_take(self, queued: QueuedMessage) -> bool:
        return queued.partition not in self._draining and self._epochs.get(queued.partition) == queued.epoch

    def _take(self) -> SourceMessage:
        queued = self._buffer.popleft()
        self._keep(queued)
        return msgspec.structs.replace(queued.message, token=queued)

    def _keep(self, queued: QueuedMessage) -> None:
        self._hand[queued.position] = _InHand(queued.partition, self._now() + self._ack_wait_ms)

    async def _settle(
        self, acked: Sequence[QueuedMessage], retries: Sequence[Retry], rest: Sequence[int] = ()
    ) -> None:
        positions = [each.position for each in acked]
        try:
            # Until they are settled in the database they are in hand, so that they are not read from it.
            await self._settling.settle(positions, retries)
        finally:
            for position in (*positions, *rest):
                self._hand.pop(position, None)

    def _now(self) -> int:
        return self._clock.uptime() // 1_000

    # -- partitions ---

    async def begin(self) -> None:
        """Begin to share the queue.

        Raises: NotFound when there is no such consumer, Unavailable when stream or database can't be used.
        """
        state = await self._stream.state()
        await self._queue.open(state)
        self._incarnation = state.incarnation
        await self._share()

    async def share_partitions(self) -> None:
        """Renew, claim and release partitions, for ever."""
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
                logger().warning("inbox.lease_failed", error=str(error))
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
        # A partition is given up when none of its messages is in hand, so that none is called for twice.
        free = self._draining - {each.partition for each in self._hand.values()}
        if free:
            for partition in free:
                del self._epochs[partition]
            await self._queue.release(free)
            self._draining -= free
        return len(self._epochs) == size and not self._draining

    async def _check_incarnation(self) -> bool:
        """Use the stream and consumer as they are now; return True."""
        state = await self._stream.state()
        if state.incarnation != self._incarnation:
            logger().warning("inbox.consumer_replaced", why="the stream or its consumer was created anew")
            await self._queue.open(state)
            self._incarnation = state.incarnation
        return True

    # -- the stream ---

    async def read_stream(self) -> None:
        """Take the messages of the stream into the queue, for ever, while it is this worker's turn."""
        is_sure = True
        while True:
            try:
                is_sure = is_sure or await self._check_incarnation()
                pause = await self._read()
            except Unavailable as error:
                is_sure = self._may_read = False
                logger().warning("inbox.source_failed", error=str(error))
                pause = PAUSE_SECONDS
            except PostroomError as error:
                self._may_read, self._failure = False, error
                pause = PAUSE_SECONDS
            if pause:
                await asyncio.sleep(pause)

    async def _read(self) -> float:
        """Take the next messages into the queue; return how long to wait for the next time, in seconds."""
        turn = await self._queue.take_turn(TURN_MS, MOST_QUEUED)
        self._may_read = turn is not None
        if turn is None:
            return TURN_MS / 4_000
        if turn.queued >= MOST_QUEUED:
            self._reads += 1
            return POLL_SECONDS
        messages = await self._stream.read(turn.sequence, READ_LIMIT, READ_WAIT_MS)
        if messages:
            new = [self._new(message) for message in messages]
            if not await self._queue.add(turn.sequence, int(messages[-1].sequence), new):
                return 0.0  # another worker had its turn meanwhile; it is asked for again
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

    Raises: NotFound when there is no such consumer, Unavailable when stream or database can't be used.
    """
    await source.begin()
    try:
        async with background_task(source.share_partitions()), background_task(source.read_stream()):
            yield
    finally:
        with suppress(PostroomError):
            await queue.leave()


class _InHand(NamedTuple):
    """A message that the worker has; `until` in ms of uptime, unless it is extended."""

    partition: int
    until: int


class _Settlement(NamedTuple):
    settled: Sequence[int]
    retries: Sequence[Retry]
    done: "asyncio.Future[None]"


class _Settling:
    """Settlements that are written together: all that wait while a statement runs are the next one."""

    def __init__(self, queue: InboxQueue) -> None:
        self._queue = queue
        self._waiting: list[_Settlement] = []
        self._writer: asyncio.Task[None] | None = None

    async def settle(self, settled: Sequence[int], retries: Sequence[Retry]) -> None:
        """Settle messages; see `InboxQueue.settle`."""
        if not settled and not retries:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Settlement(settled, retries, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write(), context=Context())  # of no message
        await done

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await self._queue.settle(
                    [position for each in batch for position in each.settled],
                    [retry for each in batch for retry in each.retries],
                )
            except Exception as error:
                for each in batch:
                    if not each.done.done():
                        each.done.set_exception(error)
            else:
                for each in batch:
                    if not each.done.done():
                        each.done.set_result(None)
