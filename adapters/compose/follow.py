"""Wiring of followers; separate, because polars and PyArrow are slow to import."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event

from postroom.adapters.compose.store import Store, open_log_reader, open_store
from postroom.adapters.compose.targets import open_clickhouse
from postroom.application.metrics import Monitor
from postroom.projections.follow import Follower
from postroom.projections.follow_monitor import follow_monitor
from postroom.projections.incremental.counts import FollowCounts
from postroom.projections.incremental.sizing import MAX_EVENTS
from postroom.projections.ports.read_model_updater import ReadModelUpdater

__all__ = ["MAX_EVENTS", "FollowCounts", "RunningFollower", "make_follower", "open_follower"]


class RunningFollower:
    """A follower of a store's read models."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._stop = Event()

    @property
    def counts(self) -> FollowCounts:
        """Return the counters."""
        return self._follower.counts

    def stop(self) -> None:
        """End `run`; a batch under way is undone."""
        self._stop.set()

    def run(self, *, once: bool = False) -> None:
        """Follow until stopped, through outages of the store; see `Follower.run`."""
        self._follower.run(self._stop, once=once)

    @property
    def monitor(self) -> Monitor:
        """Return the metrics and the readiness of the follower."""
        return follow_monitor(self._follower)


def open_updater(store: Store, into: str | None = None) -> ReadModelUpdater:
    """Return the updater of a store's read models; see `make_follower`."""
    if into is None:
        return store.read_model_updater()
    database = open_clickhouse(into, "can't be followed")
    from postroom.adapters.clickhouse.read_model_updater import ClickHouseReadModelUpdater

    return ClickHouseReadModelUpdater(database, store.read_model_updater())


def make_follower(
    store: Store, *, version: int | None = None, max_events: int = MAX_EVENTS, into: str | None = None
) -> Follower:
    """Return a follower of a store's read models; see `Follower`.

    Arguments:
        into: `clickhouse:` or `chdb:` address into which they were built; None for the store's own.
    """
    return Follower(
        open_updater(store, into),
        lambda archive: open_log_reader(store, archive),
        version=version,
        max_events=max_events,
    )


@contextmanager
def open_follower(
    address: str, *, max_events: int = MAX_EVENTS, into: str | None = None
) -> Iterator[RunningFollower]:
    """Open a follower of a store while the context lasts.

    Arguments:
        address: of the store.
        max_events: records of a batch, at most.
        into: see `make_follower`.
    """
    with closing(make_follower(open_store(address), max_events=max_events, into=into)) as follower:
        yield RunningFollower(follower)
