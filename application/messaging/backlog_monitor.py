"""Monitors of the backlogs of relays and inbox workers, in databases and streams."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from postroom.application.metrics import BACKLOG_SECONDS, Metric, Monitor, Progress
from postroom.application.ports.outbox import Backlog
from postroom.application.ports.read_models import ContextBacklog
from postroom.application.threads import repeating
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


EVERY_SECONDS = 5.0
Count = Callable[[], Sequence[ContextBacklog]]
"""Count the backlog in the service's own database."""
Save = Callable[[Sequence[ContextBacklog]], None]
"""Store counts with the read models, unless newer ones are stored."""


class ContextBacklogRefresher:
    """Refresher of the stored backlog of one context.

    The backlog is counted in the tables of outbox and inbox, which have partial indexes of unsettled rows. It
    can't be folded from their events: these have no total order, and rows inserted by plain SQL have none
    until a relay reads them.
    """

    def __init__(self, count: Count, save: Save, context: str) -> None:
        self._count = count
        self._save = save
        self._context = context

    def refresh(self) -> Sequence[ContextBacklog]:
        """Count the backlog, store the counts, and return them.

        Raises: Unavailable when either database can't be used.
        """
        counts = self._count()
        self._save(counts)
        return counts

    @contextmanager
    def refreshing(self, every_seconds: float = EVERY_SECONDS) -> Iterator[None]:
        """Refresh periodically in a thread for the duration of the context; failures are logged."""
        with repeating(
            "postroom contexts", self.refresh, every_seconds, "contexts.not_refreshed", context=self._context
        ):
            yield
