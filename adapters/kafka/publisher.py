"""The publisher port over a Kafka producer, whose calls run in a thread."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from postroom.adapters.kafka.settings import KafkaSettings, client_reason
from postroom.application.ingest.broker_access import TLS_ADVICE
from postroom.application.ports.outbox import PublishAck
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable

TIMEOUT_MS = 10_000
METADATA_MS = 5_000
"""Time after which a topic without metadata counts as missing."""
POLL_SECONDS = 0.1
CLOSE_SECONDS = 2.0

_REFUSALS = (
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
)
_LOGIN_REFUSALS = (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED)


class KafkaPublisher:
    """A publisher to the topics of a Kafka cluster; all in-sync replicas confirm each message.

    The producer is idempotent: its own retries store a message once. It is replaced when a message is not
    confirmed in time, as some brokers refuse to continue its session.

    Arguments:
        timeout_ms: time within which the brokers must confirm a message.
        key_header: header with the message key, which selects the partition; None publishes without keys.

    Raises: InvalidRequest for settings that the client refuses.
    """

    def __init__(
        self, settings: KafkaSettings, timeout_ms: int = TIMEOUT_MS, *, key_header: str | None = None
    ) -> None:
        self._key_header = key_header
        self._loop = asyncio.get_running_loop()
        self._is_closed = threading.Event()
        self._options = settings.client_settings() | {
            "enable.idempotence": True,
            "delivery.timeout.ms": timeout_ms,
            "request.timeout.ms": timeout_ms,
            "topic.metadata.propagation.max.ms": min(METADATA_MS, timeout_ms // 2),
            "partitioner": "murmur2_random",  # as Kafka's Java client does
            "linger.ms": 0,
            "allow.auto.create.topics": False,
            "log_level": 0,
            "error_cb": self._note_error,
        }
        self._problem: str | None = None
        """Why no connection could be opened last, if so."""
        try:
            self._client = Producer(self._options)
        except (KafkaException, ValueError) as error:
            raise InvalidRequest(f"The Kafka producer can't be created: {error}.") from error
        self._replaced: deque[Producer] = deque()
        self._thread = threading.Thread(target=self._poll, name="kafka producer", daemon=True)
        self._thread.start()

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        """Publish one message to the topic `subject`; see `Publisher.publish`."""
        confirmed: asyncio.Future[PublishAck] = self._loop.create_future()

        def on_delivery(error: KafkaError | None, message: Message) -> None:
            def resolve() -> None:
                if confirmed.cancelled():
                    return
                if error is not None:
                    confirmed.set_exception(_translate(subject, error, self._problem))
                else:
                    self._problem = None
                    confirmed.set_result(PublishAck(subject, message.offset() or 0, False))

            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(resolve)

        if self._is_closed.is_set():
            raise Unavailable(f"Kafka topic {subject} can't be written: the publisher was closed.")
        pairs: list[tuple[str, str | bytes | None]] = [(name, value) for name, value in headers.items()]
        key = headers.get(self._key_header) if self._key_header else None
        client = self._client
        try:
            client.produce(subject, payload, key=key, headers=pairs, on_delivery=on_delivery)
        except BufferError as error:
            raise Unavailable(f"Kafka topic {subject} can't be written: {error}; it is retried.") from error
        except KafkaException as error:
            raise _translate(subject, error.args[0]) from error
        try:
            return await confirmed
        except Unavailable:
            self._replace(client)
            raise

    async def close(self) -> None:
        """Disconnect; further calls have no effect."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    def _note_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._SSL:
            self._problem = f"{client_reason(error.str())}. {TLS_ADVICE}"
        elif error.code() in _LOGIN_REFUSALS:
            self._problem = f"{client_reason(error.str())}. Check user and password_file"

    def _replace(self, client: Producer) -> None:
        """Start a new session, unless another failed message has done so."""
        if client is self._client and not self._is_closed.is_set():
            self._client = Producer(self._options)
            self._replaced.append(client)

    def _poll(self) -> None:
        while not self._is_closed.is_set():
            while self._replaced:
                client = self._replaced.popleft()
                client.purge()  # unsent messages must not arrive after their repetition
                client.flush(POLL_SECONDS)  # resolves the futures of purged messages
            self._client.poll(POLL_SECONDS)


def _translate(topic: str, error: KafkaError, problem: str | None = None) -> PostroomError:
    """Return an error of the client as ours.

    Arguments:
        problem: why the client has no connection; its own error reports only a timeout.
    """
    if error.code() in _REFUSALS:
        return InvalidRequest(
            f"Kafka refuses a message for topic {topic}: {error.str()}; create the topic, or raise its "
            "limits."
        )
    reason = problem if problem and error.code() == KafkaError._MSG_TIMED_OUT else error.str()
    return Unavailable(f"Kafka did not confirm a message for topic {topic}: {reason}; it is retried.")


T = TypeVar("T")


class ThreadCalls:
    """A queue of calls that a thread makes, and whose results it passes to the event loop.

    Arguments:
        changed: notified when a call is added; its lock guards the queue.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._calls: list[tuple[Callable[[], object], asyncio.Future[object]]] = []
        self._failure: PostroomError | None = None

    def __len__(self) -> int:
        """Return the number of calls that wait."""
        return len(self._calls)

    async def request(self, call: Callable[[], T]) -> T:
        """Have the thread make a call, and return its result.

        Raises: the error of the call, or the error of `end`.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._calls.append((call, future))  # type: ignore[arg-type]  # a result fits its future
            self._changed.notify_all()
        return await future

    def serve(self) -> None:
        """Make the calls that wait; called by the thread."""
        for call, future in self._take():
            try:
                _resolve(future, None, call())
            except PostroomError as error:
                _resolve(future, error)

    def end(self, failure: PostroomError) -> None:
        """Fail the calls that wait, and all later ones; called by the thread."""
        with self._changed:
            self._failure = failure
        for _, future in self._take():
            _resolve(future, failure)

    def _take(self) -> list[tuple[Callable[[], object], asyncio.Future[object]]]:
        with self._changed:
            calls, self._calls = self._calls, []
        return calls


def _resolve(future: asyncio.Future[object], error: PostroomError | None, result: object = None) -> None:
    def resolve() -> None:
        if future.done():  # the caller was cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    with suppress(RuntimeError):  # the loop was closed
        future.get_loop().call_soon_threadsafe(resolve)
