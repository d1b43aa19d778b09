"""Starting streaming queries."""

import time
from collections.abc import Callable
from typing import TypeVar

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

T = TypeVar("T")
START_SECONDS = 600
"""Below the time that a test may take."""


def start(writer: DataStreamWriter, wait: Callable[[StreamingQuery], object]) -> StreamingQuery:
    """Start a query, wait for its first batches, and return it."""

    def run() -> StreamingQuery:
        query = writer.start()
        wait(query)
        return query

    return repeat_until_connected(run)


def repeat_until_connected(run: Callable[[], T]) -> T:
    """Run what starts a query, again while the Python process of its source does not connect to Spark.

    Spark gives the process 10 s, which a busy machine may exceed: such a query has read nothing yet.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return run()
        except StreamingQueryException as error:
            is_late = "Python worker failed to connect back" in str(error)
            if not is_late or time.monotonic() > deadline:
                raise
