"""Wiring of followers; separate, because polars and PyArrow are slow to import."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Event

from postroom.adapters.compose.store import Store, open_log_reader, open_store
from postroom.application.monitor import Monitor
from postroom.projections.follow import Follower
from postroom.projections.follow_monitor import follow_monitor
from postroom.projections.incremental.counts import FollowCounts
from postroom.projections.incremental.sizing import MAX_EVENTS

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


def make_follower(store: Store, *, version: int | None = None, max_events: int = MAX_EVENTS) -> Follower:
    """Return a follower of a store's read models; see `Follower`."""
    return Follower(
        store.read_model_updater(),
        lambda archive: open_log_reader(store, archive),
        version=version,
        max_events=max_events,
    )


@contextmanager
def open_follower(address: str, *, max_events: int = MAX_EVENTS) -> Iterator[RunningFollower]:
    """Open a follower of a store while the context lasts.

    Arguments:
        address: of the store.
        max_events: records of a batch, at most.
    """
    with closing(make_follower(open_store(address), max_events=max_events)) as follower:
        yield RunningFollower(follower)
