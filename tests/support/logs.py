"""Capture of the events that Postroom logs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from postroom.application import telemetry
from postroom.application.telemetry import ROOT, LogEvent


class _Capture(logging.Handler):
    def __init__(self, events: list[dict[str, Any]]) -> None:
        super().__init__()
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.msg, LogEvent), record
        level = record.levelname.lower()
        self._events.append({**record.msg.fields, "event": record.msg.name, "log_level": level})


@contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """Yield a list that receives each event logged in the context: its fields, `event` and `log_level`."""
    events: list[dict[str, Any]] = []
    logger, handler = logging.getLogger(ROOT), _Capture(events)
    level = logger.level
    telemetry.logger().forget()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield events
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
