"""Backlog: unsettled messages by mailbox, topic and shard (SDS-047 QRY-050)."""

import polars as pl

from postroom.projections.projection import Column, MessageProjection

STATUSES = ("ready", "in_flight", "delayed", "dead")


def derive(messages: pl.DataFrame) -> pl.DataFrame:
    """Return a row for every shard with unsettled messages."""
    status = pl.col("status")
    counts = [(status == name).sum().cast(pl.Int64).alias(name) for name in STATUSES]
    oldest = pl.col("created_at").filter(status != "dead").min().alias("oldest_at")
    return messages.group_by("mailbox", "topic", "shard").agg(*counts, oldest)


PROJECTION = MessageProjection(
    "backlog",
    (
        Column("mailbox", "text", "key"),
        Column("topic", "text", "key"),
        Column("shard", "int", "key"),
        *(Column(name, "int", "sum") for name in STATUSES),
        Column("oldest_at", "int", "min"),
    ),
    derive=derive,
)
"""`oldest_at` is the log time (µs) at which the oldest message that is not dead was sent."""
