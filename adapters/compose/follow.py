"""Wire what follows the read models of a store; apart, because polars takes long to load."""

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from threading import Event
from typing import Literal

from postroom.application.telemetry import Metric
from postroom.domain.errors import Unavailable

try:
    from postroom.projections.follow import MOST_EVENTS, FollowCounts, Follower
except ImportError:
    raise Unavailable(
        "Following the read models needs polars and PyArrow, which are not installed; "
        "run: pip install 'postroom[spark]'. A JVM is needed only with --engine spark."
    ) from None

__all__ = ["MOST_EVENTS", "Engine", "FollowCounts", "RunningFollower", "open_follower"]

Engine = Literal["local", "spark"]


class RunningFollower:
    """Keep the read models of a store up to date.

    Arguments:
        engine: `local` looks at the log itself; `spark` is told by a structured stream. They apply the same.
    """

    def __init__(self, follower: Follower, engine: Engine, checkpoint: str | Path | None) -> None:
        self._follower = follower
        self._engine = engine
        self._checkpoint = checkpoint
        self._stop = Event()

    @property
    def counts(self) -> FollowCounts:
        """Return what was done."""
        return self._follower.counts

    def stop(self) -> None:
        """Let `run` return once the batch under way is applied."""
        self._stop.set()

    def run(self, *, once: bool = False) -> None:
        """Follow until told to stop, through outages of the store; see `Follower.run`."""
        if self._engine == "local":
            self._follower.run(self._stop, once=once)
            return
        from postroom.projections.follow_spark import follow_with_spark

        follow_with_spark(self._follower, self._stop, once=once, checkpoint=self._checkpoint)

    def serve_metrics(self, port: int) -> AbstractAsyncContextManager[str]:
        """Serve what `measure` yields at a loopback port while the context lasts, and yield the URL.

        Raises: Unavailable when the port can't be had.
        """
        from postroom.adapters.http.metrics import serve_metrics  # aiohttp takes long to load

        return serve_metrics(self.measure, port)

    def measure(self) -> Iterator[Metric]:
        """Yield what there is to be watched."""
        counts = self.counts
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
            "How long the oldest of those records waits, at most.",
            [(labels, round(lag.seconds, 3)) for labels, lag in lags],
        )
        for name, help_, value in (
            ("events", "Log records applied.", counts.events),
            ("batches", "Batches applied.", counts.batches),
            ("seconds", "Seconds that applying took.", round(counts.seconds, 6)),
            ("parked", "Log records that could not be folded and were left out.", counts.parked),
            ("outages", "How often the store could not be used.", counts.outages),
        ):
            yield Metric(f"postroom_follow_{name}", "counter", help_, [({}, value)])
        for name, help_, value in (
            ("last_batch_events", "Log records of the last batch.", counts.last_events),
            ("last_batch_seconds", "Seconds that the last batch took.", round(counts.last_seconds, 6)),
            ("version", "Version of the read models that is brought up to date.", counts.version),
        ):
            yield Metric(f"postroom_follow_{name}", "gauge", help_, [({}, value)])


@contextmanager
def open_follower(
    store: str,
    engine: Engine = "local",
    *,
    checkpoint: str | Path | None = None,
    most_events: int = MOST_EVENTS,
) -> Iterator[RunningFollower]:
    """Have what follows a store, while the context lasts.

    Arguments:
        store: path of a SQLite store, or URL of a PostgreSQL one.
        checkpoint: folder for Spark's notes; see `follow_with_spark`.
        most_events: records of a batch, at most.
    """
    follower = Follower(store, most_events=most_events)
    try:
        yield RunningFollower(follower, engine, checkpoint)
    finally:
        follower.close()
