"""Metrics and readiness of a follower."""

from collections.abc import Iterator

from postroom.application.metrics import Metric, Monitor
from postroom.projections.follow import Follower
from postroom.projections.incremental.counts import FollowCounts


def follow_monitor(follower: Follower) -> Monitor:
    """Return the monitor of a follower."""

    async def collect() -> list[Metric]:
        return list(_metrics(follower.counts))

    async def find_missing() -> list[str]:
        return [] if follower.progress.is_made else ["read_models"]

    return Monitor(collect, find_missing)


def _metrics(counts: FollowCounts) -> Iterator[Metric]:
    lags = [({"mailbox": name}, lag) for name, lag in sorted(counts.lags.items())]
    yield Metric(
        "postroom_follow_lag_events",
        "gauge",
        "Log records that the read models are behind.",
        [(labels, lag.events) for labels, lag in lags],
    )
    yield Metric(
        "postroom_follow_lag_seconds",
        "gauge",
        "Upper bound of the age of the oldest of these records.",
        [(labels, round(lag.seconds, 3)) for labels, lag in lags],
    )
    for name, help_, value in (
        ("events", "Log records applied.", counts.events),
        ("batches", "Batches applied.", counts.batches),
        ("seconds", "Time spent applying batches, in seconds.", round(counts.seconds, 6)),
        ("parked", "Log records that could not be folded and were left out.", counts.parked),
        ("outages", "Number of times that the store was unavailable.", counts.outages),
    ):
        yield Metric(f"postroom_follow_{name}", "counter", help_, [({}, value)])
    for name, help_, value in (
        ("last_batch_events", "Log records in the last batch.", counts.last_events),
        ("last_batch_seconds", "Duration of the last batch in seconds.", round(counts.last_seconds, 6)),
        ("version", "Version of the read models that is updated.", counts.version),
    ):
        yield Metric(f"postroom_follow_{name}", "gauge", help_, [({}, value)])
