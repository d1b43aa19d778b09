"""The structured log of what services do: dotted facts, with their details as keys."""

from typing import Any


def logger() -> Any:
    """Return the logger; structlog loads only now, a tenth of a second that a command without news saves."""
    import structlog

    return structlog.get_logger()
