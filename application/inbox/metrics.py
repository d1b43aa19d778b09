"""Metrics and readiness of an inbox worker."""

from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Final, get_args

from postroom.application.backlog_monitor import BacklogGauges, backlog_monitor
from postroom.application.inbox.worker import DeliveryOutcome, InboxWorker
from postroom.application.metrics import Histogram, Metric, new_histogram
from postroom.application.monitor import Monitor
from postroom.application.ports.event_handler import EventHandler, HandlerRequest
from postroom.application.ports.outbox_repository import Backlog
from postroom.domain.inbox import HandlerResult

_GAUGES: Final = BacklogGauges(
    "postroom_inbox",
    "Unsettled messages.",
    "Time since the oldest unsettled message was received; 0 without one.",
)


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
    """Return the monitor of an inbox worker; for the arguments, see `relay_monitor`."""

    def collect_counts(labels: dict[str, str]) -> list[Metric]:
        return [
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

    return backlog_monitor(
        context, collect_counts, _GAUGES, get_backlog, wall, is_connected, ("worker", worker.progress)
    )
