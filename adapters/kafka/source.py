"""The source port over a consumer group of a Kafka topic."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec
from blake3 import blake3
from confluent_kafka import Message

from postroom.adapters.kafka.consumer import GroupConsumer, place_of
from postroom.adapters.kafka.settings import KafkaSettings
from postroom.application.cloudevents import is_cloud_event
from postroom.application.ingest.broker_access import framing_length
from postroom.application.ingest.settlement import Deliveries, DeliveryToken
from postroom.application.ports.source import Headers, SourceMessage
from postroom.application.threads import wait_at_most
from postroom.domain.errors import InvalidRequest, Unavailable

JOIN_SECONDS = 60.0
"""Maximum time to join the group; a killed member delays it by the session timeout."""
SOCKET_TIMEOUT_MS = 10_000
ROUND_TRIP_SECONDS = 2.0
"""Time for a broker to answer, in addition to the wait of a fetch."""
CLOSE_SECONDS = 10.0
QUEUE_KBYTES = 16 << 10
MAX_KEY_CHARS = 255

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")
_NO_HEADERS = Headers([])


class TopicConsumer(msgspec.Struct, frozen=True, kw_only=True):
    """A Kafka topic and one of its consumer groups.

    Arguments:
        group: the consumer group; a new group starts at the beginning of the topic.
        ack_wait_ms: time after which an unsettled delivery is redelivered.
        max_unsettled: maximum number of unsettled messages, delivered or buffered.
        prefetch: maximum number of buffered messages.
        session_timeout_ms: time after which the group reassigns the partitions of a silent member.
    """

    topic: str
    group: str
    ack_wait_ms: int = 30_000
    max_unsettled: int = 10_000
    prefetch: int = 1_000
    session_timeout_ms: int = 10_000


class KafkaTopicSource:
    """A member of a consumer group that commits an offset once all messages before it are acked.

    Kafka delivers a message to a member once. Messages that are nacked or not settled in time are redelivered
    from memory; after a crash, delivery resumes at the committed offset. Created by `open`.
    """

    def __init__(self, settings: KafkaSettings, consumer: TopicConsumer) -> None:
        if not _TOPIC.match(consumer.topic):
            raise InvalidRequest(
                f"{consumer.topic!r} is not the name of a Kafka topic; use only letters, digits, ., _ and -."
            )
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._deliveries = Deliveries(consumer.ack_wait_ms)
        self._label = f"Kafka topic {consumer.topic}"
        self._closed = False
        self.ack_wait_ms = consumer.ack_wait_ms
        self._consumer = GroupConsumer(
            settings.client_settings()
            | {
                "group.id": consumer.group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "partition.assignment.strategy": "cooperative-sticky",
                "session.timeout.ms": consumer.session_timeout_ms,
                "heartbeat.interval.ms": consumer.session_timeout_ms // 3,
                "socket.timeout.ms": SOCKET_TIMEOUT_MS,
                "queued.max.messages.kbytes": QUEUE_KBYTES,
                "allow.auto.create.topics": False,
            },
            consumer.topic,
            consumer.prefetch,
            max(consumer.max_unsettled, consumer.prefetch),
            self._wake,
            self._forget_later,
        )

    @classmethod
    async def open(cls, settings: KafkaSettings, consumer: TopicConsumer) -> "KafkaTopicSource":
        """Connect, and join the group.

        Raises:
            NotFound: the topic does not exist.
            InvalidRequest: a setting is invalid, or the broker refuses the credentials.
            Unavailable: no broker can be reached.
        """
        source = cls(settings, consumer)
        try:
            await asyncio.to_thread(source._consumer.start)
            await source._join()
        except BaseException:
            await source.close()
            raise
        return source

    async def count_pending(self) -> int:
        """Return the number of undelivered messages in the partitions of this member.

        Raises: Unavailable if Kafka does not answer.
        """
        return await self._consumer.count_pending()

    async def fetch(self, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        """Return up to `limit` messages, redelivered ones first; see `Source.fetch`.

        Raises:
            NotFound: the topic was deleted.
            InvalidRequest: the broker refuses the consumer.
            Unavailable: no broker can be reached; the connection is restored in the background.
        """
        deadline = self._loop.time() + wait_ms / 1_000
        while True:
            self._news.clear()
            self._check()
            if messages := self._take(limit):
                return messages
            now = self._loop.time()
            # Before the end of the topic is reached, messages may be in transit.
            until = deadline if self._consumer.is_at_end else max(deadline, deadline + ROUND_TRIP_SECONDS)
            if now >= until:
                if self._consumer.outage is not None:
                    raise self._unavailable("read", self._consumer.outage)
                return []
            await wait_at_most(min(until, self._deliveries.next_due) - now, self._news.wait())

    async def ack(self, messages: Sequence[SourceMessage]) -> None:
        """Ack deliveries and commit offsets; see `Source.ack`.

        Acks of a partition that was revoked have no effect: its new owner receives the messages again.
        """
        if messages:
            self._check()
            self._consumer.settle(self._deliveries.settle(messages))
            await self._consumer.commit()

    async def nack(self, messages: Sequence[SourceMessage], delay_ms: int) -> None:
        """Request redelivery after a delay; see `Source.nack`."""
        self._deliveries.delay(messages, delay_ms, self._loop.time())
        self._consumer.mark([message.token for message in messages], is_in_progress=False)
        self._news.set()

    async def extend(self, messages: Sequence[SourceMessage]) -> None:
        """Restart the ack wait of deliveries; see `Source.extend`."""
        self._deliveries.extend(messages, self._loop.time())

    async def close(self) -> None:
        """Leave the group, and disconnect; see `Source.close`."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(self._consumer.close, CLOSE_SECONDS)

    # -- helpers ---

    async def _join(self) -> None:
        deadline = self._loop.time() + JOIN_SECONDS
        while not self._consumer.has_joined:
            self._news.clear()
            self._check()
            now = self._loop.time()
            if now >= deadline:
                raise self._unavailable("opened", self._consumer.outage or "the group does not answer")
            await wait_at_most(min(deadline - now, ROUND_TRIP_SECONDS), self._news.wait())

    def _take(self, limit: int) -> list[SourceMessage]:
        now = self._loop.time()
        if due := self._deliveries.take_due(limit, now):
            self._consumer.mark([message.token for message in due], is_in_progress=True)
            return due
        messages = [_read(message, generation) for message, generation in self._consumer.take(limit)]
        for message in messages:
            self._deliveries.add(message, now)
        return messages

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop was closed without closing the source
            self._loop.call_soon_threadsafe(self._news.set)

    def _forget_later(self, generations: list[int]) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliveries.forget, generations)

    def _check(self) -> None:
        if self._closed:
            raise Unavailable(f"{self._label} can't be read: it was closed.")
        self._consumer.check()

    def _unavailable(self, participle: str, reason: str) -> Unavailable:
        return Unavailable(
            f"{self._label} can't be {participle}: {reason}. It is retried when Kafka is available."
        )


def _read(message: Message, generation: int) -> SourceMessage:
    """Return the first delivery of a message."""
    partition, offset = place_of(message)
    data, key = message.value(), message.key()
    raw: Any = message.headers() or ()  # typed wider than the client returns
    headers = Headers([(name, _text(value)) for name, value in raw]) if raw else _NO_HEADERS
    return SourceMessage(
        message.topic() or "",
        data or b"",
        headers,
        1,
        f"{partition}:{offset}",
        DeliveryToken((partition, offset), 1, generation),
        None if key is None else _sticky_key(key),
        framing_length(data) if data else 0,
        data is None and not is_cloud_event(headers.pairs),  # a CloudEvent may have no data
    )


def _text(value: str | bytes | None) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


@lru_cache(maxsize=10_000)
def _sticky_key(key: bytes) -> str:
    """Return a key as text, or its hash if it is not UTF-8 or too long."""
    with suppress(UnicodeDecodeError):
        if len(text := key.decode()) <= MAX_KEY_CHARS:
            return text
    return f"b3:{blake3(key).hexdigest()}"
