"""Following with Spark: a structured stream over the log triggers the batches.

The cursors in the database are authoritative, not Spark's checkpoint. A micro-batch only defines the
positions to advance to; the records are read, folded and applied by the same code as without Spark. No record
is applied twice or skipped, regardless of the checkpoint; every start begins a new one at the cursors.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock
from typing import TYPE_CHECKING

import msgspec

from postroom.application.telemetry import summarize
from postroom.domain.errors import PostroomError, Unavailable
from postroom.projections.follow import Follower
from postroom.projections.incremental.sizing import MAX_EVENTS
from postroom.projections.spark.session import start_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

CONFIG = {
    "spark.master": "local[2]",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.driver.memory": "1g",
}
"""Settings for many small micro-batches, which the defaults for large jobs would delay."""
POLL_SECONDS = 0.2
MAX_STARTS = 10
"""How often a stream is started whose Python worker is not there within Spark's fixed limit of 10 s."""
_USER_ERROR = "[USER_RAISED_EXCEPTION]"
_LATE_WORKER = "Python worker failed to connect back"


class _LateWorker(Unavailable):
    """Spark gave up waiting for its Python worker, as on an overloaded machine; nothing was applied twice."""


def follow_with_spark(
    follower: Follower,
    stop: Event,
    *,
    once: bool = False,
    checkpoint: str | Path | None = None,
    max_events: int = MAX_EVENTS,
) -> None:
    """Follow as `Follower.run` does, in micro-batches of Spark.

    Arguments:
        once: return when all present records are applied.
        checkpoint: checkpoint directory on this machine, cleared at every start; safe to delete. A temporary
            one by default.
        max_events: maximum number of records in a micro-batch.

    Raises: NotFound before the first rebuild; Unavailable when Spark or Java is missing, or, with `once`,
        when the store can't be used.
    """
    session = start_session(CONFIG)
    with TemporaryDirectory(prefix="postroom-follow-", ignore_cleanup_errors=True) as temporary:
        folder = Path(checkpoint or temporary) / "postroom-follow"

        def work(stop: Event) -> None:
            starts = 0
            while True:
                starts += 1
                shutil.rmtree(folder, ignore_errors=True)
                try:
                    _Stream(session, follower, folder, max_events).run(stop, once=once)
                    return
                except _LateWorker:
                    if starts == MAX_STARTS or stop.is_set():
                        raise

        follower.lead(stop, work, once=once)


class _Stream:
    """One run of the stream, from the cursors on."""

    def __init__(
        self, session: "SparkSession", follower: Follower, checkpoint: Path, max_events: int
    ) -> None:
        self._session = session
        self._follower = follower
        self._checkpoint = checkpoint
        self._max_events = max_events
        self._batch_lock = Lock()
        self._stop = Event()
        self._error: PostroomError | None = None

    def run(self, stop: Event, *, once: bool) -> None:
        with self._query(once) as query:
            while query.isActive and not stop.wait(POLL_SECONDS):
                if not self._batch_lock.locked():  # Spark begins no batch without new records
                    self._follower.progress.succeeded()
            if not stop.is_set():
                query.awaitTermination()  # raises if the query failed

    @contextmanager
    def _query(self, once: bool) -> "Iterator[StreamingQuery]":
        from pyspark.errors import StreamingQueryException

        from postroom.projections.spark.source import follow_log

        start = self._follower.positions()
        log = follow_log(
            self._session,
            self._follower.open_log(),
            start,
            "position",
            max_rows=self._max_events,
        )
        writer = log.writeStream.foreachBatch(self._apply).option("checkpointLocation", str(self._checkpoint))
        writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime="0 seconds")
        query = writer.start()
        try:
            yield query
        except StreamingQueryException as error:
            kind = _LateWorker if _LATE_WORKER in str(error) else Unavailable
            raise self._error or kind(f"Spark stopped following: {_reason(error)}") from error
        finally:
            self._stop.set()
            with self._batch_lock:  # wait for the current batch
                query.stop()

    def _apply(self, batch: "DataFrame", number: int) -> None:
        with self._batch_lock:
            if self._stop.is_set():
                return
            try:
                self._follower.advance(self._end(number), self._stop)
            except PostroomError as error:
                self._error = error
                raise

    def _end(self, number: int) -> dict[str, int]:
        """Return the last position of a batch, by mailbox.

        Spark writes it to the checkpoint before the batch begins. Computing it from the rows would need a
        Spark job, which would take longer than applying the batch.
        """
        *_, offset = (self._checkpoint / "offsets" / str(number)).read_text("utf-8").splitlines()
        return msgspec.json.decode(offset, type=dict[str, int])


def _reason(error: Exception) -> str:
    """Return the cause of an error in one line, without Spark's stack traces."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    user_error = next((line for line in lines if _USER_ERROR in line), "")
    return user_error.partition(_USER_ERROR)[2].partition(" SQLSTATE")[0].strip() or (
        lines[0] if lines else summarize(error)
    )
