"""The dead-letter read model in Spark: every message that is dead, and why."""

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # Spark's own custom

from postroom.application.codec import to_events
from postroom.domain.message import MessageDeadLettered
from postroom.projections.cut import MailboxCut
from postroom.projections.fingerprint import fingerprint
from postroom.projections.rows import DEAD_LETTER_COLUMNS
from postroom.projections.source import read_log

_RECORD = (
    "position",
    "stream",
    "version",
    "epoch",
    "type",
    "at",
    "topic",
    "shard",
    "attempt",
    "due",
    "reason",
    "state",
)
"""What the codec decodes an event from."""

_DEATH = "reason string, attempt bigint, last_error string, fingerprint string, last_seen bigint"


def dead_letters(
    session: SparkSession, store: str, cuts: Sequence[MailboxCut], messages: DataFrame
) -> DataFrame:
    """Return a row of `DEAD_LETTER_COLUMNS` for every message that is dead.

    Arguments:
        messages: rows of the mailbox read model, with what is staged beside its columns.
    """
    dead = messages.where(F.col("status") == "dead").select(
        *("id", "mailbox", "topic", "shard", "message_id", "redriven", "redriven_at", "died_at_place"),
        F.col("created_at").alias("first_seen"),
    )
    deaths = read_log(session, store, cuts, "place", *_RECORD).where(
        F.col("type").startswith("MessageDeadLettered.")
    )
    # Redriven messages died before, too: only the last death is decoded.
    last = deaths.join(dead.select(F.col("died_at_place").alias("place")), "place", "left_semi")
    # A plain UDF: the Arrow kind would want pandas, and dead letters are few.
    decode = F.udf(_decode, _DEATH, useArrow=False)
    reasons = last.select("place", decode(*_RECORD).alias("died")).select("place", "died.*")
    return dead.join(reasons, dead.died_at_place == reasons.place).select(*DEAD_LETTER_COLUMNS)


def _decode(*record: Any) -> tuple[str, int, str | None, str, int]:
    died = next(to_events([record]))
    assert isinstance(died, MessageDeadLettered)
    return died.reason, died.attempt, died.last_error, fingerprint(died.reason, died.last_error), died.at
