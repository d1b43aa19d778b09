"""Metrics and readiness of an inbox worker."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, get_args

from postroom.application.backlog_monitor import BacklogGauges, backlog_monitor
from postroom.application.inbox.dispatcher import EventDispatcher
from postroom.application.inbox.worker import DeliveryOutcome, InboxWorker
from postroom.application.metrics import Metric
from postroom.application.monitor import Monitor
from postroom.application.ports.outbox_repository import Backlog

_GAUGES: Final = BacklogGauges(
    "postroom_inbox",
    "Unsettled messages.",
    "Time since the oldest unsettled message was received; 0 without one.",
)


def inbox_monitor(
    worker: InboxWorker,
    context: str,
    handlers: EventDispatcher,
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
                "Duration of calls, by handler.",
                [(labels | {"handler": name}, seconds) for name, seconds in handlers.seconds.items()],
            ),
            Metric(
                "postroom_inbox_handler_calls",
                "counter",
                "Calls of handlers by outcome.",
                [
                    (labels | {"handler": name, "outcome": outcome}, outcomes[outcome])
                    for name, outcomes in handlers.outcomes.items()
                    for outcome in ("processed", "already_processed", "poison", "failed")
                ],
            ),
            Metric(
                "postroom_inbox_unhandled",
                "counter",
                "Events whose type has no handler.",
                [(labels, handlers.unhandled)],
            ),
            *stream_metrics(),
        ]

    return backlog_monitor(
        context, collect_counts, _GAUGES, get_backlog, wall, is_connected, ("worker", worker.progress)
    )
