"""Logs of the command line: a line per event on stderr, JSON or for people, of Postroom and its libraries."""

import json
import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, Literal

from postroom.application.telemetry import ROOT, LogEvent
from postroom.application.text import printable

LogFormat = Literal["auto", "console", "json"]
LEVELS = ("debug", "info", "warning", "error")
_RESERVED = ("timestamp", "level", "logger", "event", "exc_info", "stack_info")
_OF_RECORDS = {
    *vars(logging.makeLogRecord({})),
    "message",
    "asctime",
    "taskName",
    "_logger",
    "_name",
    *_RESERVED,
}
"""Attributes of a log record that are not fields of its line."""
_own_levels: dict[str, int] = {}
"""Level that each logger had before the settings changed it."""


def read_levels(text: str) -> dict[str, str] | None:
    """Return the level of each logger; None unless the text lists levels, as in `info,shop=debug`."""
    levels: dict[str, str] = {}
    for each in text.split(","):
        name, is_of_logger, level = each.rpartition("=")
        name, level = name.strip() if is_of_logger else ROOT, level.strip()
        if level not in LEVELS or not name or name in levels:
            return None
        levels[name] = level
    return levels


def configure_logs(level: str, log_format: LogFormat = "auto", *, is_reload: bool = False) -> None:
    """Log Postroom's events of a level and above, and other libraries' warnings, to stderr.

    Arguments:
        level: of Postroom, or of several loggers; see `read_levels`.
        log_format: `json` for JSON lines, `console` for people; `auto` is `console` on a terminal.
        is_reload: only set levels; a logger that is no longer named gets back the level that it had.
    """
    if log_format == "auto":
        log_format = "console" if sys.stderr.isatty() else "json"
    if not is_reload:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_LazyFormatter(log_format))
        logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    named = {ROOT: level} if level in LEVELS else {ROOT: "warning", **(read_levels(level) or {})}
    levels: dict[str, int | str] = {**_own_levels, **named}
    for name, least in levels.items():
        _own_levels.setdefault(name, logging.getLogger(name).level)
        logging.getLogger(name).setLevel(least.upper() if isinstance(least, str) else least)


def log_application(module: str, levels: str) -> None:
    """Log the lines that an application writes by `logging` or structlog, from the level info on.

    Call it before importing the application, and again afterwards: a `dictConfig` in its modules disables
    existing loggers.

    Arguments:
        module: module of the application; its top package gets the level, unless `levels` names the package.
        levels: see `read_levels`.
    """
    import structlog

    package = module.partition(".")[0]
    logger = logging.getLogger(package)
    if package not in (read_levels(levels) or ()) and logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    elif _own_levels.get(package) == logging.NOTSET:
        _own_levels[package] = logging.INFO
    for name, each in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] in (ROOT, package) and isinstance(each, logging.Logger):
            each.disabled = False
    if not structlog.is_configured():
        structlog.configure(
            [
                structlog.stdlib.filter_by_level,
                structlog.stdlib.PositionalArgumentsFormatter(),
                structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
            logger_factory=structlog.stdlib.LoggerFactory(),
        )


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
        colors: whether to color lines of the format `console`.
    """
    import structlog

    # The tracebacks are without local variables, which may be payloads.
    processors: list[Any] = [_read_record, structlog.processors.ExceptionRenderer()]
    if log_format == "json":
        processors.append(structlog.processors.JSONRenderer(serializer=_dump, default=str))
    else:
        processors += [_escape, structlog.dev.ConsoleRenderer(colors=colors, sort_keys=False)]
    return structlog.stdlib.ProcessorFormatter(processors=processors)


def _read_record(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the event of a record; its fields can't replace its time, level, logger and name.

    A line of an application has its `extra` as fields, and the context variables of structlog.
    """
    from structlog.contextvars import get_contextvars

    record: logging.LogRecord = event.pop("_record")
    del event["_from_structlog"]
    message: object = record.msg
    fields: Mapping[str, object]
    if isinstance(message, LogEvent):
        name, fields = message
    else:
        extra = {key: value for key, value in vars(record).items() if key not in _OF_RECORDS}
        name, fields = event["event"], {**event, **extra}
    context = {key: value for key, value in sorted(get_contextvars().items()) if key not in fields}
    return {
        "timestamp": _rfc3339(record.created),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": name,
        **{key: value for key, value in event.items() if key in ("exc_info", "stack_info")},
        **{key: value for key, value in {**fields, **context}.items() if key not in _RESERVED},
    }


def _escape(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape characters that would control a terminal."""
    return {name: printable(_text(value), multiline=name == "exception") for name, value in event.items()}


def _dump(event: Mapping[str, object], **options: Any) -> str:
    """Return an event as JSON; a field that JSON can't have is its text."""
    try:
        return json.dumps(event, allow_nan=False, **options)
    except Exception:  # converting a field to text may raise anything
        return json.dumps({str(name): _plain(value) for name, value in event.items()})


def _plain(value: object) -> object:
    try:
        json.dumps(value, allow_nan=False)
    except Exception:
        return _text(value)
    return value


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"a {type(value).__qualname__} without text"


def _rfc3339(created: float) -> str:
    time = datetime.fromtimestamp(created, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _has_colors() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")
