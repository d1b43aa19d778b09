"""The mailbox read model in Spark: every message with its headers and what became of it.

The narrow records of deliveries are folded by hash aggregates and joined to the wide `MessageSent` ones,
which then move through one shuffle only; measured against a window over all records, that is the faster form
(ADR 0006).
"""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # Spark's own custom

from postroom.projections.cut import MailboxCut
from postroom.projections.rows import HEADER_COLUMNS, MAILBOX_COLUMNS, STANDING_AFTER, Standing
from postroom.projections.source import read_log

STAGED_COLUMNS = (*MAILBOX_COLUMNS, "redriven_at", "died_at_place")
"""What other read models need is staged beside the table's columns."""

_STANDINGS = tuple(Standing)
_ATTEMPT_BITS = 24
_STANDING_BITS = 4


def messages(session: SparkSession, store: str, cuts: Sequence[MailboxCut]) -> DataFrame:
    """Return a row of `STAGED_COLUMNS` for every message in the cuts, each partition in the order of `id`."""
    sent = read_log(
        session,
        store,
        cuts,
        *(
            "place",
            "mailbox_id",
            "mailbox",
            "position",
            "stream",
            "type",
            "at",
            "topic",
            "shard",
            "due",
            "cut_at",
        ),
        *("message_id", *HEADER_COLUMNS, "envelope"),
    ).where(F.col("type").startswith("MessageSent."))
    # The folded side is narrow: it makes the hash table, and neither side is sorted for the join.
    folded = _fold_deliveries(session, store, cuts).hint("shuffle_hash")
    rows = sent.join(folded, ["mailbox_id", "stream"], "left").select(
        F.col("place").alias("id"),
        F.coalesce("message_id", _uuid(F.col("stream"))).alias("message_id"),
        "topic",
        *HEADER_COLUMNS,
        F.col("at").alias("created_at"),
        "mailbox",
        "position",
        "shard",
        F.coalesce(_standing(F.col("last")), _standing_when_sent()).alias("status"),
        F.coalesce(F.col("last_attempt").bitwiseAND((1 << _ATTEMPT_BITS) - 1), F.lit(0)).alias("attempts"),
        F.coalesce("redriven", F.lit(0)).alias("redriven"),
        F.coalesce("changed_at", "at").alias("changed_at"),
        F.col("envelope").alias("envelope_blob"),
        "redriven_at",
        "died_at_place",
    )
    return rows.select(*STAGED_COLUMNS).sortWithinPartitions("id")


def _fold_deliveries(session: SparkSession, store: str, cuts: Sequence[MailboxCut]) -> DataFrame:
    """Return one row for each message that something happened to.

    "The last" is a maximum over the version, packed with what is wanted into one integer: such maxima are
    hash aggregates, while `max_by` of structs would have Spark sort.
    """
    columns = ("place", "mailbox_id", "stream", "version", "type", "event", "at", "attempt", "due", "cut_at")
    kind = F.col("type")
    deliveries = read_log(session, store, cuts, *columns).where(
        kind.startswith("Message") & ~kind.startswith("MessageSent.")
    )
    event = F.col("event")
    redriven = event == "MessageRedriven"
    attempt = F.when(redriven, F.lit(0)).otherwise(F.col("attempt"))
    version = F.col("version")
    return deliveries.groupBy("mailbox_id", "stream").agg(
        F.max(F.shiftleft(version, _STANDING_BITS).bitwiseOR(_standing_code(event))).alias("last"),
        F.max(F.shiftleft(version, _ATTEMPT_BITS).bitwiseOR(attempt)).alias("last_attempt"),
        F.max("at").alias("changed_at"),
        F.count_if(redriven).alias("redriven"),
        F.max(F.when(redriven, F.col("at"))).alias("redriven_at"),
        F.max(F.when(event == "MessageDeadLettered", F.col("place"))).alias("died_at_place"),
    )


def _standing_code(event: Column) -> Column:
    code = F.raise_error(F.concat(F.lit("The log holds an event of unknown type "), F.col("type"))).cast(
        "bigint"
    )
    for name, standing in STANDING_AFTER.items():
        after = F.lit(_STANDINGS.index(standing))
        if standing == Standing.READY:
            after = F.when(F.col("due") > F.col("cut_at"), _STANDINGS.index(Standing.DELAYED)).otherwise(
                after
            )
        code = F.when(event == name, after).otherwise(code)
    return code


def _standing(last: Column) -> Column:
    names = F.array(*(F.lit(standing.value) for standing in _STANDINGS))
    return F.get(names, last.bitwiseAND((1 << _STANDING_BITS) - 1))


def _standing_when_sent() -> Column:
    due = F.col("due")
    return (
        F.when(due.isNull(), Standing.ARCHIVED.value)
        .when(due > F.col("cut_at"), Standing.DELAYED.value)
        .otherwise(Standing.READY.value)
    )


def _uuid(stream: Column) -> Column:
    digits = F.lower(F.hex(stream))
    return F.concat_ws("-", *(F.substring(digits, start, size) for start, size in _UUID_PARTS))


_UUID_PARTS = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
