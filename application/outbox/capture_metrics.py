"""Metrics and readiness of a capture."""

import asyncio

from postroom.application.metrics import Metric, by_event_type
from postroom.application.monitor import BACKLOG_SECONDS, Monitor
from postroom.application.outbox.capture import OutboxCapture
from postroom.application.ports.capture import CaptureSource, SlotState
from postroom.domain.errors import PostroomError


def capture_monitor(capture: OutboxCapture, context: str, source: CaptureSource, relay: Monitor) -> Monitor:
    """Return the monitor of a capture, with the metrics of `relay`, which publishes its held events."""
    labels = {"context": context}

    async def find_state() -> SlotState | None:
        try:
            async with asyncio.timeout(BACKLOG_SECONDS):
                return await source.state()
        except (PostroomError, TimeoutError):
            return None

    async def collect() -> list[Metric]:
        metrics = [
            *await relay.collect(),
            by_event_type(
                "postroom_outbox_captured",
                "Rows that were captured and published, by event type.",
                labels,
                capture.published_by_type,
            ),
            Metric(
                "postroom_outbox_held",
                "counter",
                "Rows that were captured and moved to the outbox table.",
                [(labels, capture.counts.held)],
            ),
        ]
        state = await find_state()
        if state is not None:
            by_slot = labels | {"slot": state.slot}
            metrics += [
                Metric(
                    "postroom_outbox_slot_lag_bytes",
                    "gauge",
                    "Write-ahead log since the last confirmed position.",
                    [(by_slot, state.lag_bytes)],
                ),
                Metric(
                    "postroom_outbox_slot_retained_bytes",
                    "gauge",
                    "Write-ahead log that the server keeps for the slot.",
                    [(by_slot, state.retained_bytes)],
                ),
            ]
            if state.safe_bytes is not None:
                metrics.append(
                    Metric(
                        "postroom_outbox_slot_safe_bytes",
                        "gauge",
                        "Write-ahead log that may still be written before the slot loses rows.",
                        [(by_slot, state.safe_bytes)],
                    )
                )
        return metrics

    async def find_missing() -> list[str]:
        missing = await relay.find_missing()
        return missing if capture.progress.is_made else [*missing, "capture"]

    return Monitor(collect, find_missing)
