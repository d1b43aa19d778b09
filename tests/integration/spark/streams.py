"""Starting streaming queries."""

from collections.abc import Callable

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

MAX_STARTS = 5


def start(writer: DataStreamWriter, wait: Callable[[StreamingQuery], object]) -> StreamingQuery:
    """Start a query, wait for its first batches, and return it.

    Spark gives the Python process of a source 10 s to connect, which a busy machine may exceed: such a query,
    which has read nothing yet, is started again.
    """
    for _ in range(MAX_STARTS - 1):
        query = writer.start()
        try:
            wait(query)
        except StreamingQueryException as error:
            if "Python worker failed to connect back" not in str(error):
                raise
        else:
            return query
    query = writer.start()
    wait(query)
    return query
