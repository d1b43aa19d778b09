"""What services tell of themselves: a structured log of dotted facts, their details as keys, and metrics."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple


class Metric(NamedTuple):
    """A figure by its labels; see OpenMetrics.

    Arguments:
        kind: a counter only grows; a gauge goes up and down.
        samples: labels, and the value for them.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: Sequence[tuple[Mapping[str, str], float]]


def logger() -> Any:
    """Return the logger; structlog loads only now, a tenth of a second that a command without news saves."""
    import structlog

    return structlog.get_logger()
