"""Logging of the command line: one line per event on stderr, text on a terminal, else JSON."""

import json
import logging
import sys
from datetime import UTC, datetime

from postroom.application.telemetry import ROOT, LogEvent


class TextFormatter(logging.Formatter):
    """A formatter of lines for people: time, level, event, `key=value` fields, then the traceback if any."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  # logging's
        """Return the record's time as RFC 3339."""
        return _rfc3339(record)


class JsonFormatter(logging.Formatter):
    """A formatter of JSON lines: `event`, `level`, `timestamp`, `exception` and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON in ASCII."""
        event = record.msg if isinstance(record.msg, LogEvent) else LogEvent(record.getMessage(), {})
        line = {
            **event.fields,
            "event": event.name,
            "level": record.levelname.lower(),
            "timestamp": _rfc3339(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logs(level: str) -> None:
    """Log Postroom's events of `level` and above, and other libraries' warnings, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if sys.stderr.isatty() else JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger(ROOT).setLevel(level.upper())


def _rfc3339(record: logging.LogRecord) -> str:
    time = datetime.fromtimestamp(record.created, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
