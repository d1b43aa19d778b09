"""Wiring of followers; separate, because polars and PyArrow are slow to import."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Literal

from postroom.adapters.compose.store import Store, open_log_reader, open_store
from postroom.application.extras import explain_missing_extra
from postroom.application.monitor import Monitor
from postroom.projections.follow import Follower
from postroom.projections.follow_monitor import follow_monitor
from postroom.projections.incremental.counts import FollowCounts
from postroom.projections.incremental.sizing import MAX_EVENTS

__all__ = ["MAX_EVENTS", "Engine", "FollowCounts", "RunningFollower", "make_follower", "open_follower"]

Engine = Literal["local", "spark"]


class RunningFollower:
    """A follower of a store's read models.

    Arguments:
        engine: `local` polls the log itself; with `spark`, a structured stream triggers the same batches.
        checkpoint: see `follow_with_spark`.
    """

    def __init__(self, follower: Follower, engine: Engine, checkpoint: str | Path | None) -> None:
        self._follower = follower
        self._engine = engine
        self._checkpoint = checkpoint
        self._stop = Event()

    @property
    def counts(self) -> FollowCounts:
        """Return the counters."""
        return self._follower.counts

    def stop(self) -> None:
        """End `run` after the batch under way."""
        self._stop.set()

    def run(self, *, once: bool = False) -> None:
        """Follow until stopped, through outages of the store; see `Follower.run`."""
        if self._engine == "local":
            self._follower.run(self._stop, once=once)
            return
        with explain_missing_extra():
            from postroom.projections.spark.follow import follow_with_spark

        follow_with_spark(self._follower, self._stop, once=once, checkpoint=self._checkpoint)

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
def open_follower(
    address: str,
    engine: Engine = "local",
    *,
    checkpoint: str | Path | None = None,
    max_events: int = MAX_EVENTS,
) -> Iterator[RunningFollower]:
    """Open a follower of a store while the context lasts.

    Arguments:
        address: of the store.
        checkpoint: Spark's checkpoint directory; see `follow_with_spark`.
        max_events: records of a batch, at most.
    """
    with closing(make_follower(open_store(address), max_events=max_events)) as follower:
        yield RunningFollower(follower, engine, checkpoint)
