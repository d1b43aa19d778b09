"""Telemetry: structured log events through the standard `logging` package."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from threading import Lock
from typing import Final, NamedTuple

from postroom.application.tracing import current_corr_id, tracer

ROOT = "postroom"


class LogEvent(NamedTuple):
    """Message of a log record (`LogRecord.msg`), formatted as `name key=value ...`.

    Arguments:
        name: dotted name, such as `mailbox.recovered`.
        fields: details by name; never payloads, auth tokens or principals.
    """

    name: str
    fields: Mapping[str, object]

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}={_quote(value)}" for name, value in self.fields.items())])


REPEAT_SECONDS = 300.0
"""Interval at which a problem that lasts is logged again."""
QUIET_SECONDS = 60.0
"""A problem that comes back after this time is logged at once."""
MAX_PROBLEMS = 5_000
"""Problems that are remembered."""


class EventLogger:
    """Logger of events; the event `mailbox.recovered` goes to the standard logger `postroom.mailbox`.

    Each event has the field `corr_id` while a call or message is processed (svc-mailbox P-8), and `trace_id`
    and `span_id` within a trace.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Take a clock, in seconds."""
        self._now = now
        self._problems: dict[tuple[object, ...], tuple[float, float, int]] = {}
        """When each was logged last and seen last, s, and how often it was seen since it was logged."""
        self._lock = Lock()

    def debug(self, event: str, /, **fields: object) -> None:
        """Log a detail for debugging."""
        _log(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """Log an event of normal operation."""
        _log(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """Log a problem from which Postroom recovers automatically."""
        _log(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        """Log a problem that needs attention."""
        _log(logging.ERROR, event, fields)

    def retry(self, event: str, level: int = logging.WARNING, /, **fields: object) -> None:
        """Log a problem of work that is tried again: at once, then every five minutes while it lasts.

        Problems are the same if their texts are; numbers, such as pauses, may differ. The field `repeats` is
        how often the problem was not logged since the line before.
        """
        if (due := self._due(event, level, fields)) is not None:
            _log(level, event, due)

    def retry_defect(self, event: str, /, **fields: object) -> None:
        """Log the exception being handled, as `exception` does, of work that is tried again; see `retry`."""
        if (due := self._due(event, logging.ERROR, fields)) is not None:
            _log(logging.ERROR, event, due, exc_info=True)

    def _due(self, event: str, level: int, fields: Mapping[str, object]) -> Mapping[str, object] | None:
        """Return the fields of a problem with its repeats, or None if it is not to be logged now."""
        if not _area(event).isEnabledFor(level):
            return None
        key = (event, *(each for each in fields.items() if isinstance(each[1], str)))
        now = self._now()
        with self._lock:
            logged_at, seen_at, repeats = self._problems.pop(key, (-math.inf, -math.inf, 0))
            is_due = now - logged_at >= REPEAT_SECONDS or now - seen_at >= QUIET_SECONDS
            self._problems[key] = (now, now, 0) if is_due else (logged_at, now, repeats + 1)
            if len(self._problems) > MAX_PROBLEMS:
                del self._problems[next(iter(self._problems))]
        if not is_due:
            return None
        return {**fields, "repeats": repeats} if repeats else fields

    def forget(self) -> None:
        """Log every problem at once when it is seen next."""
        with self._lock:
            self._problems.clear()

    def exception(self, event: str, /, **fields: object) -> None:
        """Log the exception being handled, with its traceback but without local variables."""
        _log(logging.ERROR, event, fields, exc_info=True)


def log_context(**fields: object) -> AbstractContextManager[object]:
    """Have the lines that are logged in a context carry fields, if the process uses structlog.

    They are structlog's context variables, which its processor `merge_contextvars` adds to a line.
    """
    contextvars = sys.modules.get("structlog.contextvars")
    return nullcontext() if contextvars is None else contextvars.bound_contextvars(**fields)


def logger() -> EventLogger:
    """Return the logger of Postroom."""
    return _LOGGER


def summarize(error: BaseException) -> str:
    """Return an error as `Type: message`; unlike `repr`, it omits arguments, which may hold a payload.

    The text can be encoded in UTF-8 and has no NUL, and an error whose text can't be read has only its type.
    """
    try:
        text = str(error).encode(errors="backslashreplace").decode().replace("\0", "\\x00")
    except Exception:  # whatever the error's `__str__` raises
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _log(level: int, name: str, fields: Mapping[str, object], *, exc_info: bool = False) -> None:
    area = _area(name)
    if area.isEnabledFor(level):
        if (corr_id := current_corr_id()) is not None and "corr_id" not in fields:
            fields = {**fields, "corr_id": corr_id}
        if (trace := tracer().current()) is not None:
            fields = {**fields, "trace_id": trace.trace_id, "span_id": trace.span_id}
        area.log(level, LogEvent(name, fields), exc_info=exc_info, stacklevel=3)


@lru_cache(1_024)
def _area(name: str) -> logging.Logger:
    return logging.getLogger(f"{ROOT}.{name.partition('.')[0]}")


def _quote(value: object) -> str:
    """Return a value in logfmt syntax: quoted and escaped unless it is printable and has no spaces."""
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(' "=') else json.dumps(text)


_LOGGER: Final = EventLogger()
# A library leaves handlers to the application; without one of these, warnings would go to stderr.
logging.getLogger(ROOT).addHandler(logging.NullHandler())
