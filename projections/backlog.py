"""The backlog read model in Spark: unsettled messages by mailbox, topic and shard."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # Spark's own custom

from postroom.projections.rows import BACKLOG_COLUMNS


def backlog(messages: DataFrame) -> DataFrame:
    """Return a row of `BACKLOG_COLUMNS` for every shard that holds unsettled messages.

    Arguments:
        messages: rows of the mailbox read model.
    """
    status = F.col("status")
    counts = [F.count_if(status == name).alias(name) for name in ("ready", "in_flight", "delayed", "dead")]
    oldest = F.min(F.when(status != "dead", F.col("created_at"))).alias("oldest_at")
    unsettled = messages.where(status.isin("ready", "delayed", "in_flight", "dead"))
    return unsettled.groupBy("mailbox", "topic", "shard").agg(*counts, oldest).select(*BACKLOG_COLUMNS)
