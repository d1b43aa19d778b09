"""The source port over a consumer group of a Redis stream, and the publisher port."""

import os
import re
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from time import monotonic
from typing import Any, TypeVar
from uuid import uuid4

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from postroom.adapters.redis.settings import RedisSettings, StreamConsumer
from postroom.application.ingest.broker_access import tls_advice
from postroom.application.ports.outbox import PublishAck
from postroom.application.ports.source import SourceMessage
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest, Unavailable

TIMEOUT_SECONDS = 5.0
"""Time within which a server answers, in addition to the time that a read blocks."""
BLOCK_MS = 1_000
"""Maximum duration of a blocking read, which delays closing and redelivery."""
USER_ADVICE = "check user and password_file, or the URL's user and password"
FORGET_CONSUMERS_MS = 24 * 60 * 60 * 1_000

T = TypeVar("T")


class RedisStreamSource:
    """One consumer of a consumer group, whose deliveries are settled one by one; created by `open`.

    An unsettled entry that has been idle for `ack_wait_ms` is claimed by the next consumer that fetches.
    Redis stores delivery counts and idle times, so they survive a crash of either side. A delayed redelivery
    sets the idle time of the entry; a delay longer than `ack_wait_ms` is renewed by this process.
    """

    def __init__(self, client: Redis, consumer: StreamConsumer) -> None:
        self._client = client
        self._stream = consumer.stream
        self._group = consumer.group
        self._field = consumer.field.encode()
        self._name = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        self._where = consumer.shown_address
        self._defer = client.register_script(files(__package__).joinpath("defer.lua").read_text("utf-8"))
        self._forget = client.register_script(
            files(__package__).joinpath("forget_consumers.lua").read_text("utf-8")
        )
        self.ack_wait_ms = consumer.ack_wait_ms
        self._claim_interval = min(max(consumer.ack_wait_ms / 10_000, 0.05), 1.0)
        self._claim_at = 0.0
        self._deferred: dict[bytes, float] = {}
        self._renew_at = float("inf")
        self._closed = False

    @classmethod
    async def open(cls, consumer: StreamConsumer) -> "RedisStreamSource":
        """Connect, and create the group if it is missing.

        Raises:
            InvalidRequest: the URL is malformed, the key is not a stream, or Redis refuses the credentials.
            Unavailable: Redis can't be reached.
        """
        client = connect_redis(consumer, f"stream {consumer.stream}")
        source = cls(client, consumer)
        try:
            await source._ask("opened", source._create_group)
            await source._ask("opened", source._forget_consumers, FORGET_CONSUMERS_MS)
        except BaseException:
            await client.aclose()
            raise
        return source

    async def fetch(self, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        """Return up to `limit` messages, redelivered ones first; see `Source.fetch`."""
        deadline = monotonic() + wait_ms / 1_000
        while True:
            messages = await self._claim_idle(limit) if self._is_claim_due() else []
            if not messages:
                messages = await self._read_new(limit, min(deadline, self._claim_at))
            if messages or monotonic() >= deadline:
                return messages

    async def count_pending(self) -> int:
        """Return the number of entries that were not delivered yet; see `CountedSource.count_pending`.

        Raises: Unavailable also when Redis does not know, after entries were deleted.
        """
        for group in await self._ask("counted", self._client.xinfo_groups, self._stream):
            if group["name"].decode() == self._group and group.get("lag") is not None:
                return int(group["lag"])
        raise Unavailable(f"Redis stream {self._stream} of {self._where} does not tell its lag.")

    async def ack(self, messages: Sequence[SourceMessage]) -> None:
        """Ack deliveries; see `Source.ack`."""
        if messages:
            ids = [message.token for message in messages]
            await self._ask("answered", self._client.xack, self._stream, self._group, *ids)
            self._forget_deferred(ids)

    async def nack(self, messages: Sequence[SourceMessage], delay_ms: int) -> None:
        """Request redelivery after a delay; see `Source.nack`.

        If this source is closed earlier, the messages are redelivered after `ack_wait_ms` at the latest.
        """
        if messages:
            ids = [message.token for message in messages]
            await self._set_remaining(ids, delay_ms)
            now = monotonic()
            self._claim_at = min(self._claim_at, now + delay_ms / 1_000)
            if delay_ms > self.ack_wait_ms:
                self._deferred |= dict.fromkeys(ids, now + delay_ms / 1_000)
                self._renew_at = min(self._renew_at, now + self.ack_wait_ms / 2_000)

    async def extend(self, messages: Sequence[SourceMessage]) -> None:
        """Restart the ack wait of deliveries; see `Source.extend`."""
        if messages:
            await self._set_remaining([message.token for message in messages], self.ack_wait_ms)

    async def close(self) -> None:
        """Disconnect; see `Source.close`."""
        if not self._closed:
            self._closed = True
            await self._client.aclose()

    # -- reading ---

    async def _read_new(self, limit: int, until: float) -> list[SourceMessage]:
        """Read entries that were never delivered, waiting until `until` for the first."""
        wait_ms = min(round((until - monotonic()) * 1_000), BLOCK_MS)
        try:
            answer = await self._ask("read", self._read, limit, wait_ms if wait_ms > 0 else None)
        except _NoGroup:
            logger().warning("source.group_missing", stream=self._stream, group=self._group)
            await self._ask("read", self._create_group)
            return []
        return [self._message(id_, fields, 1) for _, entries in answer for id_, fields in entries]

    def _read(self, limit: int, wait_ms: int | None) -> Awaitable[Any]:
        return self._client.xreadgroup(
            self._group, self._name, {self._stream: ">"}, count=limit, block=wait_ms
        )

    async def _claim_idle(self, limit: int) -> list[SourceMessage]:
        """Claim entries of any consumer that have been idle for `ack_wait_ms`."""
        now = monotonic()
        self._claim_at = now + self._claim_interval
        if now >= self._renew_at:
            await self._renew_deferred(now)
        try:
            pending = await self._ask("read", self._pending, limit)
        except _NoGroup:
            return []
        if not pending:
            return []
        if len(pending) == limit:
            self._claim_at = now
        counts = {each["message_id"]: each["times_delivered"] for each in pending}
        claimed = await self._ask("read", self._claim, list(counts))
        self._forget_deferred(list(counts))
        existing = [(id_, fields) for id_, fields in claimed if fields is not None]
        await self._ack_trimmed(counts.keys() - {id_ for id_, _ in existing})
        return [self._message(id_, fields, counts[id_] + 1) for id_, fields in existing]

    def _pending(self, limit: int) -> Awaitable[Any]:
        return self._client.xpending_range(self._stream, self._group, "-", "+", limit, idle=self.ack_wait_ms)

    def _claim(self, ids: list[Any]) -> Awaitable[Any]:
        # Claims only entries that are still idle, so one of several concurrent consumers gets each entry.
        return self._client.xclaim(self._stream, self._group, self._name, self.ack_wait_ms, ids)

    async def _ack_trimmed(self, ids: set[bytes]) -> None:
        """Ack entries that were trimmed from the stream before they were acked."""
        for id_ in sorted(ids):
            if await self._ask("read", self._client.xrange, self._stream, id_, id_):
                continue  # another consumer claimed it first
            if await self._ask("answered", self._client.xack, self._stream, self._group, id_):
                logger().error("source.message_trimmed", stream=self._stream, sequence=id_.decode())

    def _message(self, id_: bytes, fields: dict[bytes, bytes], delivered: int) -> SourceMessage:
        return _read_entry(self._stream, self._field, id_, fields, delivered)

    def _is_claim_due(self) -> bool:
        return monotonic() >= self._claim_at

    # -- delays ---

    async def _set_remaining(self, ids: Sequence[bytes], remaining_ms: float) -> None:
        """Set the time until redelivery, `ack_wait_ms` at most."""
        idle = max(0, self.ack_wait_ms - round(remaining_ms))
        await self._ask("answered", self._run, self._defer, [self._group, self._name, idle, *ids])

    async def _renew_deferred(self, now: float) -> None:
        """Renew delays that are longer than `ack_wait_ms`, which Redis can't store."""
        for due in set(self._deferred.values()):
            ids = [id_ for id_, at in self._deferred.items() if at == due]
            await self._set_remaining(ids, (due - now) * 1_000)
            if due - now <= self.ack_wait_ms / 1_000:
                self._forget_deferred(ids)
        self._renew_at = now + self.ack_wait_ms / 2_000 if self._deferred else float("inf")

    def _forget_deferred(self, ids: Sequence[bytes]) -> None:
        if self._deferred:
            for id_ in ids:
                self._deferred.pop(id_, None)

    # -- requests ---

    async def _create_group(self) -> None:
        try:
            await self._client.xgroup_create(self._stream, self._group, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def _forget_consumers(self, idle_ms: int) -> None:
        await self._run(self._forget, [self._group, idle_ms])

    async def _run(self, script: Any, arguments: list[Any]) -> None:
        await script(keys=[self._stream], args=arguments)

    async def _ask(self, what: str, ask: Callable[..., Awaitable[T]], *arguments: Any, **named: Any) -> T:
        """Send a request, and translate its errors."""
        label = f"Redis stream {self._stream} of {self._where}"
        if self._closed:
            raise Unavailable(f"{label} can't be {what}: it was closed.")
        advice = "Check its URL and that the server runs." if what == "opened" else _RETRIED
        with _translate_errors(label, what, advice):
            try:
                return await ask(*arguments, **named)
            except AuthenticationError:
                raise
            except ResponseError as error:
                if "NOGROUP" in str(error):
                    raise _NoGroup(f"{label} has no group {self._group}; it is created again.") from error
                if str(error).startswith(("WRONGTYPE", "NOPERM", "ERR unknown command")):
                    raise InvalidRequest(
                        f"{label} can't be {what}: {error}; name a stream that supports consumer groups."
                    ) from error
                raise Unavailable(f"{label} can't be {what}: {error}.") from error


def _read_entry(
    stream: str, name: bytes, id_: bytes, fields: dict[bytes, bytes], delivered: int
) -> SourceMessage:
    """Return the message of an entry.

    Arguments:
        name: the field with the message; an entry with a single field may name it differently.
    """
    if name not in fields and len(fields) == 1:
        (name,) = fields
    headers = {
        key.decode(errors="replace"): value.decode(errors="replace")
        for key, value in fields.items()
        if key != name
    }
    return SourceMessage(stream, fields.get(name, b""), headers, delivered, id_.decode(), id_)


class _NoGroup(Unavailable):
    """The group is missing, for example after Redis lost its data."""


def connect_redis(settings: RedisSettings, what: str) -> Redis:
    """Return a client that connects at its first request.

    Arguments:
        what: purpose of the client, such as `stream orders`.

    Raises: InvalidRequest for a malformed URL, or a file that can't be read.
    """
    try:
        return Redis.from_url(
            **settings.client_options(),
            client_name="postroom",
            decode_responses=False,
            protocol=2,
            retry=Retry(NoBackoff(), 1),  # once, for a stale connection; the caller backs off
            socket_connect_timeout=TIMEOUT_SECONDS,
            socket_timeout=TIMEOUT_SECONDS + BLOCK_MS / 1_000,
        )
    except ValueError as error:
        raise InvalidRequest(
            f"The URL of Redis {what} is invalid: {error}; write redis://host:6379/0."
        ) from error


def reason(error: Exception) -> str:
    """Return the text of an error of the client."""
    return (str(error) or type(error).__name__).rstrip(".")


_ENTRY_ID = re.compile(r"\d{1,19}-\d{1,19}\Z", re.ASCII)
_REFUSALS = ("WRONGTYPE", "NOPERM", "READONLY")
_RETRIED = "It is retried when Redis is available."


@contextmanager
def _translate_errors(label: str, what: str, advice: str) -> Iterator[None]:
    """Raise InvalidRequest or Unavailable in the place of an error of Redis.

    Arguments:
        label: the stream.
        what: participle that follows "can't be".
        advice: what to do while Redis can't be reached.
    """
    try:
        yield
    except AuthenticationError as error:
        raise InvalidRequest(f"{label} can't be {what}: {reason(error)}; {USER_ADVICE}.") from error
    except ResponseError as error:
        kind = InvalidRequest if str(error).startswith(_REFUSALS) else Unavailable
        raise kind(f"{label} can't be {what}: {error}.") from error
    except (RedisError, OSError, TimeoutError) as error:
        raise Unavailable(
            f"{label} can't be {what}: {reason(error)}. {tls_advice(error) or advice}"
        ) from error


class RedisPublisher:
    """A publisher to the streams of a Redis server; headers are fields beside the message's.

    Arguments:
        field: the field with the message.

    Raises: InvalidRequest for a malformed URL.
    """

    def __init__(self, settings: RedisSettings, field: str = "data") -> None:
        self._where = settings.shown_address
        self._field = field
        self._client = connect_redis(settings, "publisher")

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        """Add one entry to the stream with the key `subject`; see `Publisher.publish`."""
        label = f"Redis stream {subject} of {self._where}"
        if self._field in headers:
            raise InvalidRequest(
                f"{label} refuses a message: its header {self._field} is the name of the field with the "
                "message; rename one of them."
            )
        fields: dict[Any, Any] = {self._field: payload, **headers}
        with _translate_errors(label, "written", _RETRIED):
            id_: Any = await self._client.xadd(subject, fields)
        return PublishAck(subject, int(id_.partition(b"-")[0]), False)

    async def close(self) -> None:
        """Disconnect; closing twice is fine."""
        await self._client.aclose()


class RedisDeadLetterQueue:
    """Dead letters in a Redis stream; its key is their subject, and a missing key is an empty stream.

    Arguments:
        field: the field with the message.

    Raises: InvalidRequest for a malformed URL.
    """

    def __init__(self, settings: RedisSettings, field: str = "data") -> None:
        self._where = settings.shown_address
        self._field = field.encode()
        self._client = connect_redis(settings, "dead letters")

    async def read(self, subject: str, limit: int) -> Sequence[SourceMessage]:
        """Return the oldest entries; see `DeadLetterQueue.read`."""
        return await self._range(subject, "-", "+", limit)

    async def find(self, subject: str, sequence: str) -> SourceMessage | None:
        """Return an entry by its id; see `DeadLetterQueue.find`."""
        if not _ENTRY_ID.match(sequence):
            raise InvalidRequest(
                f"{sequence!r} is not the number of a dead letter; list them to see their numbers."
            )
        messages = await self._range(subject, sequence, sequence, 1)
        return messages[0] if messages else None

    async def remove(self, message: SourceMessage) -> None:
        """Remove an entry permanently; see `DeadLetterQueue.remove`."""
        await self._ask(message.subject, self._client.xdel(message.subject, message.token))

    async def close(self) -> None:
        """Disconnect; closing twice is fine."""
        await self._client.aclose()

    async def _range(self, subject: str, first: str, last: str, limit: int) -> list[SourceMessage]:
        entries: Any = await self._ask(subject, self._client.xrange(subject, first, last, limit))
        return [_read_entry(subject, self._field, id_, fields, 1) for id_, fields in entries]

    async def _ask(self, subject: str, asking: Awaitable[T]) -> T:
        label = f"Redis stream {subject} of {self._where}"
        with _translate_errors(label, "used", "Try again when Redis is available."):
            return await asking
