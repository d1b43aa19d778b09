"""The source port over a consumer group of a Redis stream."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from postroom.application.ports.source import SourceMessage
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest, Unavailable

TIMEOUT_SECONDS = 5.0
"""How long a server may take to answer, beyond what it was asked to wait."""
BLOCK_MS = 1_000
"""How long one read waits at most, so that closing and redelivery don't wait long for it."""
FORGET_CONSUMERS_MS = 24 * 60 * 60 * 1_000

T = TypeVar("T")


class StreamConsumer(msgspec.Struct, frozen=True, kw_only=True):
    """Say which stream is read, and as which consumer group.

    Arguments:
        url: `redis://`, `rediss://` or `unix://`, as redis-py takes it.
        stream: key of the stream.
        group: made where it is missing, to read the stream from its beginning.
        field: of an entry, whose value is the message; an entry with one field only may name it as it likes.
        ack_wait_ms: how long a delivery may stay unsettled before it comes again.
    """

    url: str
    stream: str
    group: str
    field: str = "data"
    ack_wait_ms: int = 30_000


class RedisStreamSource:
    """Read a stream as one consumer of its group, and settle every delivery by itself. Made by `open`.

    A delivery that nobody settled comes again, to whichever consumer asks first, when it has been idle for
    `ack_wait_ms`; Redis counts deliveries and idleness by itself, so a crash of either side loses neither. To
    hand one back for a while is to tell Redis how idle it is; for longer than `ack_wait_ms` we remind it.
    """

    def __init__(self, client: Redis, consumer: StreamConsumer) -> None:
        self._client = client
        self._stream = consumer.stream
        self._group = consumer.group
        self._field = consumer.field.encode()
        self._name = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        self._where = _without_credentials(consumer.url)
        self._defer = client.register_script(files(__package__).joinpath("defer.lua").read_text("utf-8"))
        self._forget = client.register_script(
            files(__package__).joinpath("forget_consumers.lua").read_text("utf-8")
        )
        self.ack_wait_ms = consumer.ack_wait_ms
        self._look_every = min(max(consumer.ack_wait_ms / 10_000, 0.05), 1.0)
        self._look_at = 0.0
        self._deferred: dict[bytes, float] = {}
        self._remind_at = float("inf")
        self._closed = False

    @classmethod
    async def open(cls, consumer: StreamConsumer) -> "RedisStreamSource":
        """Connect, and find or make the group.

        Raises:
            InvalidRequest: the URL is none, the key holds something else than a stream, or Redis doesn't let
                us in.
            Unavailable: Redis can't be reached.
        """
        client = _client(consumer)
        source = cls(client, consumer)
        try:
            await source._ask("opened", source._make_group)
            await source._ask("opened", source._forget_consumers, FORGET_CONSUMERS_MS)
        except BaseException:
            await client.aclose()
            raise
        return source

    async def fetch(self, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        """Return up to `limit` messages, first those that come again; see `Source.fetch`."""
        deadline = _now() + wait_ms / 1_000
        while True:
            messages = await self._again(limit) if self._is_time_to_look() else []
            if not messages:
                messages = await self._new(limit, min(deadline, self._look_at))
            if messages or _now() >= deadline:
                return messages

    async def ack(self, messages: Sequence[SourceMessage]) -> None:
        """Settle deliveries for good; see `Source.ack`."""
        if messages:
            ids = [message.token for message in messages]
            await self._ask("answered", self._client.xack, self._stream, self._group, *ids)
            self._no_longer_defer(ids)

    async def nak(self, messages: Sequence[SourceMessage], delay_ms: int) -> None:
        """Ask for deliveries again after a while; see `Source.nak`.

        Should this source be gone by then, they come after `ack_wait_ms` at the latest.
        """
        if messages:
            ids = [message.token for message in messages]
            await self._set_remaining(ids, delay_ms)
            now = _now()
            self._look_at = min(self._look_at, now + delay_ms / 1_000)
            if delay_ms > self.ack_wait_ms:
                self._deferred |= dict.fromkeys(ids, now + delay_ms / 1_000)
                self._remind_at = min(self._remind_at, now + self.ack_wait_ms / 2_000)

    async def keep(self, messages: Sequence[SourceMessage]) -> None:
        """Let the time that deliveries may stay unsettled begin anew; see `Source.keep`."""
        if messages:
            await self._set_remaining([message.token for message in messages], self.ack_wait_ms)

    async def close(self) -> None:
        """Disconnect; see `Source.close`."""
        if not self._closed:
            self._closed = True
            await self._client.aclose()

    # -- reading ---

    async def _new(self, limit: int, until: float) -> list[SourceMessage]:
        """Read what was never delivered before, and wait for it until then."""
        wait_ms = min(round((until - _now()) * 1_000), BLOCK_MS)
        try:
            answer = await self._ask("read", self._read, limit, wait_ms if wait_ms > 0 else None)
        except _NoGroup:
            logger().warning("source.group_missing", stream=self._stream, group=self._group)
            await self._ask("read", self._make_group)
            return []
        return [self._message(id_, fields, 1) for _, entries in answer for id_, fields in entries]

    def _read(self, limit: int, wait_ms: int | None) -> Awaitable[Any]:
        return self._client.xreadgroup(
            self._group, self._name, {self._stream: ">"}, count=limit, block=wait_ms
        )

    async def _again(self, limit: int) -> list[SourceMessage]:
        """Take over what has been idle too long, whoever had it."""
        now = _now()
        self._look_at = now + self._look_every
        if now >= self._remind_at:
            await self._remind(now)
        try:
            pending = await self._ask("read", self._pending, limit)
        except _NoGroup:
            return []
        if not pending:
            return []
        if len(pending) == limit:
            self._look_at = now
        counts = {each["message_id"]: each["times_delivered"] for each in pending}
        claimed = await self._ask("read", self._claim, list(counts))
        self._no_longer_defer(list(counts))
        there = [(id_, fields) for id_, fields in claimed if fields is not None]
        await self._settle_removed(counts.keys() - {id_ for id_, _ in there})
        return [self._message(id_, fields, counts[id_] + 1) for id_, fields in there]

    def _pending(self, limit: int) -> Awaitable[Any]:
        return self._client.xpending_range(self._stream, self._group, "-", "+", limit, idle=self.ack_wait_ms)

    def _claim(self, ids: list[Any]) -> Awaitable[Any]:
        # Only what is still as idle: of several that claim the same entry, one gets it.
        return self._client.xclaim(self._stream, self._group, self._name, self.ack_wait_ms, ids)

    async def _settle_removed(self, ids: set[bytes]) -> None:
        """Settle what the stream dropped before anybody settled it: it can't be delivered any more."""
        for id_ in sorted(ids):
            if await self._ask("read", self._client.xrange, self._stream, id_, id_):
                continue  # somebody else claimed it before us
            if await self._ask("answered", self._client.xack, self._stream, self._group, id_):
                logger().error("source.message_trimmed", stream=self._stream, sequence=id_.decode())

    def _message(self, id_: bytes, fields: dict[bytes, bytes], delivered: int) -> SourceMessage:
        name = self._field
        if name not in fields and len(fields) == 1:
            (name,) = fields
        headers = {
            key.decode(errors="replace"): value.decode(errors="replace")
            for key, value in fields.items()
            if key != name
        }
        return SourceMessage(self._stream, fields.get(name, b""), headers, delivered, id_.decode(), id_)

    def _is_time_to_look(self) -> bool:
        return _now() >= self._look_at

    # -- deferring ---

    async def _set_remaining(self, ids: Sequence[bytes], remaining_ms: float) -> None:
        """Let deliveries come again after a while, `ack_wait_ms` at most."""
        idle = max(0, self.ack_wait_ms - round(remaining_ms))
        await self._ask("answered", self._run, self._defer, [self._group, self._name, idle, *ids])

    async def _remind(self, now: float) -> None:
        """Tell Redis again what is deferred for longer than it can be told at once."""
        for due in set(self._deferred.values()):
            ids = [id_ for id_, its in self._deferred.items() if its == due]
            await self._set_remaining(ids, (due - now) * 1_000)
            if due - now <= self.ack_wait_ms / 1_000:
                self._no_longer_defer(ids)
        self._remind_at = now + self.ack_wait_ms / 2_000 if self._deferred else float("inf")

    def _no_longer_defer(self, ids: Sequence[bytes]) -> None:
        if self._deferred:
            for id_ in ids:
                self._deferred.pop(id_, None)

    # -- asking ---

    async def _make_group(self) -> None:
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
        """Ask Redis, and tell what is wrong in words of ours."""
        described = f"Redis stream {self._stream} of {self._where}"
        if self._closed:
            raise Unavailable(f"{described} can't be {what}: it was closed.")
        try:
            return await ask(*arguments, **named)
        except AuthenticationError as error:
            raise InvalidRequest(f"{described} can't be {what}: {error}; check the URL's user.") from error
        except ResponseError as error:
            if "NOGROUP" in str(error):
                raise _NoGroup(f"{described} has no group {self._group}; it is made again.") from error
            if str(error).startswith(("WRONGTYPE", "NOPERM", "ERR unknown command")):
                raise InvalidRequest(
                    f"{described} can't be {what}: {error}; name a stream that may be read with groups."
                ) from error
            raise Unavailable(f"{described} can't be {what}: {error}.") from error
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable(
                f"{described} can't be {what}: {str(error) or type(error).__name__}. "
                "It is tried again when Redis answers."
            ) from error


class _NoGroup(Unavailable):
    """The group is gone, as after Redis lost its data."""


def _client(consumer: StreamConsumer) -> Redis:
    try:
        return Redis.from_url(
            consumer.url,
            client_name="postroom",
            decode_responses=False,
            protocol=2,
            retry=Retry(NoBackoff(), 1),  # at once, as a connection may be stale; whoever asks backs off
            socket_connect_timeout=TIMEOUT_SECONDS,
            socket_timeout=TIMEOUT_SECONDS + BLOCK_MS / 1_000,
        )
    except ValueError as error:
        raise InvalidRequest(
            f"The URL of Redis stream {consumer.stream} can't be used: {error}; write redis://host:6379/0."
        ) from error


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{host}{parts.path}"


def _now() -> float:
    return asyncio.get_running_loop().time()
