"""Metrics and readiness of a relay (SDS-047 EVT-047-001 `EventPublished`)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from postroom.application.metrics import Metric
from postroom.application.monitor import BACKLOG_SECONDS, Monitor
from postroom.application.outbox.relay import OutboxRelay
from postroom.application.ports.outbox_repository import Backlog
from postroom.domain.errors import PostroomError

US = 1_000_000


def relay_monitor(
    relay: OutboxRelay,
    context: str,
    get_backlog: Callable[[], Awaitable[Backlog]],
    wall: Callable[[], int],
    stream_metrics: Callable[[], Sequence[Metric]],
    is_connected: Callable[[], bool],
) -> Monitor:
    """Return what a relay tells about itself.

    Arguments:
        get_backlog: counts the unpublished events, over a connection of its own.
        wall: the wall clock, µs.
        stream_metrics: metrics of the connection to the stream.
        is_connected: returns whether the stream can be reached.
    """
    labels = {"context": context}

    async def find_backlog() -> Backlog | None:
        try:
            async with asyncio.timeout(BACKLOG_SECONDS):
                return await get_backlog()
        except (PostroomError, TimeoutError):
            return None

    async def collect() -> list[Metric]:
        counts = relay.counts
        metrics = [
            Metric(
                "postroom_outbox_published",
                "counter",
                "Events published, by event type.",
                [
                    (labels | {"event_type": event_type}, number)
                    for event_type, number in sorted(relay.published_by_type.items())
                ],
            ),
            Metric(
                "postroom_outbox_failed",
                "counter",
                "Attempts to publish that failed and are repeated.",
                [(labels, counts.failed)],
            ),
            Metric("postroom_outbox_parked", "counter", "Events set aside.", [(labels, counts.parked)]),
            *stream_metrics(),
        ]
        backlog = await find_backlog()
        if backlog is not None:
            oldest = 0.0 if backlog.oldest_at is None else max(0.0, (wall() - backlog.oldest_at) / US)
            metrics += (
                Metric("postroom_outbox_backlog", "gauge", "Unpublished events.", [(labels, backlog.count)]),
                Metric(
                    "postroom_outbox_oldest_seconds",
                    "gauge",
                    "Age of the oldest unpublished event; 0 without one.",
                    [(labels, oldest)],
                ),
            )
        return metrics

    async def find_missing() -> list[str]:
        missing = [] if is_connected() else ["nats"]
        if await find_backlog() is None:
            missing.append("database")
        if not relay.progress.is_made:
            missing.append("relay")
        return missing

    return Monitor(collect, find_missing)
