"""Metrics and readiness of an inbox worker."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import get_args

from postroom.application.inbox.worker import DeliveryOutcome, InboxWorker
from postroom.application.metrics import Histogram, Metric, new_histogram
from postroom.application.monitor import BACKLOG_SECONDS, Monitor
from postroom.application.ports.event_handler import EventHandler, HandlerRequest
from postroom.application.ports.outbox_repository import Backlog
from postroom.domain.errors import PostroomError
from postroom.domain.inbox import HandlerResult

US = 1_000_000


class MeasuredHandler:
    """Handler whose calls are measured."""

    def __init__(self, handler: EventHandler) -> None:
        self._handler = handler
        self.seconds: Histogram = new_histogram()

    async def handle(self, request: HandlerRequest) -> HandlerResult:
        """Handle an event; see `EventHandler`."""
        began = perf_counter()
        try:
            return await self._handler.handle(request)
        finally:
            self.seconds.observe(perf_counter() - began)

    async def close(self) -> None:
        """Close the handler."""
        await self._handler.close()


def inbox_monitor(
    worker: InboxWorker,
    context: str,
    handler: MeasuredHandler,
    get_backlog: Callable[[], Awaitable[Backlog]],
    wall: Callable[[], int],
    stream_metrics: Callable[[], Sequence[Metric]],
    is_connected: Callable[[], bool],
) -> Monitor:
    """Return what an inbox worker tells about itself; for the arguments, see `relay_monitor`."""
    labels = {"context": context}

    async def find_backlog() -> Backlog | None:
        try:
            async with asyncio.timeout(BACKLOG_SECONDS):
                return await get_backlog()
        except (PostroomError, TimeoutError):
            return None

    async def collect() -> list[Metric]:
        metrics = [
            Metric(
                "postroom_inbox_deliveries",
                "counter",
                "Deliveries by outcome.",
                [
                    (labels | {"outcome": outcome}, worker.counts[outcome])
                    for outcome in get_args(DeliveryOutcome)
                ],
            ),
            Metric(
                "postroom_inbox_inflight", "gauge", "Messages in progress.", [(labels, worker.in_progress)]
            ),
            Metric(
                "postroom_inbox_handler_seconds",
                "histogram",
                "Duration of the calls of the handler.",
                [(labels, handler.seconds)],
            ),
            *stream_metrics(),
        ]
        backlog = await find_backlog()
        if backlog is not None:
            oldest = 0.0 if backlog.oldest_at is None else max(0.0, (wall() - backlog.oldest_at) / US)
            metrics += (
                Metric("postroom_inbox_backlog", "gauge", "Unsettled messages.", [(labels, backlog.count)]),
                Metric(
                    "postroom_inbox_oldest_seconds",
                    "gauge",
                    "Time since the oldest unsettled message was received; 0 without one.",
                    [(labels, oldest)],
                ),
            )
        return metrics

    async def find_missing() -> list[str]:
        missing = [] if is_connected() else ["nats"]
        if await find_backlog() is None:
            missing.append("database")
        if not worker.progress.is_made:
            missing.append("worker")
        return missing

    return Monitor(collect, find_missing)
