"""Following by Spark: a structured stream over `postroom_log` tells what is new; its batches are applied.

The cursor in the database is the authority, not Spark's checkpoint. A micro-batch only says up to where to
go: what lies between the cursor and there is read, folded and applied by the same code as without Spark. So
nothing is applied twice and nothing is left out, whatever the checkpoint says; every start begins a new one
at the cursor, and losing the folder loses nothing.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock
from typing import TYPE_CHECKING

import msgspec

from postroom.domain.errors import PostroomError, Unavailable
from postroom.projections.follow import MOST_EVENTS, Follower
from postroom.projections.session import start_session

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
"""Micro-batches are many and small: what helps large jobs only delays them."""
POLL_SECONDS = 0.2
_RAISED = "[USER_RAISED_EXCEPTION]"


def follow_with_spark(
    follower: Follower,
    stop: Event,
    *,
    once: bool = False,
    checkpoint: str | Path | None = None,
    most_events: int = MOST_EVENTS,
) -> None:
    """Follow as `Follower.run` does, in micro-batches of Spark.

    Arguments:
        once: end when all is covered that was there.
        checkpoint: folder on this machine in which Spark's notes are made anew at every start; a temporary
            one when left out.
        most_events: records of a micro-batch, at most.

    Raises: NotFound when nothing was built yet; Unavailable when Spark or Java is missing, or, with `once`,
        when the store can't be used.
    """
    session = start_session(CONFIG)
    with TemporaryDirectory(prefix="postroom-follow-", ignore_cleanup_errors=True) as temporary:
        folder = Path(checkpoint or temporary) / "postroom-follow"

        def work(stop: Event) -> None:
            shutil.rmtree(folder, ignore_errors=True)
            _Stream(session, follower, folder, most_events).run(stop, once=once)

        follower.lead(stop, work, once=once)


class _Stream:
    """One run of the stream, from the cursor on."""

    def __init__(
        self, session: "SparkSession", follower: Follower, checkpoint: Path, most_events: int
    ) -> None:
        self._session = session
        self._follower = follower
        self._checkpoint = checkpoint
        self._most_events = most_events
        self._applying = Lock()
        self._stop = Event()
        self._raised: PostroomError | None = None

    def run(self, stop: Event, *, once: bool) -> None:
        with self._query(once) as query:
            while query.isActive and not stop.wait(POLL_SECONDS):
                pass
            if not stop.is_set():
                query.awaitTermination()  # it ended by itself: if in failure, that is raised

    @contextmanager
    def _query(self, once: bool) -> "Iterator[StreamingQuery]":
        from pyspark.errors import StreamingQueryException

        from postroom.projections.source import follow_log

        start = self._follower.positions()
        log = follow_log(
            self._session,
            self._follower.store,
            start,
            "position",
            archive=self._follower.archive,
            max_rows=self._most_events,
        )
        writer = log.writeStream.foreachBatch(self._apply).option("checkpointLocation", str(self._checkpoint))
        writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime="0 seconds")
        query = writer.start()
        try:
            yield query
        except StreamingQueryException as error:
            raise self._raised or Unavailable(f"Spark stopped following: {_reason(error)}") from error
        finally:
            self._stop.set()
            with self._applying:  # the batch under way is committed, or was not begun
                query.stop()

    def _apply(self, batch: "DataFrame", number: int) -> None:
        with self._applying:
            if self._stop.is_set():
                return
            try:
                self._follower.advance(self._end(number), self._stop)
            except PostroomError as error:
                self._raised = error
                raise

    def _end(self, number: int) -> dict[str, int]:
        """Return where a batch ends, by mailbox.

        Spark notes it before it begins the batch; asking the batch's rows would take a job, and that longer
        than all the rest.
        """
        *_, offset = (self._checkpoint / "offsets" / str(number)).read_text("utf-8").splitlines()
        return msgspec.json.decode(offset, type=dict[str, int])


def _reason(error: Exception) -> str:
    """Return what went wrong in one line; Spark wraps what was raised in pages of its own."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    raised = next((line for line in lines if _RAISED in line), "")
    return raised.partition(_RAISED)[2].partition(" SQLSTATE")[0].strip() or (
        lines[0] if lines else repr(error)
    )
