"""Logging of the command line: events on stderr, for people on a terminal and as JSON lines elsewhere."""

import logging
import sys


def configure_logs(level: str) -> None:
    """Send structlog's events of `level` and above to stderr; no event carries payloads or auth tokens."""
    import structlog

    on_terminal = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if on_terminal else [structlog.processors.dict_tracebacks]),
            structlog.dev.ConsoleRenderer() if on_terminal else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
