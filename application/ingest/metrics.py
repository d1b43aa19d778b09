"""Metrics and readiness of an ingester."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from postroom.application.ingest.ingester import Ingester
from postroom.application.metrics import Metric
from postroom.application.monitor import BACKLOG_SECONDS, Monitor
from postroom.domain.errors import PostroomError


def ingest_monitor(
    ingester: Ingester,
    namespace: str,
    *,
    measure_mailbox: Callable[[], Coroutine[Any, Any, list[Metric]]],
    is_mailbox_answering: Callable[[], Awaitable[bool]],
    count_pending: Callable[[], Awaitable[int]],
    stream_metrics: Callable[[], Sequence[Metric]],
) -> Monitor:
    """Return the monitor of an ingester.

    Arguments:
        measure_mailbox: returns the metrics of the archive if this process owns it.
        is_mailbox_answering: returns whether the owner of the archive answers.
        count_pending: counts the messages of the source that were not delivered yet.
        stream_metrics: metrics of the connection to the source.
    """
    labels = {"namespace": namespace}

    async def collect() -> list[Metric]:
        counts = ingester.counts
        outcomes = {
            "stored": counts.stored,
            "duplicate": counts.duplicates,
            "skipped": counts.skipped,
            "dead_lettered": counts.dead_lettered,
            "deferred": counts.deferred,
        }
        metrics = [
            *await measure_mailbox(),
            Metric(
                "postroom_ingest_messages",
                "counter",
                "Messages of the source by outcome.",
                [(labels | {"outcome": outcome}, number) for outcome, number in outcomes.items()],
            ),
            Metric("postroom_ingest_received", "counter", "Messages received.", [(labels, counts.received)]),
            Metric(
                "postroom_ingest_retries",
                "counter",
                "Attempts to store a batch after the first.",
                [(labels, counts.retries)],
            ),
            *stream_metrics(),
        ]
        try:
            async with asyncio.timeout(BACKLOG_SECONDS):
                pending = await count_pending()
        except (PostroomError, TimeoutError):
            return metrics
        lag = Metric(
            "postroom_ingest_lag_messages",
            "gauge",
            "Messages of the source that were not received yet.",
            [(labels, pending)],
        )
        return [*metrics, lag]

    async def find_missing() -> list[str]:
        missing = [] if await is_mailbox_answering() else ["mailbox"]
        if not ingester.progress.is_made:
            missing.append("source")
        return missing

    return Monitor(collect, find_missing)
