"""Processes that end without warning, at any call they make to the outside."""

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from postroom.application.ports.outbox import OutboxClaim, OutboxRepository, PublishAck, Publisher
from postroom.domain.errors import InvalidRequest

POINTS = {
    "relay": ("claim", "find_unpublished", "publish", "mark_published", "increment_attempts", "commit"),
    "worker": (
        "fetch",
        "insert",
        "handle",
        "publish",
        "mark_processed",
        "record_error",
        "mark_dead_lettered",
        "ack",
        "nack",
    ),
    "redrive": ("read", "insert", "handle", "mark_processed", "mark_dead_lettered", "remove"),
}
"""The calls of each kind of process, in about their order; it may end before or after each."""


class Crash(BaseException):
    """The process is gone; nothing in it may catch this."""


class CrashAt(NamedTuple):
    call: str
    when: str
    nth: int


class Process:
    """One life of a process; from its crash on, nothing that it still tries reaches the outside."""

    def __init__(self, crash: CrashAt | None) -> None:
        self._crash = crash
        self._passed: Counter[tuple[str, str]] = Counter()
        self.is_dead = False

    def step(self, call: str, when: str) -> None:
        self._passed[call, when] += 1
        if self._crash == (call, when, self._passed[call, when]):
            self.is_dead = True
        if self.is_dead:
            raise Crash

    @asynccontextmanager
    async def call(self, name: str) -> AsyncIterator[None]:
        self.step(name, "before")
        yield
        self.step(name, "after")

    def wrap(self, port: Any) -> Any:
        return Wrapped(port, self)


class Wrapped:
    """A port whose every method is a pair of points at which the process may end."""

    def __init__(self, port: Any, process: Process) -> None:
        self._port = port
        self._process = process

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._port, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            async with self._process.call(name):
                return await method(*arguments, **options)

        return call


class CrashingOutbox:
    """An outbox repository; `commit` is the moment at which a claim's changes are kept."""

    def __init__(self, repository: OutboxRepository, process: Process) -> None:
        self._repository = repository
        self._process = process

    @asynccontextmanager
    async def claim(self, partitions: Sequence[int], *, wait: bool = False) -> AsyncIterator[OutboxClaim]:
        self._process.step("claim", "before")
        async with self._repository.claim(partitions, wait=wait) as claim:
            self._process.step("claim", "after")
            yield _CrashingClaim(claim, self._process)
            self._process.step("commit", "before")
        self._process.step("commit", "after")


class _CrashingClaim(Wrapped):
    @property
    def partitions(self) -> Sequence[int]:
        partitions: Sequence[int] = self._port.partitions
        return partitions


class CrashingPublisher:
    """A publisher whose stream may refuse some messages for good.

    Arguments:
        refusals: how many of the next messages are refused.
    """

    def __init__(self, publisher: Publisher, process: Process, refusals: int = 0) -> None:
        self._publisher = publisher
        self._process = process
        self._refusals = refusals

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        async with self._process.call("publish"):
            if self._refusals:
                self._refusals -= 1
                raise InvalidRequest("the stream refuses this")
            return await self._publisher.publish(subject, payload, headers)

    async def close(self) -> None:
        """The connection belongs to the world."""


def is_crash(error: BaseException) -> bool:
    """Tell whether a process ended, and nothing else went wrong."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_crash, error.exceptions))
    return isinstance(error, Crash)
