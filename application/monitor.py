"""Monitors of long-running commands: metrics, and the dependencies that are missing."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from postroom.application.metrics import Metric
from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import PostroomError

PROGRESS_SECONDS = 60.0
"""Time without a pass of a loop after which it counts as stuck."""
BACKLOG_SECONDS = 3.0
"""Time in which a database must answer."""
MAILBOX_SECONDS = 3.0
"""Time in which the owner of a mailbox must answer."""


class Monitor(NamedTuple):
    """Metrics and readiness of a long-running command (svc-mailbox I-10).

    Arguments:
        collect: returns the metrics.
        find_missing: returns the names of what it needs and can't use; empty if it is ready.
    """

    collect: Callable[[], Coroutine[Any, Any, Sequence[Metric]]]
    find_missing: Callable[[], Coroutine[Any, Any, list[str]]]


class Progress:
    """Outcome of the latest pass of a loop.

    A loop that never ends a pass, for example because a broker accepts requests and does not answer, makes
    no progress and so is not ready.

    Arguments:
        seconds: time that a pass may take.
    """

    def __init__(
        self, seconds: float = PROGRESS_SECONDS, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._monotonic = monotonic
        self._is_failed = False
        self._at = monotonic()

    def succeeded(self) -> None:
        """Record a pass that succeeded."""
        self._is_failed = False
        self._at = self._monotonic()

    def failed(self) -> None:
        """Record a pass that failed."""
        self._is_failed = True

    @property
    def is_made(self) -> bool:
        """Return whether the latest pass succeeded, and ended in time."""
        return not self._is_failed and self._monotonic() - self._at <= self._seconds


def mailbox_monitor(mailbox: Mailbox, collect: Callable[[], Coroutine[Any, Any, list[Metric]]]) -> Monitor:
    """Return the monitor of a command that needs a mailbox."""

    async def find_missing() -> list[str]:
        return [] if await is_answering(mailbox) else ["mailbox"]

    return Monitor(collect, find_missing)


async def is_answering(mailbox: Mailbox) -> bool:
    """Return whether the owner of a mailbox answers in time."""
    try:
        async with asyncio.timeout(MAILBOX_SECONDS):
            await mailbox.get_topic_policy("any")  # reads the state in memory
    except (PostroomError, TimeoutError):
        return False
    return True
