"""Backlog: unsettled messages by mailbox, topic and shard (SDS-047 QRY-050)."""

from collections.abc import Iterator

import polars as pl

from postroom.projections.projection import Column, MessageProjection, Row

COUNTED = ("ready", "in_flight", "delayed", "dead")


def derive(messages: pl.DataFrame) -> pl.DataFrame:
    """Return a row for every shard that holds unsettled messages."""
    status = pl.col("status")
    counts = [(status == name).sum().cast(pl.Int64).alias(name) for name in COUNTED]
    oldest = pl.col("created_at").filter(status != "dead").min().alias("oldest_at")
    return messages.filter(status.is_in(COUNTED)).group_by("mailbox", "topic", "shard").agg(*counts, oldest)


def reference(message: Row) -> Iterator[Row]:
    """Yield what one message counts for."""
    status = message["status"]
    if status in COUNTED:
        yield {
            "mailbox": message["mailbox"],
            "topic": message["topic"],
            "shard": message["shard"],
            **{name: int(status == name) for name in COUNTED},
            "oldest_at": None if status == "dead" else message["created_at"],
        }


PROJECTION = MessageProjection(
    "backlog",
    (
        Column("mailbox", "text", "key"),
        Column("topic", "text", "key"),
        Column("shard", "int", "key"),
        *(Column(name, "int", "sum") for name in COUNTED),
        Column("oldest_at", "int", "min"),
    ),
    derive=derive,
    reference=reference,
)
"""`oldest_at` is the log time (µs) at which the oldest message that is not dead was sent."""
