"""Drain rate of a queue, from which refused callers learn when to retry (svc-mailbox I-5)."""

import math

from postroom.domain.policy import SATURATED_RETRY_MS

WINDOW_SECONDS = 5.0
MIN_RETRY_MS, MAX_RETRY_MS = 100, 60_000


class DrainRate:
    """Rate at which a queue is drained, averaged exponentially over the latest seconds.

    Refused callers are counted as if they queued outside: the tenth is told to wait for ten departures.
    """

    def __init__(self) -> None:
        self._departures = 0.0
        self._refused = 0
        self._at_us = 0

    def record_drain(self, count: int, now_us: int) -> None:
        """Count items that left the queue."""
        self._decay(now_us)
        self._departures += count
        self._refused = max(0, self._refused - count)

    def retry_ms(self, count: int, now_us: int) -> int:
        """Return when a caller whose `count` items are refused should retry, 100 ms to 60 s from now.

        It is 1 s if nothing was drained lately.
        """
        self._decay(now_us)
        self._refused += count
        per_second = self._departures / WINDOW_SECONDS
        if per_second < 1 / WINDOW_SECONDS:
            return SATURATED_RETRY_MS
        return min(max(int(1_000 * self._refused / per_second), MIN_RETRY_MS), MAX_RETRY_MS)

    def _decay(self, now_us: int) -> None:
        elapsed = max(0, now_us - self._at_us) / 1_000_000
        self._departures *= math.exp(-elapsed / WINDOW_SECONDS)
        self._at_us = max(self._at_us, now_us)
        if elapsed > MAX_RETRY_MS / 1_000:
            self._refused = 0
