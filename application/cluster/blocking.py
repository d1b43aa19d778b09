"""Calls that block, from an event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Protocol, TypeVar

from postroom.application.threads import DaemonExecutor
from postroom.domain.errors import Unavailable

THREADS = 16

T = TypeVar("T")


class Blocking(Protocol):
    """Runner of functions that block."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Return the result of a function; raise Unavailable when it takes too long."""


class BlockingThreads:
    """`Blocking` in daemon threads, since a function that hangs must not keep the process from ending.

    Arguments:
        timeout_ms: for one function, with its wait for a thread; one that is late goes on unobserved.
    """

    def __init__(self, name: str, timeout_ms: int) -> None:
        self._executor = DaemonExecutor(THREADS, name)
        self._seconds = timeout_ms / 1_000

    async def __call__(self, work: Callable[[], T], /) -> T:
        """Return the result of a function."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._seconds):
                return await loop.run_in_executor(self._executor, copy_context().run, work)
        except TimeoutError:
            raise Unavailable(
                f"The lease store did not answer within {self._seconds:g} s; whether the request took effect "
                "is unknown. Repeat it."
            ) from None

    def close(self) -> None:
        """End the threads that do not hang."""
        self._executor.shutdown(wait=False)
