"""Pace of a redrive job."""

TICK_SECONDS = 0.05
"""Minimum pause between the steps of a job with a rate."""
CATCH_UP_SECONDS = 1.0
"""Maximum backlog of a delayed job, as time at its rate."""


class Pace:
    """Rate limiter of a job.

    Arguments:
        rate: messages per second; None for no limit.
        now: monotonic time in seconds.
    """

    def __init__(self, rate: int | None, now: float) -> None:
        self._rate = rate
        self._credit = 0.0
        self._at = now

    def allowance(self, now: float, maximum: int) -> int:
        """Return the number of messages that may be changed now, up to `maximum`."""
        if self._rate is None:
            return maximum
        self._credit += self._rate * max(0.0, now - self._at)
        self._at = now
        self._credit = min(self._credit, max(self._rate * CATCH_UP_SECONDS, 1.0))
        return min(int(self._credit), maximum)

    def spend(self, messages: int) -> None:
        """Count changed messages against the rate."""
        self._credit -= messages

    def pause(self) -> float:
        """Return the seconds until the next message may be changed."""
        if self._rate is None:
            return 0.0
        return max(TICK_SECONDS, (1.0 - self._credit) / self._rate)
