"""Metrics of an admin."""

from collections import Counter
from collections.abc import Iterator, Mapping

from postroom.application.cluster.route_queue import PushCounts
from postroom.application.metrics import Metric, counter, gauge, histogram

STATES = ("active", "expiring", "released", "expired")


class ControlPlaneCounts:
    """Counters of what an admin did since it started."""

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
