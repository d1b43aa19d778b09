"""Counters of a follower, and the lag of the read models."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from postroom.application.telemetry import logger
from postroom.projections.incremental.batch import Batch
from postroom.projections.incremental.cursors import START, Cursor, Head


class Lag(NamedTuple):
    """Lag of a mailbox's read models: number of records, and an upper bound of the oldest one's age (s)."""

    events: int
    seconds: float


@dataclass
class FollowCounts:
    """Counters of a follower, and its lag at the last poll.

    Arguments:
        version: the version that is advanced.
        seconds: total duration of all batches.
        last_events, last_seconds: number of records and duration of the last batch.
        outages: number of times the store was unavailable.
        lags: by mailbox.
    """

    version: int = 0
    batches: int = 0
    events: int = 0
    seconds: float = 0.0
    last_events: int = 0
    last_seconds: float = 0.0
    parked: int = 0
    outages: int = 0
    lags: dict[str, Lag] = field(default_factory=dict)
    _caught_up: dict[int, float] = field(default_factory=dict)

    def count_batch(self, batch: Batch, seconds: float) -> None:
        """Count a batch that was applied, and log it."""
        self.batches += 1
        self.events += batch.events
        self.parked += len(batch.parked)
        self.seconds += seconds
        self.last_events, self.last_seconds = batch.events, seconds
        logger().info(
            "follow.applied", version=self.version, events=batch.events, ms=round(seconds * 1_000, 1)
        )
        for each in batch.parked:
            logger().error("follow.parked", place=each.place, type=each.type, error=each.error)

    def update_lags(self, heads: Sequence[Head], cursors: Mapping[int, Cursor]) -> None:
        """Update the lag of each mailbox."""
        now = time.time()
        for head in heads:
            cursor = cursors.get(head.id, START)
            behind = head.last - cursor.position
            if behind <= 0:
                self._caught_up[head.id] = now
            since = max(self._caught_up.get(head.id, 0.0), cursor.at / 1e6)
            self.lags[head.name] = Lag(max(0, behind), max(0.0, now - since) if behind > 0 else 0.0)
