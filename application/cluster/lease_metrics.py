"""Metrics of the leases of a runner (RFC-049)."""

from collections import Counter

from postroom.application.metrics import Metric, gauge, histogram, new_histogram


class LeaseMetrics:
    """What became of the requests of a runner for leases."""

    def __init__(self) -> None:
        self.acquisitions: Counter[str] = Counter()
        """By result: `granted`, `held` by another runner, or `failed`."""
        self.renewals: Counter[str] = Counter()
        """By result: `renewed`, `refused` or `failed`."""
        self.acquire_seconds = new_histogram()
        self.heartbeat_seconds = new_histogram()

    def collect(self, remaining: dict[str, float]) -> list[Metric]:
        """Return the metrics.

        Arguments:
            remaining: seconds until the deadline of each lease that the runner has, by mailbox.
        """
        return [
            gauge("postroom_runner_leases", "Leases that the runner has.", len(remaining)),
            Metric(
                "postroom_runner_lease_remaining_seconds",
                "gauge",
                "Time until the runner stops to append, unless it renews the lease.",
                [({"mailbox": mailbox}, seconds) for mailbox, seconds in sorted(remaining.items())],
            ),
            _by_result("postroom_runner_acquisitions", "Requests for leases by result.", self.acquisitions),
            _by_result("postroom_runner_heartbeats", "Heartbeats by result.", self.renewals),
            histogram(
                "postroom_runner_acquire_seconds", "Time until leases were granted.", self.acquire_seconds
            ),
            histogram(
                "postroom_runner_heartbeat_seconds", "Time until leases were renewed.", self.heartbeat_seconds
            ),
        ]


def _by_result(name: str, text: str, numbers: Counter[str]) -> Metric:
    return Metric(name, "counter", text, [({"result": each}, numbers[each]) for each in sorted(numbers)])
