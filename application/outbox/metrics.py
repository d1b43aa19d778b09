"""Metrics and readiness of a relay (SDS-047 EVT-047-001 `EventPublished`)."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from postroom.application.messaging.backlog_monitor import BacklogGauges, backlog_monitor
from postroom.application.metrics import Metric, by_event_type
from postroom.application.monitor import Monitor
from postroom.application.outbox.relay import OutboxRelay
from postroom.application.ports.outbox_repository import Backlog

_GAUGES: Final = BacklogGauges(
    "postroom_outbox", "Unpublished events.", "Age of the oldest unpublished event; 0 without one."
)


def relay_monitor(
    relay: OutboxRelay,
    context: str,
    get_backlog: Callable[[], Awaitable[Backlog]],
    wall: Callable[[], int],
    stream_metrics: Callable[[], Sequence[Metric]],
    is_connected: Callable[[], bool],
) -> Monitor:
    """Return the monitor of a relay.

    Arguments:
        get_backlog: counts the unpublished events, over a connection of its own.
        wall: the wall clock, µs.
        stream_metrics: metrics of the connection to the stream.
        is_connected: returns whether the stream can be reached.
    """

    def collect_counts(labels: dict[str, str]) -> list[Metric]:
        counts = relay.counts
        return [
            by_event_type(
                "postroom_outbox_published",
                "Events published, by event type.",
                labels,
                relay.published_by_type,
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

    return backlog_monitor(
        context, collect_counts, _GAUGES, get_backlog, wall, is_connected, ("relay", relay.progress)
    )
