"""Activity: number of events by mailbox, topic and type, in each hour and day (RFC-037 phase 7)."""

import polars as pl

from postroom.projections.projection import Column, EventProjection

PERIODS = {"hour": 3_600_000_000, "day": 86_400_000_000}
"""Length of each period in µs, aligned to midnight UTC."""


def fold(records: pl.DataFrame) -> pl.DataFrame:
    """Return a row for each mailbox, period, topic and event type."""
    hours = _count_by_period(
        records.select(
            "mailbox",
            pl.lit("hour").alias("period"),
            (pl.col("at") // PERIODS["hour"] * PERIODS["hour"]).alias("starts_at"),
            pl.col("topic").fill_null(""),
            "event",
            pl.lit(1, pl.Int64).alias("events"),
            pl.col("at").alias("first_at"),
            pl.col("at").alias("last_at"),
        )
    )
    day = pl.col("starts_at") // PERIODS["day"] * PERIODS["day"]
    days = _count_by_period(hours.with_columns(pl.lit("day").alias("period"), day.alias("starts_at")))
    return pl.concat([hours, days])


def _count_by_period(rows: pl.DataFrame) -> pl.DataFrame:
    sums = (pl.col("events").sum(), pl.col("first_at").min(), pl.col("last_at").max())
    return rows.group_by("mailbox", "period", "starts_at", "topic", "event").agg(*sums)


PROJECTION = EventProjection(
    "activity",
    (
        Column("mailbox", "text", "key"),
        Column("period", "text", "key"),
        Column("starts_at", "int", "key"),
        Column("topic", "text", "key"),
        Column("event", "text", "key"),
        Column("events", "int", "sum"),
        Column("first_at", "int", "min", required=True),
        Column("last_at", "int", "max", required=True),
    ),
    indexes=(("period", "starts_at"),),
    reads=("mailbox", "at", "topic", "event"),
    fold=fold,
)
