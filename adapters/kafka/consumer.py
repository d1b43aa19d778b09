"""A member of a consumer group, whose client is polled by a dedicated thread.

The client must be polled continuously: rebalances wait for every member, and a member that does not poll is
removed from the group. The client blocks while a thread polls it, so the same thread makes all other calls.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from postroom.adapters.kafka.partition import Partition
from postroom.adapters.kafka.publisher import ThreadCalls
from postroom.adapters.kafka.settings import client_reason
from postroom.application.ingest.broker_access import TLS_ADVICE
from postroom.application.ingest.settlement import DeliveryToken
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest, NotFound, PostroomError, Unavailable

POLL_SECONDS = 0.05
"""Maximum duration of a poll, and so the delay of requests while no message arrives."""
POLL_MESSAGES = 1_000
STALL_SECONDS = 1.0
"""Time after which the partitions are paused if the buffer stays full."""
REVOKE_SECONDS = 5.0
"""Maximum time that a rebalance waits for messages in progress to be stored."""
PROBE_SECONDS = 1.0
REQUEST_SECONDS = 5.0

_REFUSALS = (
    KafkaError._AUTHENTICATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    KafkaError.INVALID_GROUP_ID,
)
_STALE = (KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_INSTANCE_ID)
_MISSING = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)


class GroupConsumer:
    """A member of a consumer group of one topic.

    Arguments:
        settings: settings of librdkafka.
        buffer_size: maximum number of received messages that the source has not taken.
        max_unsettled: maximum number of received messages that are not settled.
        on_change: called in the thread when the result of `take` or `check` may have changed.
        on_revoke: called in the thread with the generations of revoked partitions.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        topic: str,
        buffer_size: int,
        max_unsettled: int,
        on_change: Callable[[], None],
        on_revoke: Callable[[list[int]], None],
    ) -> None:
        self._topic = topic
        self._label = f"Kafka topic {topic}"
        self._buffer_size = buffer_size
        self._max_unsettled = max_unsettled
        self._on_change = on_change
        self._on_revoke = on_revoke
        self._lock = threading.Condition()
        self._calls = ThreadCalls(self._lock)
        self._partitions: dict[int, Partition] = {}
        self._buffer: deque[tuple[Message, int]] = deque()
        self._generation = 0
        self._is_closing = False
        self._failure: PostroomError | None = None
        self.outage: str | None = None
        """The reason why no broker can be reached, or None."""
        self._tls_problem: str | None = None
        self.has_joined = False
        self._probe_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"kafka {topic}", daemon=True)
        try:
            self._client = Consumer({**settings, "error_cb": self._note_error, "log_level": 0})
        except (KafkaException, ValueError) as error:
            raise InvalidRequest(f"{self._label} can't be opened: {_reason(error)}.") from error

    def start(self) -> None:
        """Check that the topic exists, and join the group; blocks for a round trip.

        Raises: NotFound if the topic does not exist, InvalidRequest if the broker refuses the credentials,
            Unavailable if no broker can be reached.
        """
        try:
            answer = self._client.list_topics(self._topic, REQUEST_SECONDS).topics[self._topic]
            if answer.error is not None:
                raise KafkaException(answer.error)
        except KafkaException as error:
            with suppress(KafkaException):
                self._client.poll(0)  # calls `_note_error`, which records a refusal
            self._note_error(error.args[0])
            problem = self._tls_problem or f"{_reason(error)}. Check its URL and that a broker runs."
            failure = self._failure or Unavailable(f"{self._label} can't be opened: {problem}")
            self._client.close()
            raise failure from error
        self._client.subscribe(
            [self._topic], on_assign=self._assign, on_revoke=self._revoke, on_lost=self._lose
        )
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Leave the group; blocks for at most `seconds`."""
        with self._lock:
            self._is_closing = True
            self._lock.notify_all()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    # -- called by the source ---

    def check(self) -> None:
        """Raise the error that makes further polls useless, if any."""
        if self._failure is not None:
            raise self._failure

    @property
    def is_at_end(self) -> bool:
        """Return whether every message of the assigned partitions has arrived."""
        with self._lock:
            return self.has_joined and all(each.is_at_end for each in self._partitions.values())

    def take(self, limit: int) -> list[tuple[Message, int]]:
        """Return up to `limit` received messages with the generations of their partitions."""
        with self._lock:
            messages = [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]
            for message, _ in messages:
                partition, offset = place_of(message)
                self._partitions[partition].mark(offset, is_in_progress=True)
            self._lock.notify_all()
        return messages

    def mark(self, tokens: Iterable[DeliveryToken], *, is_in_progress: bool) -> None:
        """Mark messages as in progress, or as waiting for redelivery."""
        with self._lock:
            for partition, offset in self._current(tokens):
                partition.mark(offset, is_in_progress=is_in_progress)
            self._lock.notify_all()

    def settle(self, tokens: Iterable[DeliveryToken]) -> None:
        """Remove stored messages, except those of revoked partitions."""
        with self._lock:
            for partition, offset in self._current(tokens):
                partition.settle(offset)
            self._lock.notify_all()

    async def commit(self) -> None:
        """Commit the offset of each partition before which all messages are stored.

        Raises: Unavailable if it failed and should be repeated.
        """
        await self._calls.request(self._commit_all)

    async def count_pending(self) -> int:
        """Return the number of messages of the assigned partitions that the source has not taken.

        Raises: Unavailable if Kafka does not answer.
        """
        return await self._calls.request(self._count_pending)

    def _current(self, tokens: Iterable[DeliveryToken]) -> list[tuple[Partition, int]]:
        """Return partition and offset of messages whose partition is still assigned."""
        return [
            (partition, token.position[1])
            for token in tokens
            if (partition := self._partitions.get(token.position[0])) is not None
            and partition.generation == token.generation
        ]

    # -- the thread ---

    def _run(self) -> None:
        try:
            while not self._is_closing and self._failure is None:
                self._calls.serve()
                if self._wait_for_space(STALL_SECONDS):
                    self._poll(POLL_MESSAGES)
                elif not self._calls:
                    self._poll_paused()
                self._probe()
        except (KafkaException, RuntimeError) as error:
            self._failure = Unavailable(f"{self._label} can't be read: {_reason(error)}.")
        finally:
            self._is_closing = True
            with suppress(KafkaException, RuntimeError):
                self._client.close()
            self._calls.end(self._failure or Unavailable(f"{self._label} can't be reached: it was closed."))
            self._on_change()

    def _commit_all(self) -> None:
        with self._lock:
            targets = {number: each for number, each in self._partitions.items() if each.has_commit}
        self._commit(targets)

    def _count_pending(self) -> int:
        with self._lock:
            positions = {number: each.position for number, each in self._partitions.items()}
            count = len(self._buffer)
        try:
            for number, position in positions.items():
                place = TopicPartition(self._topic, number)
                low, high = self._client.get_watermark_offsets(place, cached=True)
                if high < 0:
                    low, high = self._client.get_watermark_offsets(place, REQUEST_SECONDS)
                if position < 0:
                    (committed,) = self._client.committed([place], REQUEST_SECONDS)
                    position = max(committed.offset, low)
                count += max(0, high - position)
        except KafkaException as error:
            raise Unavailable(f"{self._label} can't be counted: {_reason(error)}.") from error
        return count

    def _has_space(self) -> bool:
        unsettled = sum(map(len, self._partitions.values()))
        return len(self._buffer) < self._buffer_size and unsettled < self._max_unsettled

    def _wait_for_space(self, seconds: float) -> bool:
        with self._lock:
            self._lock.wait_for(lambda: self._is_closing or self._calls or self._has_space(), seconds)
            return self._has_space()

    def _poll_paused(self) -> None:
        """Poll without receiving messages, to stay in the group, until the buffer has space."""
        paused: list[TopicPartition] = []
        while not self._is_closing and not self._wait_for_space(0):
            if (assigned := self._client.assignment()) != paused:
                self._client.pause(assigned)
                paused = assigned
            self._poll(1)
            self._calls.serve()
            self._probe()
        self._client.resume(self._client.assignment())

    def _poll(self, limit: int) -> None:
        first = self._client.poll(POLL_SECONDS)
        if first is not None:
            messages = [first]
            if limit > 1:
                messages += self._client.consume(limit - 1, 0)
            self._receive(messages)
            self._on_change()

    def _receive(self, messages: list[Message]) -> None:
        with self._lock:
            for message in messages:
                error, (number, offset) = message.error(), place_of(message)
                partition = self._partitions.get(number)
                if error is None:
                    self.outage = self._tls_problem = None
                    if partition is not None and not partition.is_revoked and partition.add(offset):
                        self._buffer.append((message, partition.generation))
                elif error.code() != KafkaError._PARTITION_EOF:
                    self._note_error(error)
                elif partition is not None:
                    self.outage = self._tls_problem = None
                    partition.reach_end(offset)

    def _probe(self) -> None:
        """Check regularly whether an outage has ended, as an idle broker sends nothing."""
        if self.outage is None or time.monotonic() < self._probe_at:
            return
        self._probe_at = time.monotonic() + PROBE_SECONDS
        with suppress(KafkaException):
            self._client.list_topics(self._topic, PROBE_SECONDS)
            self.outage = self._tls_problem = None

    def _note_error(self, error: KafkaError) -> None:
        code, text = error.code(), f"{self._label} can't be read: {client_reason(error.str())}"
        if code in _REFUSALS:
            self._failure = InvalidRequest(f"{text}; check user, password and the group's permissions.")
        elif code in _MISSING:
            self._failure = NotFound(f"{text}; create the topic, or name another.")
        elif code == KafkaError._SSL:
            self.outage = self._tls_problem = f"{client_reason(error.str())}. {TLS_ADVICE}."
        elif code in (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT):
            self.outage = self._tls_problem or client_reason(error.str())
        else:
            logger().retry("source.refused", topic=self._topic, reason=error.str())
        self._on_change()

    # -- rebalances, called by polls ---

    def _assign(self, _: Consumer, places: list[TopicPartition]) -> None:
        with self._lock:
            for place in places:
                self._generation += 1
                self._partitions[place.partition] = Partition(self._generation)
            self.has_joined = True
        self._on_change()

    def _revoke(self, _: Consumer, places: list[TopicPartition]) -> None:
        """Wait for messages in progress and commit, so that the next member does not receive them again."""
        with self._lock:
            revoked = self._remove_from_buffer(places)
            seconds = 0.0 if self._is_closing else REVOKE_SECONDS
            self._lock.wait_for(lambda: all(each.is_idle for each in revoked.values()), seconds)
            targets = {number: each for number, each in revoked.items() if each.has_commit}
        try:
            self._commit(targets)
        except Unavailable as error:
            logger().warning("source.commit_failed", topic=self._topic, error=str(error))
        self._forget(revoked)

    def _lose(self, _: Consumer, places: list[TopicPartition]) -> None:
        """Forget partitions that the group reassigned while this member was paused or disconnected."""
        with self._lock:
            lost = self._remove_from_buffer(places)
        logger().warning("source.partitions_lost", topic=self._topic, partitions=sorted(lost))
        self._forget(lost)

    def _remove_from_buffer(self, places: list[TopicPartition]) -> dict[int, Partition]:
        revoked = {
            place.partition: self._partitions[place.partition]
            for place in places
            if place.partition in self._partitions
        }
        for each in revoked.values():
            each.is_revoked = True
        self._buffer = deque(each for each in self._buffer if place_of(each[0])[0] not in revoked)
        return revoked

    def _forget(self, revoked: dict[int, Partition]) -> None:
        with self._lock:
            for number in revoked:
                del self._partitions[number]
        self._on_revoke([each.generation for each in revoked.values()])

    def _commit(self, targets: dict[int, Partition]) -> None:
        with self._lock:
            offsets = {number: each.offset_to_commit for number, each in targets.items()}
        if not offsets:
            return
        places = [TopicPartition(self._topic, number, offset) for number, offset in offsets.items()]
        try:
            answers = self._client.commit(offsets=places, asynchronous=False) or []
            for answer in answers:
                if answer.error is not None:
                    raise KafkaException(answer.error)
        except (KafkaException, RuntimeError) as error:
            if isinstance(error, KafkaException) and error.args[0].code() in _STALE:
                logger().warning("source.commit_stale", topic=self._topic, reason=_reason(error))
                return
            raise Unavailable(
                f"{self._label} can't be answered: {_reason(error)}. It is retried when Kafka is available."
            ) from error
        with self._lock:
            for number, offset in offsets.items():
                targets[number].committed = offset


def place_of(message: Message) -> tuple[int, int]:
    """Return the partition and offset of a message; 0 if an error has none."""
    return message.partition() or 0, message.offset() or 0


def _reason(error: Exception) -> str:
    first = error.args[0] if error.args else error
    return client_reason(first.str() if isinstance(first, KafkaError) else str(first))
