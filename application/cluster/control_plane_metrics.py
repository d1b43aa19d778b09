"""Settings of an admin, its lease policies, and the metrics of admins and runners."""

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from postroom.application.cluster.route_queue import PushCounts
from postroom.application.metrics import Metric, counter, gauge, histogram, new_histogram
from postroom.domain.arguments import check_int
from postroom.domain.errors import InvalidRequest
from postroom.domain.lease.lease import (
    MAX_LEASE_MS,
    LeasePolicy,
)
from postroom.domain.policy import DAY_MS, SECOND_MS

STATES = ("active", "expiring", "released", "expired")


class ControlPlaneCounts:
    """Counters of an admin's actions since it started."""

    def __init__(self) -> None:
        self.acquisitions = 0
        self.renewals = 0
        self.releases = 0
        self.expiries = 0
        self.refusals: Counter[str] = Counter()
        """By the code of the error."""
        self.pushes = PushCounts()


def control_plane_metrics(
    counts: ControlPlaneCounts, states: Mapping[str, int], members: Mapping[str, int], position: int
) -> Iterator[Metric]:
    """Yield the metrics of an admin.

    Arguments:
        states: number of leases by state.
        members: number of proxies and runners.
        position: of the last event of the log of leases that was read.
    """
    yield Metric(
        "postroom_leases",
        "gauge",
        "Leases by status; expiring ones are in their grace period.",
        [({"status": state}, states.get(state, 0)) for state in STATES],
    )
    for name, text, value in (
        ("acquisitions", "Leases that this admin granted.", counts.acquisitions),
        ("renewals", "Leases that this admin renewed.", counts.renewals),
        ("releases", "Leases that were released at this admin.", counts.releases),
        ("expiries", "Leases of the cluster that expired.", counts.expiries),
    ):
        yield counter(f"postroom_lease_{name}", text, value)
    yield Metric(
        "postroom_lease_refusals",
        "counter",
        "Acquisitions, renewals and releases that this admin refused, by code.",
        [({"reason": code}, number) for code, number in sorted(counts.refusals.items())],
    )
    yield Metric(
        "postroom_route_pushes",
        "counter",
        "Changes of routes pushed to proxies, by outcome; with their next registration they get the rest.",
        [({"outcome": outcome}, number) for outcome, number in sorted(counts.pushes.outcomes.items())],
    )
    yield histogram(
        "postroom_route_push_seconds", "Time until a proxy had a change of a route.", counts.pushes.seconds
    )
    yield Metric(
        "postroom_members",
        "gauge",
        "Proxies of the cluster, and runners that registered with this admin.",
        [({"kind": kind}, number) for kind, number in sorted(members.items())],
    )
    yield gauge("postroom_lease_log_position", "Position of the last lease event that was read.", position)


MIN_MEMBER_TTL_MS = 1_000
HEARTBEATS = 3
"""Registrations of a member per TTL, so that two may be lost."""


class ControlPlaneSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals of an admin, in ms.

    Arguments:
        member_ttl_ms: time without a registration after which a proxy or runner counts as gone.
        poll_ms: least pause between two reads of the log of leases, unless this admin writes to it.
        expiry_ms: pause between two searches for leases and proxies that expired.
        projection_ms: pause between two updates of RFC-049's tables.
        cleanup_ms: pause between two removals of events that no fold needs.
        call_ms: time in which the lease store must answer.
    """

    member_ttl_ms: int = 15_000
    poll_ms: int = 10
    expiry_ms: int = 500
    projection_ms: int = 1_000
    cleanup_ms: int = 60_000
    call_ms: int = 5_000

    @property
    def member_interval_ms(self) -> int:
        """Return the interval at which proxies and runners register."""
        return self.member_ttl_ms // HEARTBEATS

    def validate(self) -> "ControlPlaneSettings":
        """Return the settings; raise InvalidRequest for one that is out of range."""
        check_int("member_ttl_ms", self.member_ttl_ms, MIN_MEMBER_TTL_MS, DAY_MS)
        for name in ("poll_ms", "expiry_ms", "projection_ms", "cleanup_ms", "call_ms"):
            check_int(name, getattr(self, name), 1, DAY_MS)
        if self.poll_ms > self.member_ttl_ms:
            raise InvalidRequest("poll_ms must be at most member_ttl_ms; lower it.")
        return self


class LeasePolicies(msgspec.Struct, frozen=True):
    """Lease policies by namespace.

    Arguments:
        default: of the namespaces that have none of their own.
    """

    default: LeasePolicy = LeasePolicy()
    namespaces: Mapping[str, LeasePolicy] = {}

    def get(self, mailbox: str, ttl_ms: int | None = None) -> LeasePolicy:
        """Return the policy of a mailbox.

        Arguments:
            ttl_ms: TTL that a runner asks for; it may be shorter than the namespace's, not longer. None asks
                for the namespace's.

        Raises: InvalidRequest for a TTL below one second.
        """
        policy = self.namespaces.get(mailbox.partition("@")[0], self.default)
        if ttl_ms is None or check_int("ttl_ms", ttl_ms, SECOND_MS) >= policy.ttl_ms:
            return policy
        return scale_policy(policy, ttl_ms - ttl_ms % SECOND_MS)


def scale_policy(policy: LeasePolicy, ttl_ms: int) -> LeasePolicy:
    """Return a policy with another TTL, and with its other durations scaled in proportion."""

    def scale(duration_ms: int) -> int:
        return min(MAX_LEASE_MS, max(1, -(-duration_ms * ttl_ms // policy.ttl_ms)))

    heartbeat_interval_ms = min(scale(policy.heartbeat_interval_ms), ttl_ms // 2)
    return LeasePolicy(
        ttl_ms=ttl_ms,
        heartbeat_interval_ms=heartbeat_interval_ms,
        grace_period_ms=scale(policy.grace_period_ms),
    )


class LeaseMetrics:
    """Outcomes of the requests of a runner for leases."""

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
