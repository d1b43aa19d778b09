"""Queues of the changes of routes that are pushed to proxies."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Literal

from postroom.application.metrics import Histogram, new_histogram
from postroom.application.ports.control_plane import RouteChange, RoutePush
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import cancel_and_wait

Outcome = Literal["ok", "failed", "dropped"]
PUSH_SECONDS = 1.0
"""Time in which a proxy must answer."""
PUSHES_AT_ONCE = 8
"""Maximum number of pushes to one proxy at a time."""
MAX_CHANGES = 10_000
"""Waiting changes of one proxy, above which it gets the whole table with its next registration instead."""


class PushCounts:
    """Counters of pushes to all proxies."""

    def __init__(self) -> None:
        self.outcomes: dict[Outcome, int] = {"ok": 0, "failed": 0, "dropped": 0}
        self.seconds: Histogram = new_histogram()


class RouteQueue:
    """The changes that one proxy has not been told of yet, and the task that tells it.

    A proxy that is slow or paused delays no other one. Of several changes of a mailbox only the newest waits.
    A change that is lost is not repeated: the proxy is given the whole table with its next registration.

    Arguments:
        address: of the proxy.
        uptime: µs of a monotonic clock, for the latencies.

    Attributes:
        push_key: key that the proxy named when it registered last.
    """

    def __init__(self, address: str, push: RoutePush, counts: PushCounts, uptime: Callable[[], int]) -> None:
        self.address = address
        self.push_key = ""
        self._push = push
        self._counts = counts
        self._uptime = uptime
        self._changes: dict[str, RouteChange] = {}
        self._has_changes = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False

    def add(self, changes: Iterable[RouteChange]) -> None:
        """Push changes soon."""
        for change in changes:
            self._changes.pop(change.mailbox, None)  # the newest is last
            self._changes[change.mailbox] = change
        if len(self._changes) > MAX_CHANGES:
            self._counts.outcomes["dropped"] += len(self._changes)
            self._changes.clear()
        if self._changes:
            self._has_changes.set()
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run(), name=f"routes to {self.address}")

    def table_sent(self, position: int) -> None:
        """Forget the changes up to a position, as the proxy is being sent the table of that position."""
        self._changes = {key: each for key, each in self._changes.items() if each.position > position}

    async def close(self) -> None:
        """Stop pushing."""
        if self._task is not None:
            await cancel_and_wait(self._task)
        await self._push.forget(self.address)

    async def _run(self) -> None:
        while True:
            await self._has_changes.wait()
            batch = [self._changes.pop(name) for name in list(self._changes)[:PUSHES_AT_ONCE]]
            if not batch:
                self._has_changes.clear()
                continue
            await asyncio.gather(*map(self._tell, batch))

    async def _tell(self, change: RouteChange) -> None:
        started = self._uptime()
        try:
            async with asyncio.timeout(PUSH_SECONDS):
                await self._push.push(self.address, change, self.push_key)
        except Exception as error:  # whatever it is, the next registration repairs it
            self._counts.outcomes["failed"] += 1
            if not self._is_failing:
                logger().warning("route.push_failed", proxy=self.address, error=summarize(error))
            self._is_failing = True
        else:
            self._is_failing = False
            self._counts.outcomes["ok"] += 1
            self._counts.seconds.observe((self._uptime() - started) / 1_000_000)
