"""Logs of the command line: a line per event on stderr, JSON or for people, of Postroom and its libraries."""

import json
import logging
import os
import sys
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any, Literal

from postroom.application.telemetry import ROOT, LogEvent
from postroom.application.text import printable

LogFormat = Literal["auto", "console", "json"]
_RESERVED = ("timestamp", "level", "logger", "event", "exc_info", "stack_info")


def configure_logs(level: str, log_format: LogFormat = "auto") -> None:
    """Log Postroom's events of `level` and above, and other libraries' warnings, to stderr.

    Arguments:
        log_format: `json` for JSON lines, `console` for people; `auto` is `console` on a terminal.
    """
    if log_format == "auto":
        log_format = "console" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LazyFormatter(log_format))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger(ROOT).setLevel(level.upper())


class _LazyFormatter(logging.Formatter):
    """Formatter that imports structlog with the first record, as most commands log nothing."""

    def __init__(self, log_format: LogFormat) -> None:
        super().__init__()
        self._log_format = log_format
        self._formatter: logging.Formatter | None = None

    def format(self, record: logging.LogRecord) -> str:
        if self._formatter is None:
            self._formatter = make_formatter(self._log_format, colors=_has_colors())
        return self._formatter.format(record)


def make_formatter(log_format: LogFormat, *, colors: bool = False) -> logging.Formatter:
    """Return a formatter that renders records of Postroom and of any library with structlog.

    Arguments:
        colors: of the format `console`.
    """
    import structlog

    # The tracebacks are without local variables, which may be payloads.
    processors: list[Any] = [_read_record, structlog.processors.ExceptionRenderer()]
    if log_format == "json":
        processors.append(structlog.processors.JSONRenderer(serializer=json.dumps, default=str))
    else:
        processors += [_escape, structlog.dev.ConsoleRenderer(colors=colors, sort_keys=False)]
    return structlog.stdlib.ProcessorFormatter(processors=processors)


def _read_record(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the event of a record; an event's fields can't replace its time, level, logger and name."""
    record: logging.LogRecord = event.pop("_record")
    del event["_from_structlog"]
    message: object = record.msg
    name, fields = message if isinstance(message, LogEvent) else (event["event"], {})
    return {
        "timestamp": _rfc3339(record.created),
        "level": record.levelname.lower(),
        "logger": record.name,
        **event,
        "event": name,
        **{key: value for key, value in fields.items() if key not in _RESERVED},
    }


def _escape(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape what would control a terminal."""
    return {name: printable(str(value), multiline=name == "exception") for name, value in event.items()}


def _rfc3339(created: float) -> str:
    time = datetime.fromtimestamp(created, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _has_colors() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")
