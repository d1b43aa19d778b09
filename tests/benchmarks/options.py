"""What `make bench-spark` measures."""

from pathlib import Path
from typing import Literal

import msgspec

from tests.benchmarks.figures import RUNS

Database = Literal["sqlite", "postgres"]
Interleave = Literal["life", "none"]

ORIGINALS = 20_000
"""Messages of a long log that live; the others are copies of them."""
TOPICS, PRINCIPALS = 20, 1_000
"""Of the messages of a long log or history."""
LARGE = 5_000_000
"""Messages of the large store, which is measured when it is asked for by its name."""


class Options(msgspec.Struct, frozen=True):
    """Say how Spark is measured.

    Arguments:
        interleave: how sends, receives and acks are mixed in the log.
        keep: directory that keeps the stores for later runs; None builds them in each run.
        runs: how often each is run, the median counts; 0 means 3 times, and once at `LARGE`.
    """

    interleave: Interleave = "life"
    keep: Path | None = None
    runs: int = 0

    def runs_at(self, messages: int) -> int:
        """Return how often each is run on a store of so many messages."""
        return self.runs or (RUNS if messages < LARGE else 1)
