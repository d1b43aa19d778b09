"""The source port over a durable pull consumer of JetStream (SDS-047 PORT-047-004 `JetStreamConsumer`)."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec
from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig
from nats.js.errors import NotFoundError

from postroom.adapters.nats.client import SupervisedClient
from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.pull_consumer import (
    CREATED,
    STREAM_NOT_FOUND,
    PullConsumer,
    create_consumer,
    find_or_create,
    missing_error,
)
from postroom.adapters.nats.settings import NatsSettings
from postroom.application.ports.source import Headers, SourceMessage
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import wait_at_most
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable

ROUND_TRIP_SECONDS = 2.0
"""Time within which a server answers, in addition to the expiry of a request."""
HEARTBEAT_SECONDS = 1.0
"""Interval of the server's heartbeats for a request that waits; without them, the request was lost."""
SILENCE_SECONDS = 5.0
"""Time without answers to requests after which the connection is replaced."""
PAUSE_SECONDS = 0.1
"""Pause after the server refused a request."""
REQUEST_BYTES = 16 << 20
"""Maximum message bytes of one request, to limit the memory for large messages."""

_MS = 1_000_000
_END_OF_REQUEST = ("404", "408")
"""Statuses of a request that ended because no message was available, or none before its expiry."""
_HEARTBEAT = "100"
"""Status of a request that still waits."""


class _Request(msgspec.Struct):
    """A pull request: how many messages are outstanding, when it expires, and when it counts as lost."""

    outstanding: int
    ends_at: float
    lost_at: float
    has_delivered: bool = False


class JetStreamSource:
    """A durable pull consumer whose deliveries are settled one by one; created by `open`.

    A pull request ends when the available messages are delivered, so none arrives after `fetch` returned.
    With `prefetch`, messages are requested ahead, and arrive between calls.
    """

    def __init__(
        self,
        client: SupervisedClient,
        stream: str,
        config: ConsumerConfig,
        prefetch: int,
        resources: AsyncExitStack,
        consumer: PullConsumer,
    ) -> None:
        self._client = client
        self._consumer = consumer
        self._stream = stream
        self._durable = config.durable_name or ""
        self._config = config
        self._prefetch = prefetch
        self._resources = resources
        self._inbox = client.new_inbox()
        self._arrived = asyncio.Event()
        self._buffer: deque[SourceMessage] = deque()
        self._requests: dict[bytes, _Request] = {}
        self._request_count = 0
        self._reconnects = 0
        self._silent_since: float | None = None
        self._resume_at = 0.0
        self._refused: str | None = None
        self._closed = False

    @classmethod
    async def open(
        cls, settings: NatsSettings, consumer: PullConsumer, *, prefetch: int = 0
    ) -> "JetStreamSource":
        """Connect, and look up or create the consumer.

        Arguments:
            prefetch: messages requested ahead; they count as delivered, so `ack_wait_ms` runs for them.

        Raises:
            NotFound: there is no such stream or consumer.
            InvalidRequest: the consumer exists with another configuration.
            Unavailable: NATS or its JetStream can't be reached.
        """
        async with AsyncExitStack() as resources:
            client = await resources.enter_async_context(connect(settings, f"postroom {consumer.durable}"))
            try:
                stream, config = await find_or_create(client.jetstream(), consumer)
                source = cls(client, stream, config, prefetch, resources, consumer)
                await source._listen()
            except (NatsError, OSError, TimeoutError) as error:
                raise Unavailable(
                    f"JetStream at {settings.shown_url} doesn't answer: {summarize(error)}. "
                    "Check that the server runs with JetStream on."
                ) from error
            source._resources = resources.pop_all()
            return source

    @property
    def client(self) -> SupervisedClient:
        """Return the connection."""
        return self._client

    async def count_pending(self) -> int:
        """Return the number of messages that were not delivered yet.

        Raises: Unavailable when NATS does not answer.
        """
        try:
            info = await self._client.jetstream().consumer_info(self._stream, self._durable)
        except (NatsError, OSError, TimeoutError) as error:
            raise self._unavailable("can't be counted", error) from error
        return info.num_pending or 0

    @property
    def ack_wait_ms(self) -> int:
        """Return how long a delivery may stay unsettled before the message is redelivered."""
        return round((self._config.ack_wait or 30) * 1_000)

    async def fetch(self, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        """Return up to `limit` messages, one call at a time; see `Source.fetch`.

        Raises:
            NotFound: the consumer or its stream was deleted.
            InvalidRequest: the consumer's limits are too low for `prefetch`.
            Unavailable: NATS can't be reached; the connection is restored in the background.
        """
        now = _now()
        deadline = now + wait_ms / 1_000
        has_requested = False
        while True:
            await self._forget_lost(now)
            await self._check()
            if (self._prefetch or not self._buffer) and (now < deadline or not has_requested):
                if now >= self._resume_at:
                    await self._request(limit, now, deadline)
                has_requested = True
            if self._buffer and (self._prefetch or not self._requests):
                return [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]
            if now >= deadline and not any(r.ends_at <= deadline for r in self._requests.values()):
                if not self._client.is_connected:
                    raise self._unavailable("can't be read", "NATS is not connected")
                return []
            await self._wait(now, deadline)
            now = _now()

    async def ack(self, messages: Sequence[SourceMessage]) -> None:
        """Ack deliveries, and return once the server has read the acks; see `Source.ack`.

        The server persists acks later: after a crash it redelivers messages whose acks were lost.
        """
        await self._answer(messages, b"+ACK")

    async def nack(self, messages: Sequence[SourceMessage], delay_ms: int) -> None:
        """Request redelivery after a delay; see `Source.nack`."""
        await self._answer(messages, b'-NAK {"delay": %d}' % (delay_ms * _MS) if delay_ms > 0 else b"-NAK")

    async def extend(self, messages: Sequence[SourceMessage]) -> None:
        """Restart the ack wait of deliveries; see `Source.extend`."""
        await self._answer(messages, b"+WPI")

    async def close(self) -> None:
        """Nack prefetched messages, and disconnect; see `Source.close`."""
        if not self._closed:
            self._closed = True
            with suppress(PostroomError, NatsError, OSError):
                # Unsubscribe first, or the server would redeliver the nacked messages to our own request.
                await self._subscription.unsubscribe()
                await self._client.flush()
                await self._answer(list(self._buffer), b"-NAK")
            await self._resources.aclose()

    # -- requests ---

    async def _listen(self) -> None:
        self._subscription = await self._client.subscribe_bytes(
            f"{self._inbox}.*", self._deliver, self._arrived.set
        )
        await self._client.flush()

    async def _request(self, limit: int, now: float, deadline: float) -> None:
        """Request the messages that are not yet buffered or requested."""
        requested = sum(request.outstanding for request in self._requests.values())
        batch = limit + self._prefetch - len(self._buffer) - requested
        if batch <= (self._prefetch // 2 if self._requests else 0) or not self._client.is_connected:
            return
        # `no_wait` with an expiry waits for the first message, delivers all available ones, and ends.
        request: dict[str, object] = {
            "batch": batch,
            "no_wait": True,
            "max_bytes": max(REQUEST_BYTES, 2 * self._client.max_payload),
        }
        if deadline > now:
            request["expires"] = max(int((deadline - now) * 1_000), 1) * _MS
        next_answer_at = deadline
        if deadline - now > 2 * HEARTBEAT_SECONDS:  # the server refuses heartbeats of shorter requests
            next_answer_at = now + HEARTBEAT_SECONDS
            request["idle_heartbeat"] = int(HEARTBEAT_SECONDS * 1_000) * _MS
        self._request_count += 1
        reply = f"{self._inbox}.{self._request_count}"
        self._requests[reply.encode()] = _Request(batch, deadline, next_answer_at + ROUND_TRIP_SECONDS)
        try:
            await self._client.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._durable}",
                msgspec.json.encode(request),
                reply,
            )
        except (NatsError, OSError) as error:
            del self._requests[reply.encode()]
            raise self._unavailable("can't be read", error) from error

    async def _wait(self, now: float, deadline: float) -> None:
        """Wait for a message, the deadline, or the next time to act."""
        expiries = [request.lost_at for request in self._requests.values()]
        times = (deadline, self._resume_at, *expiries)
        self._arrived.clear()
        await wait_at_most(min((time - now for time in times if time > now), default=0), self._arrived.wait())

    async def _forget_lost(self, now: float) -> None:
        """Drop requests that the server lost: all requests after a reconnect, else the unanswered ones.

        A request that reaches the server while it deletes the consumer gets neither an answer nor heartbeats.
        """
        reconnects = self._client.stats["reconnects"]
        if reconnects != self._reconnects:
            self._reconnects = reconnects
            self._requests.clear()
            self._silent_since = None
            return
        lost = [reply for reply, request in self._requests.items() if request.lost_at <= now]
        for reply in lost:
            if self._requests.pop(reply).ends_at > now and self._client.is_connected:
                self._refused = "no heartbeats"
        if lost and self._client.is_connected:
            await self._note_silence(now)

    async def _note_silence(self, now: float) -> None:
        """Replace a connection without answers to requests: the server may have dropped the subscription."""
        if self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= SILENCE_SECONDS:
            self._silent_since = None
            logger().retry("source.silent", consumer=self._durable, stream=self._stream)
            await self._client.force_reconnect()

    async def _check(self) -> None:
        """Raise when the source is closed, or when the server refused a request permanently.

        If this program created the consumer, create it again: the server then also delivers messages again
        that are stored already, which are skipped as duplicates.
        """
        if self._closed:
            raise self._unavailable("can't be read", "it was closed")
        reason, self._refused = self._refused, None
        if reason is None:
            return
        if reason.startswith("Exceeded MaxRequest"):
            raise InvalidRequest(
                f"{self._name()} refuses to prefetch {self._prefetch:,} messages: {reason}. "
                "Raise the consumer's limits, or lower the batch size."
            )
        jetstream = self._client.jetstream()
        try:
            try:
                await jetstream.consumer_info(self._stream, self._durable)
            except NotFoundError as error:
                is_ours = self._consumer.create and self._config.description == CREATED
                if not is_ours or error.err_code == STREAM_NOT_FOUND:
                    raise missing_error(self._stream, self._durable, error) from error
                logger().warning("source.consumer_deleted", consumer=self._durable, stream=self._stream)
                self._config = await create_consumer(jetstream, self._stream, self._consumer)
                return
        except (NatsError, OSError, TimeoutError) as error:
            raise self._unavailable("can't be read", error) from error
        logger().retry("source.refused", consumer=self._durable, stream=self._stream, reason=reason)

    # -- deliveries ---

    def _deliver(self, subject: bytes, reply: bytes | None, headers: bytes, data: bytes) -> None:
        """Buffer a message, or process the status of a request."""
        self._silent_since = None
        if reply is None:
            self._note_status(subject, headers)
            return
        # $JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<...>.<time>.<pending>; servers that know domains
        # put domain and account before the stream, and a random token at the end.
        words = reply.split(b".")
        at = 4 if len(words) == 9 else 6
        self._buffer.append(
            SourceMessage(
                subject.decode(),
                data,
                LazyHeaders(headers) if headers else _NO_HEADERS,
                int(words[at]),
                words[at + 1].decode(),
                reply,
            )
        )
        for oldest, request in self._requests.items():  # the server answers requests in order
            # The request ends with the available messages.
            request.lost_at = request.ends_at + ROUND_TRIP_SECONDS
            request.outstanding -= 1
            request.has_delivered = True
            if not request.outstanding:
                del self._requests[oldest]
            break

    def _note_status(self, subject: bytes, headers: bytes) -> None:
        status, _, reason = headers.partition(b"\r\n")[0].removeprefix(b"NATS/1.0 ").decode().partition(" ")
        if status == _HEARTBEAT:
            if (waiting := self._requests.get(subject)) is not None:
                waiting.lost_at = min(waiting.ends_at, _now() + HEARTBEAT_SECONDS) + ROUND_TRIP_SECONDS
            return
        request = self._requests.pop(subject, None)
        if request is None:
            return
        if request.has_delivered or (status in _END_OF_REQUEST and _now() >= request.ends_at - PAUSE_SECONDS):
            return
        self._resume_at = _now() + PAUSE_SECONDS  # a refused request would be refused again immediately
        if status not in _END_OF_REQUEST:
            self._refused = reason or f"status {status}"

    # -- settlement ---

    async def _answer(self, messages: Sequence[SourceMessage], answer: bytes) -> None:
        """Send an answer for each delivery in one write, and return once the server has read it."""
        if not messages:
            return
        if not self._client.is_connected:
            raise self._unavailable("can't be settled", "NATS is not connected")
        end = b" %d\r\n%b\r\n" % (len(answer), answer)
        try:
            # Separate calls of `publish` would take longer than receiving the messages.
            await self._client._send_command(b"".join([b"PUB " + each.token + end for each in messages]))
            await self._client.flush(ROUND_TRIP_SECONDS)
        except (NatsError, OSError, TimeoutError) as error:
            raise self._unavailable("can't be settled", error) from error

    # -- errors ---

    def _name(self) -> str:
        return f"Consumer {self._durable} of stream {self._stream}"

    def _unavailable(self, what: str, why: object) -> Unavailable:
        reason = str(why) or type(why).__name__
        return Unavailable(f"{self._name()} {what}: {reason}. It is retried when NATS is available.")


class LazyHeaders(Headers):
    """Headers that are parsed on first access."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def __getattr__(self, name: str) -> Any:  # called for slots that are not set yet
        if name not in ("pairs", "_first"):
            raise AttributeError(name)
        lines = self._raw.decode(errors="replace").split("\r\n")[1:]
        parts = [line.partition(":") for line in lines]
        super().__init__([(name, value.strip()) for name, colon, value in parts if colon])
        return getattr(self, name)


_NO_HEADERS: Mapping[str, str] = {}


def _now() -> float:
    return asyncio.get_running_loop().time()
