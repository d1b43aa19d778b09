"""Monitor of a relay or inbox worker: of its loop, of its stream, and of the backlog in its database."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from postroom.application.metrics import Metric
from postroom.application.monitor import BACKLOG_SECONDS, Monitor, Progress
from postroom.application.ports.outbox_repository import Backlog
from postroom.domain.errors import PostroomError

US = 1_000_000


class BacklogGauges(NamedTuple):
    """Names and descriptions of the gauges of a backlog.

    Arguments:
        prefix: the gauges are named `{prefix}_backlog` and `{prefix}_oldest_seconds`.
        count_help: description of the number of unsettled items.
        oldest_help: description of the age of the oldest item.
    """

    prefix: str
    count_help: str
    oldest_help: str

    def metrics(self, labels: dict[str, str], backlog: Backlog, now: int) -> list[Metric]:
        """Return the metrics of a backlog; `now` is µs since 1970 UTC."""
        oldest = 0.0 if backlog.oldest_at is None else max(0.0, (now - backlog.oldest_at) / US)
        return [
            Metric(f"{self.prefix}_backlog", "gauge", self.count_help, [(labels, backlog.count)]),
            Metric(f"{self.prefix}_oldest_seconds", "gauge", self.oldest_help, [(labels, oldest)]),
        ]


def backlog_monitor(
    context: str,
    collect_counts: Callable[[dict[str, str]], Sequence[Metric]],
    gauges: BacklogGauges,
    get_backlog: Callable[[], Awaitable[Backlog]],
    wall: Callable[[], int],
    is_connected: Callable[[], bool],
    loop: tuple[str, Progress],
) -> Monitor:
    """Return the monitor of a loop between a stream and the database of a service.

    Arguments:
        collect_counts: returns the metrics that need no database; called with the labels.
        get_backlog: counts the unsettled items, over a connection of its own.
        wall: the wall clock, µs.
        is_connected: returns whether the stream can be reached.
        loop: the name of the loop in `/readyz`, and its progress.
    """
    labels = {"context": context}
    loop_name, progress = loop

    async def find_backlog() -> Backlog | None:
        try:
            async with asyncio.timeout(BACKLOG_SECONDS):
                return await get_backlog()
        except (PostroomError, TimeoutError):
            return None

    async def collect() -> list[Metric]:
        metrics = list(collect_counts(labels))
        backlog = await find_backlog()
        return metrics if backlog is None else metrics + gauges.metrics(labels, backlog, wall())

    async def find_missing() -> list[str]:
        missing = [] if is_connected() else ["nats"]
        if await find_backlog() is None:
            missing.append("database")
        if not progress.is_made:
            missing.append(loop_name)
        return missing

    return Monitor(collect, find_missing)
