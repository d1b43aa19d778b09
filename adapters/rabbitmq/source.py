"""The source port over a queue or a stream of RabbitMQ."""

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage

from postroom.adapters.rabbitmq.connection import (
    TIMEOUT_SECONDS,
    StreamOffset,
    at_most,
    connect,
    disconnect,
    translate_errors,
)
from postroom.adapters.rabbitmq.settings import RabbitmqSettings
from postroom.application.ingest.settlement import Deliveries, DeliveryToken
from postroom.application.ports.source import Headers, SourceMessage
from postroom.application.threads import wait_at_most
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable

PROBE_SECONDS = 5.0
"""Time without messages after which the source checks that the queue still exists."""
ROUND_TRIP_SECONDS = 0.5
"""Time for the first messages of a new consumer to arrive."""
MAX_PREFETCH = 65_535
_STREAM_OFFSET = "x-stream-offset"
_DELIVERY_COUNT = "x-delivery-count"


class QueueConsumer(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer of a RabbitMQ queue or stream.

    Arguments:
        queue: name of an existing quorum or classic queue, or of a stream.
        group: name of the consumer, and of the stored offset of a stream.
        is_stream: whether `queue` is a stream; a new group reads it from the beginning.
        ack_wait_ms: time after which an unsettled delivery is redelivered.
        prefetch: maximum number of unsettled messages that the server delivers.
    """

    queue: str
    group: str
    is_stream: bool = False
    ack_wait_ms: int = 30_000
    prefetch: int = 10_000


class RabbitmqQueueSource:
    """A consumer of a queue, whose deliveries are settled individually; created by `open`.

    RabbitMQ can't delay a delivery: messages that are nacked or not settled in time are redelivered from
    memory. When the connection is lost, RabbitMQ redelivers all messages that were not acked.
    """

    def __init__(self, settings: RabbitmqSettings, consumer: QueueConsumer) -> None:
        if not 0 < len(consumer.queue.encode()) < 256:
            raise InvalidRequest("The name of a RabbitMQ queue must have 1 to 255 bytes.")
        self._settings = settings
        self._consumer = consumer
        kind = "stream" if consumer.is_stream else "queue"
        self._label = f"RabbitMQ {kind} {consumer.queue} of {settings.shown_address}"
        self._deliveries = Deliveries(consumer.ack_wait_ms)
        self._buffer: deque[SourceMessage] = deque()
        self._unsettled: dict[int, int] = {}
        """Stream offsets of unacked deliveries, by delivery tag."""
        self._news = asyncio.Event()
        self._generation = 0
        self._next_offset = 0
        self._stored_offset = 0
        self._connection: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None
        self._offset: StreamOffset | None = None
        self._offset_lock = asyncio.Lock()
        self._is_fresh = False
        self._probe_at = 0.0
        self._closed = False
        self.ack_wait_ms = consumer.ack_wait_ms

    @classmethod
    async def open(cls, settings: RabbitmqSettings, consumer: QueueConsumer) -> "RabbitmqQueueSource":
        """Connect, and consume the queue.

        Raises:
            NotFound: the queue does not exist.
            InvalidRequest: a setting is invalid, the server refuses the credentials, or a stream is consumed
                as a queue.
            Unavailable: the server can't be reached.
        """
        source = cls(settings, consumer)
        await source._ensure_connected("opened")
        return source

    async def count_pending(self) -> int:
        """Return the number of undelivered messages; of a stream, only buffered ones are counted.

        Raises: Unavailable if RabbitMQ does not answer.
        """
        return len(self._buffer) + await self._count_ready()

    async def fetch(self, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        """Return up to `limit` messages, redelivered ones first; see `Source.fetch`.

        Raises:
            NotFound: the queue was deleted.
            Unavailable: the server can't be reached; the next call connects again.
        """
        deadline = _now() + wait_ms / 1_000
        while True:
            await self._ensure_connected("read")
            self._news.clear()
            if messages := self._take(limit):
                self._is_fresh = False
                self._probe_at = _now() + PROBE_SECONDS
                return messages
            now = _now()
            until = max(deadline, now + ROUND_TRIP_SECONDS) if self._is_fresh else deadline
            self._is_fresh = False
            if now >= self._probe_at:
                await self._count_ready()
            if now >= until:
                return []
            due = self._deliveries.next_due
            await wait_at_most(max(0.0, min(until, due, self._probe_at) - _now()), self._news.wait())
            deadline = until

    async def ack(self, messages: Sequence[SourceMessage]) -> None:
        """Ack deliveries; see `Source.ack`. Messages of an earlier connection are redelivered."""
        if not messages:
            return
        self._check_open()
        tags = [token.position[1] for token in self._deliveries.settle(messages)]
        for tag in tags:
            self._unsettled.pop(tag, None)
        if not tags or self._channel is None:
            return
        first = next(iter(self._unsettled), max(tags) + 1)
        async with translate_errors(self._label, "answered"):
            channel = await self._channel.get_underlay_channel()
            if below := [tag for tag in tags if tag < first]:
                await channel.basic_ack(max(below), multiple=True)
            for tag in tags:
                if tag > first:
                    await channel.basic_ack(tag)
            await self._store_offset()

    async def nack(self, messages: Sequence[SourceMessage], delay_ms: int) -> None:
        """Request redelivery after a delay; see `Source.nack`."""
        self._deliveries.delay(messages, delay_ms, _now())
        self._news.set()

    async def extend(self, messages: Sequence[SourceMessage]) -> None:
        """Restart the ack wait of deliveries; see `Source.extend`."""
        self._deliveries.extend(messages, _now())

    async def close(self) -> None:
        """Disconnect; see `Source.close`."""
        if not self._closed:
            self._closed = True
            await self._disconnect()

    # -- the connection ---

    async def _ensure_connected(self, participle: str) -> None:
        self._check_open()
        if self._channel is not None and not self._channel.is_closed:
            return
        await self._disconnect()
        try:
            async with translate_errors(self._label, participle):
                await at_most(2 * TIMEOUT_SECONDS, self._connect(self._generation))
        except BaseException:
            await self._disconnect()
            raise

    async def _connect(self, generation: int) -> None:
        """Connect and consume; a call that continues after its timeout is too late, and has no effect."""
        consumer = self._consumer
        connection = await connect(self._settings, f"postroom {consumer.group}")
        if generation != self._generation:
            await disconnect(connection)
            return
        self._connection = connection
        channel = await connection.channel(publisher_confirms=True)
        if generation != self._generation:
            return  # `connection` was closed
        self._channel = channel
        channel.close_callbacks.add(lambda *_: self._news.set())
        arguments: dict[str, int | str] = {}
        if consumer.is_stream:
            self._offset = StreamOffset(channel, consumer.queue, consumer.group)
            offset = await self._offset.load()
            self._stored_offset = self._next_offset = offset or 0
            arguments[_STREAM_OFFSET] = "first" if offset is None else offset
        await channel.set_qos(prefetch_count=min(consumer.prefetch, MAX_PREFETCH))
        queue = await channel.get_queue(consumer.queue, ensure=True)

        async def receive(message: AbstractIncomingMessage) -> None:
            if generation == self._generation:
                self._receive(message)

        await queue.consume(receive, arguments=dict(arguments))
        if generation != self._generation:
            return
        self._is_fresh, self._probe_at = True, _now() + PROBE_SECONDS

    async def _disconnect(self) -> None:
        self._deliveries.forget([self._generation])
        self._generation += 1
        self._buffer.clear()
        self._unsettled.clear()
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            await disconnect(connection)

    async def _count_ready(self) -> int:
        """Return the number of messages in the queue; disconnect if the server does not answer."""
        self._probe_at = _now() + PROBE_SECONDS
        try:
            async with translate_errors(self._label, "read"):
                return await at_most(TIMEOUT_SECONDS, self._declare_passively())
        except PostroomError:
            await self._disconnect()
            raise

    async def _declare_passively(self) -> int:
        if self._connection is None:
            raise ConnectionError("it is not connected")
        channel = await self._connection.channel()  # an error closes this channel, not the consumer's
        queue = await channel.declare_queue(self._consumer.queue, passive=True)
        await channel.close()
        return queue.declaration_result.message_count or 0

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(f"{self._label} can't be read: it was closed.")

    # -- deliveries ---

    def _take(self, limit: int) -> list[SourceMessage]:
        now = _now()
        if due := self._deliveries.take_due(limit, now):
            return due
        messages = [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]
        for message in messages:
            self._deliveries.add(message, now)
        return messages

    def _receive(self, message: AbstractIncomingMessage) -> None:
        tag, headers = message.delivery_tag or 0, message.headers
        offset = headers.get(_STREAM_OFFSET)
        place = offset if self._consumer.is_stream and isinstance(offset, int) else tag
        self._unsettled[tag] = place
        self._next_offset = place + 1
        count = headers.get(_DELIVERY_COUNT)
        delivered = count + 1 if isinstance(count, int) else 1 + bool(message.redelivered)
        # Of the two prefixes of CloudEvents in AMQP, dead letters of every broker may have the second.
        names = [
            (name.replace("cloudEvents:", "cloudEvents_", 1), _text(value)) for name, value in headers.items()
        ]
        if message.message_id is not None:
            names.append(("message_id", message.message_id))
        if message.content_type is not None:
            names.append(("Content-Type", message.content_type))
        delivery = SourceMessage(
            message.routing_key or "",
            message.body,
            Headers(names),
            delivered,
            str(place) if self._consumer.is_stream else f"{self._generation}:{tag}",
            DeliveryToken((self._generation, tag), delivered, self._generation),
        )
        self._buffer.append(delivery)
        self._news.set()

    async def _store_offset(self) -> None:
        """Store the offset before which all messages of the stream are acked."""
        if self._offset is None:
            return
        async with self._offset_lock:
            offset = next(iter(self._unsettled.values()), self._next_offset)
            if offset > self._stored_offset:
                await self._offset.store(offset)
                self._stored_offset = offset


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _now() -> float:
    return asyncio.get_running_loop().time()
