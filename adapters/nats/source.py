"""The source port over a durable pull consumer of JetStream (SDS-047 PORT-047-004 `JetStreamConsumer`)."""

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Literal

import msgspec
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from postroom.adapters.nats.connection import NatsSettings, connect
from postroom.adapters.nats.parser import ShortCutParser
from postroom.application.ports.source import SourceMessage
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest, NotFound, PostroomError, Unavailable

ROUND_TRIP_SECONDS = 2.0
"""How much longer than it was asked to wait a server may take to answer."""
PAUSE_SECONDS = 0.1
"""How long to wait after the server refused a request."""
REQUEST_BYTES = 16 << 20
"""Message bytes asked for at once, so that large messages don't fill the memory."""

_MS = 1_000_000
_STREAM_NOT_FOUND = 10059
_OVER = ("404", "408")
"""What the server ends a request with when there is nothing more to deliver, or nothing came in time."""


class PullConsumer(msgspec.Struct, frozen=True, kw_only=True):
    """Say which durable consumer to read.

    Arguments:
        stream: None takes the stream that has the first of `subjects`.
        subjects: those it is filtered by, `*` and `>` allowed; none takes what the consumer has.
        create: make it where it is missing, with what follows; one that exists keeps what it has.
        ack_wait_ms: how long a delivery may stay unsettled before it comes again.
        max_deliver: how often a message is delivered; -1: as often as it takes.
        max_ack_pending: deliveries that may be unsettled at once.
        deliver: what a new consumer begins with: `all` the stream has, or only what is `new`.
    """

    durable: str
    stream: str | None = None
    subjects: tuple[str, ...] = ()
    create: bool = False
    ack_wait_ms: int = 30_000
    max_deliver: int = -1
    max_ack_pending: int = 10_000
    deliver: Literal["all", "new"] = "all"


class _Request(msgspec.Struct):
    """What the server was asked for: how many are still to come, and when it ends if they don't."""

    left: int
    ends_at: float
    had_any: bool = False


class JetStreamSource:
    """Read a durable pull consumer, and settle every delivery by itself. Made by `open`.

    A request to the server ends when it has delivered what there was, so that a `fetch` leaves nothing behind
    that is delivered to nobody. With `prefetch` the next messages are asked for before those at hand are
    taken, and arrive while somebody works on these.
    """

    def __init__(
        self, client: Client, stream: str, config: ConsumerConfig, prefetch: int, resources: AsyncExitStack
    ) -> None:
        self._client = client
        self._stream = stream
        self._durable = config.durable_name or ""
        self._config = config
        self._prefetch = prefetch
        self._resources = resources
        self._inbox = client.new_inbox()
        self._arrived = asyncio.Event()
        self._buffer: deque[SourceMessage] = deque()
        self._requests: dict[bytes, _Request] = {}
        self._asked = 0
        self._reconnects = 0
        self._resume_at = 0.0
        self._refused: str | None = None
        self._closed = False

    @classmethod
    async def open(
        cls, settings: NatsSettings, consumer: PullConsumer, *, prefetch: int = 0
    ) -> "JetStreamSource":
        """Connect, and find or make the consumer.

        Arguments:
            prefetch: messages asked for ahead; they count as delivered, so `ack_wait_ms` runs for them.

        Raises:
            NotFound: there is no such stream or consumer.
            InvalidRequest: the consumer is there, but isn't what was asked for.
            Unavailable: NATS or its JetStream can't be reached.
        """
        async with AsyncExitStack() as resources:
            client = await resources.enter_async_context(connect(settings, f"postroom {consumer.durable}"))
            try:
                stream, config = await _find(client.jetstream(), consumer)
                source = cls(client, stream, config, prefetch, resources)
                await source._listen()
            except (NatsError, OSError, TimeoutError) as error:
                raise Unavailable(
                    f"JetStream at {settings.url} doesn't answer: {str(error) or type(error).__name__}. "
                    "Check that the server runs with JetStream on."
                ) from error
            source._resources = resources.pop_all()
            return source

    @property
    def max_deliver(self) -> int | None:
        """Return how often a message is delivered at most; None: as often as it takes."""
        limit = self._config.max_deliver
        return limit if limit is not None and limit > 0 else None

    @property
    def ack_wait_ms(self) -> int:
        """Return how long a delivery may stay unsettled before it comes again."""
        return round((self._config.ack_wait or 30) * 1_000)

    async def fetch(self, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        """Return up to `limit` messages, one call at a time; see `Source.fetch`.

        Raises:
            NotFound: the consumer or its stream was deleted.
            InvalidRequest: the consumer's limits don't allow such requests.
            Unavailable: NATS can't be reached; it is connected to again as soon as it can.
        """
        now = _now()
        deadline = now + wait_ms / 1_000
        is_asked = False
        while True:
            await self._check()
            self._forget_lost(now)
            if (self._prefetch or not self._buffer) and (now < deadline or not is_asked):
                if now >= self._resume_at:
                    await self._ask(limit, now, deadline)
                is_asked = True
            if self._buffer and (self._prefetch or not self._requests):
                return [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]
            if now >= deadline and not any(r.ends_at <= deadline for r in self._requests.values()):
                if not self._client.is_connected:
                    raise self._unavailable("can't be read", "NATS is not connected")
                return []
            await self._wait(now, deadline)
            now = _now()

    async def ack(self, messages: Sequence[SourceMessage]) -> None:
        """Settle deliveries for good, and return once the server has read it; see `Source.ack`.

        The server keeps it in its own time: what it forgets in a crash is delivered again.
        """
        await self._answer(messages, b"+ACK")

    async def nak(self, messages: Sequence[SourceMessage], delay_ms: int) -> None:
        """Ask for deliveries again after a while; see `Source.nak`."""
        await self._answer(messages, b'-NAK {"delay": %d}' % (delay_ms * _MS) if delay_ms > 0 else b"-NAK")

    async def keep(self, messages: Sequence[SourceMessage]) -> None:
        """Let the time that deliveries may stay unsettled begin anew; see `Source.keep`."""
        await self._answer(messages, b"+WPI")

    async def close(self) -> None:
        """Hand back what nobody fetched, and disconnect; see `Source.close`."""
        if not self._closed:
            self._closed = True
            with suppress(Unavailable):
                await self._answer(list(self._buffer), b"-NAK")
            await self._resources.aclose()

    # -- asking ---

    async def _listen(self) -> None:
        subscription = await self._client.subscribe(f"{self._inbox}.*")
        await self._client.flush()
        # nats-py has no setting for its parser; nothing of ours is under way yet, so it can be exchanged.
        self._client._ps = ShortCutParser(self._client, subscription._id, self._deliver, self._arrived.set)

    async def _ask(self, limit: int, now: float, deadline: float) -> None:
        """Ask for as many messages as are wanted and neither here nor under way."""
        under_way = sum(request.left for request in self._requests.values())
        wanted = limit + self._prefetch - len(self._buffer) - under_way
        if wanted <= (self._prefetch // 2 if self._requests else 0) or not self._client.is_connected:
            return
        # `no_wait` with an end: wait until then for the first message, deliver what there is, and be done.
        request: dict[str, object] = {
            "batch": wanted,
            "no_wait": True,
            "max_bytes": max(REQUEST_BYTES, 2 * self._client.max_payload),
        }
        if deadline > now:
            request["expires"] = max(int((deadline - now) * 1_000), 1) * _MS
        self._asked += 1
        reply = f"{self._inbox}.{self._asked}"
        self._requests[reply.encode()] = _Request(wanted, deadline)
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
        """Wait until something comes, or there is something to do."""
        lost = [request.ends_at + ROUND_TRIP_SECONDS for request in self._requests.values()]
        times = (deadline, self._resume_at, *lost)
        self._arrived.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(min((time - now for time in times if time > now), default=0)):
                await self._arrived.wait()

    def _forget_lost(self, now: float) -> None:
        """Forget requests that the server has forgotten, or ought to have ended."""
        reconnects = self._client.stats["reconnects"]
        late = now - ROUND_TRIP_SECONDS
        lost = [reply for reply, request in self._requests.items() if request.ends_at <= late]
        for reply in lost if reconnects == self._reconnects else list(self._requests):
            del self._requests[reply]
        self._reconnects = reconnects

    async def _check(self) -> None:
        """See to what the server refused: it may pass, or it may not."""
        if self._closed:
            raise self._unavailable("can't be read", "it was closed")
        reason, self._refused = self._refused, None
        if reason is None:
            return
        if reason.startswith("Exceeded MaxRequest"):
            raise InvalidRequest(
                f"{self._described()} refuses to deliver {self._prefetch:,} messages ahead: {reason}. "
                "Raise the consumer's limits, or lower the batch size."
            )
        try:
            await self._client.jetstream().consumer_info(self._stream, self._durable)
        except NotFoundError as error:
            raise _not_found(self._stream, self._durable, error) from error
        except (NatsError, OSError, TimeoutError) as error:
            raise self._unavailable("can't be read", error) from error
        logger().warning("source.refused", consumer=self._durable, stream=self._stream, reason=reason)

    # -- what comes ---

    def _deliver(self, subject: bytes, reply: bytes | None, headers: bytes, data: bytes) -> None:
        """Take a message, or what the server says of a request."""
        if reply is None:
            self._note_status(subject, headers)
            return
        # $JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<...>.<time>.<pending>; servers that know domains
        # put domain and account before the stream, and chance at the end.
        words = reply.split(b".")
        at = 4 if len(words) == 9 else 6
        self._buffer.append(
            SourceMessage(
                subject.decode(),
                data,
                _Headers(headers) if headers else _NO_HEADERS,
                int(words[at]),
                words[at + 1].decode(),
                reply,
            )
        )
        for oldest, request in self._requests.items():  # the server serves them in their order
            request.left -= 1
            request.had_any = True
            if not request.left:
                del self._requests[oldest]
            break

    def _note_status(self, subject: bytes, headers: bytes) -> None:
        status, _, reason = headers.partition(b"\r\n")[0].removeprefix(b"NATS/1.0 ").decode().partition(" ")
        request = self._requests.pop(subject, None)
        if request is None:
            return
        if request.had_any or (status in _OVER and _now() >= request.ends_at - PAUSE_SECONDS):
            return
        self._resume_at = _now() + PAUSE_SECONDS  # what is refused once is refused again at once
        if status not in _OVER:
            self._refused = reason or f"status {status}"

    # -- answering ---

    async def _answer(self, messages: Sequence[SourceMessage], answer: bytes) -> None:
        """Answer deliveries in one write, and return once the server has read it."""
        if not messages:
            return
        if not self._client.is_connected:
            raise self._unavailable("can't be answered", "NATS is not connected")
        end = b" %d\r\n%b\r\n" % (len(answer), answer)
        try:
            # A `publish` for each would take longer than reading them did.
            await self._client._send_command(b"".join([b"PUB " + each.token + end for each in messages]))
            await self._client.flush(round(ROUND_TRIP_SECONDS))
        except (NatsError, OSError, TimeoutError) as error:
            raise self._unavailable("can't be answered", error) from error

    # -- words ---

    def _described(self) -> str:
        return f"Consumer {self._durable} of stream {self._stream}"

    def _unavailable(self, what: str, why: object) -> Unavailable:
        reason = str(why) or type(why).__name__
        return Unavailable(f"{self._described()} {what}: {reason}. It is tried again when NATS answers.")


class _Headers(Mapping[str, str]):
    """The headers of a message, parsed when somebody looks; of one that stands twice the first counts."""

    __slots__ = ("_parsed", "_raw")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._parsed: dict[str, str] | None = None

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> dict[str, str]:
        if self._parsed is None:
            self._parsed = {}
            for line in self._raw.decode(errors="replace").split("\r\n")[1:]:
                name, colon, value = line.partition(":")
                if colon:
                    self._parsed.setdefault(name, value.strip())
        return self._parsed


_NO_HEADERS: Mapping[str, str] = {}


async def _find(stream: JetStreamContext, consumer: PullConsumer) -> tuple[str, ConsumerConfig]:
    """Return the stream's name, and the consumer as the server has it; make it where that is wanted."""
    name = consumer.stream or await _stream_of(stream, consumer.subjects)
    try:
        config = (await stream.consumer_info(name, consumer.durable)).config
    except NotFoundError as error:
        if not consumer.create or error.err_code == _STREAM_NOT_FOUND:
            raise _not_found(name, consumer.durable, error) from error
        return name, await _create(stream, name, consumer)
    _check_config(name, consumer, config)
    return name, config


async def _stream_of(stream: JetStreamContext, subjects: tuple[str, ...]) -> str:
    if not subjects:
        raise InvalidRequest("Neither a stream nor a subject was named to read; name one of them.")
    try:
        return await stream.find_stream_name_by_subject(subjects[0])
    except NotFoundError:
        raise NotFound(
            f"No stream of this NATS server has the subject {subjects[0]}; define one under [streams] in "
            "the settings file and run postroom streams apply."
        ) from None


async def _create(stream: JetStreamContext, name: str, consumer: PullConsumer) -> ConsumerConfig:
    config = ConsumerConfig(
        durable_name=consumer.durable,
        description="made by postroom",
        deliver_policy=DeliverPolicy(consumer.deliver),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=consumer.ack_wait_ms / 1_000,
        max_deliver=consumer.max_deliver,
        max_ack_pending=consumer.max_ack_pending,
        filter_subject=consumer.subjects[0] if len(consumer.subjects) == 1 else None,
        filter_subjects=list(consumer.subjects) if len(consumer.subjects) > 1 else None,
    )
    try:
        made = (await stream.add_consumer(name, config)).config
    except ServiceUnavailableError:
        raise
    except APIError as error:
        raise InvalidRequest(
            f"Stream {name} refuses a consumer {consumer.durable} of "
            f"{', '.join(consumer.subjects) or 'all subjects'}: {error.description}. "
            "Check the subjects and names in the settings."
        ) from error
    logger().info("source.consumer_made", consumer=consumer.durable, stream=name, subjects=consumer.subjects)
    return made


def _check_config(stream: str, consumer: PullConsumer, config: ConsumerConfig) -> None:
    """Raise `InvalidRequest` when a consumer is not what we can read, or reads something else."""
    described = f"Consumer {consumer.durable} of stream {stream}"
    if config.deliver_subject is not None:
        raise InvalidRequest(f"{described} pushes; define a pull consumer, or choose another name for ours.")
    if config.ack_policy != AckPolicy.EXPLICIT:
        raise InvalidRequest(
            f"{described} has the ack policy {config.ack_policy}, with which messages can get lost; "
            "define it with explicit, or choose another name for ours."
        )
    subjects = config.filter_subjects or ([config.filter_subject] if config.filter_subject else [])
    if consumer.subjects and set(subjects) != set(consumer.subjects):
        raise InvalidRequest(
            f"{described} reads {', '.join(subjects) or 'all subjects'}, but the settings say "
            f"{', '.join(consumer.subjects)}; change one of them, or choose another name for ours."
        )


def _not_found(stream: str, durable: str, error: NotFoundError) -> PostroomError:
    missing = (
        f"stream {stream}"
        if error.err_code == _STREAM_NOT_FOUND
        else f"consumer {durable} of stream {stream}"
    )
    return NotFound(
        f"This NATS server has no {missing}; define it in the settings file and run postroom streams apply."
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
