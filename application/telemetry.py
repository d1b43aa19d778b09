"""The structured log of what services do: dotted facts, with their details as keys."""

from typing import Any


def logger() -> Any:
    """Return the logger; structlog takes a tenth of a second to load, which a command that logs nothing saves."""
    import structlog

    return structlog.get_logger()
