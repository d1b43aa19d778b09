"""Messages: every message with its headers and its status (RFC-037 `mailbox` table).

A range of the log is folded to one *partial* for each message: the state that follows from the events in the
range. Partials of one message merge in the order of their ranges; complete ones become rows.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import polars as pl

from postroom.domain.envelope.build import without_auth_token
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import Headers
from postroom.projections.log_reader import LogExtent
from postroom.projections.projection import POLARS, Column, Projection

HEADER_COLUMNS = tuple(name for name in Headers.__struct_fields__ if name != "message_id")
"""Headers of RFC-037 that are copied from the log."""


class MessageStatus(StrEnum):
    """The status of a message at the end of the extent; a delayed message is ready from its `due` on."""

    READY = "ready"
    DELAYED = "delayed"
    IN_FLIGHT = "in_flight"
    ACKED = "acked"
    DEAD = "dead"
    EXPIRED = "expired"
    ARCHIVED = "archived"


STATUS_AFTER = {
    "MessageReceived": MessageStatus.IN_FLIGHT,
    "MessageVisibilityExtended": MessageStatus.IN_FLIGHT,
    "MessageAcked": MessageStatus.ACKED,
    "MessageRequeued": MessageStatus.READY,
    "MessageDeadLettered": MessageStatus.DEAD,
    "MessageRedriven": MessageStatus.READY,
    "MessageRescheduled": MessageStatus.READY,
    "MessageExpired": MessageStatus.EXPIRED,
}
"""The status of a message after an event other than `MessageSent`."""

SETTLED = (MessageStatus.ACKED, MessageStatus.EXPIRED, MessageStatus.ARCHIVED)
"""Final statuses: no further event can follow."""


class DeadLettering(msgspec.Struct, omit_defaults=True):
    """The dead-lettering of a message, and the time of its redrive, if any (log time in µs)."""

    at: int
    reason: str
    attempt: int
    last_error: str | None = None
    redriven_at: int | None = None


class ParkedRecord(NamedTuple):
    """A record that can't be folded: its place, the name of its event, and the error."""

    place: int
    type: str
    error: str


PROJECTION = Projection(
    "mailbox",
    (
        Column("id", "int", "key"),
        Column("message_id", required=True),
        Column("timestamp", "int", required=True),
        Column("topic", required=True),
        *(Column(name) for name in HEADER_COLUMNS[1:]),
        Column("created_at", "int", required=True),
        Column("mailbox", required=True),
        Column("position", "int", required=True),
        Column("shard", "int", required=True),
        Column("status", required=True),
        Column("attempts", "int", required=True),
        Column("redriven", "int", required=True),
        Column("changed_at", "int", required=True),
        Column("due", "int"),
        Column("dead_letterings"),
        Column("stream", "bytes", required=True),
        Column("envelope_blob", "bytes", required=True, in_sql=False),
    ),
)
"""The `mailbox` table of RFC-037, with the status of each message.

    id: the log's place of its `MessageSent`: unique, and the same after every rebuild. timestamp: ms.
    created_at, changed_at: log time in µs of its first and its last event. status: a `MessageStatus`.
    attempts: deliveries since it was sent or last redriven. redriven: number of redrives. due: when a ready
    or delayed message may be delivered (log time, µs). dead_letterings: JSON array of `DeadLettering`, or
    null. stream: its stream id.
"""

READS = (
    *("place", "mailbox", "position", "stream", "event", "at", "topic", "shard"),
    *("attempt", "due", "reason", "last_error", "message_id", *HEADER_COLUMNS, "envelope"),
)
"""The columns of the log that `fold` reads."""

_SENT_COLUMNS: dict[str, pl.DataType] = {
    **dict.fromkeys(("id", "timestamp", "created_at", "position", "shard", "sent_due"), POLARS["int"]),
    **dict.fromkeys(("message_id", "topic", *HEADER_COLUMNS[1:]), POLARS["text"]),
    "envelope_blob": POLARS["bytes"],
}
_CHANGE_COLUMNS: dict[str, pl.DataType] = {
    **dict.fromkeys(("last_status", "dead_letterings"), POLARS["text"]),
    **dict.fromkeys(("due", "attempts", "changed_at", "redriven"), POLARS["int"]),
}
KEY = ("mailbox", "stream")
"""The key of a message before its place is known; two mailboxes may have the same stream id."""
PARTIAL: dict[str, pl.DataType] = {
    "mailbox": POLARS["text"],
    "stream": POLARS["bytes"],
    "first_place": POLARS["int"],
    **_SENT_COLUMNS,
    **_CHANGE_COLUMNS,
}
"""The columns of a partial; columns of `MessageSent`, or of later events, are null when the range has none.

`first_place` orders the partials of a message; `dead_letterings` has dead-letterings and redrives as
elements of a JSON array.
"""

SENT = "MessageSent"
EVENTS = (SENT, *STATUS_AFTER)
_DEAD_LETTER_EVENTS = {"MessageDeadLettered", "MessageRedriven"}
_encode = msgspec.json.Encoder().encode
_decode_pieces = msgspec.json.Decoder(list[dict[str, Any]]).decode


def is_message(event: str = "event") -> pl.Expr:
    """Return whether records belong to messages."""
    return pl.col(event).str.starts_with("Message")


def is_unknown(event: str = "event") -> pl.Expr:
    """Return whether records belong to messages and have a type unknown to this release; they are parked."""
    return is_message(event) & ~pl.col(event).is_in(EVENTS)


def fold(records: pl.DataFrame) -> tuple[pl.DataFrame, list[ParkedRecord]]:
    """Return one partial for each message of a range, and the records that could not be folded.

    Arguments:
        records: columns `READS` of log records in order; records of other streams are ignored. Without the
            column `envelope`, envelopes are empty.
    """
    parked: list[ParkedRecord] = []
    message_records = records
    if not set(records["event"].unique()) <= set(EVENTS):
        parked = [
            ParkedRecord(place, event, f"An event of unknown type {event}.")
            for place, event in records.filter(is_unknown()).select("place", "event").iter_rows()
        ]
        message_records = records.filter(pl.col("event").is_in(EVENTS))
    partials = _partials(message_records)
    if _is_any_sent_again(partials):
        # An id may be sent again after retention removed its message; with the archive, both are folded.
        generation = (pl.col("event") == SENT).cum_sum().over(KEY)
        generations = message_records.with_columns(generation.alias("generation")).partition_by("generation")
        partials = pl.concat(map(_partials, generations))
    return partials, parked


def _partials(records: pl.DataFrame) -> pl.DataFrame:
    event = pl.col("event")
    sent = records.filter(event == SENT).select(
        *KEY,
        pl.col("place").alias("id"),
        *("timestamp", pl.col("at").alias("created_at"), "position", "shard"),
        pl.col("due").alias("sent_due"),
        pl.coalesce("message_id", uuid_text("stream")).alias("message_id"),
        *("topic", *HEADER_COLUMNS[1:]),
        _envelopes(records).alias("envelope_blob"),
    )
    later = records.filter(event != SENT)
    if not later.height:
        nulls = (pl.lit(None, type_).alias(name) for name, type_ in _CHANGE_COLUMNS.items())
        return sent.with_columns(*nulls, first_place=pl.col("id")).select(*PARTIAL)
    is_redriven = event == "MessageRedriven"
    attempts = pl.when(is_redriven).then(0).otherwise(pl.col("attempt"))
    changes = later.group_by(KEY).agg(
        pl.col("place").first().alias("first_place"),
        event.last().replace_strict(STATUS_AFTER, return_dtype=pl.String).alias("last_status"),
        pl.col("due").last(),
        attempts.drop_nulls().last().alias("attempts"),
        pl.col("at").last().alias("changed_at"),
        is_redriven.sum().cast(pl.Int64).alias("redriven"),
    )
    changes = changes.join(_dead_letterings(later), KEY, "left")
    partials = sent.join(changes, KEY, "full", coalesce=True)
    first_place = pl.min_horizontal("id", "first_place").alias("first_place")
    return partials.with_columns(first_place).select(*PARTIAL)


def _envelopes(records: pl.DataFrame) -> pl.Expr:
    """Return the envelopes without auth tokens; empty if they were not read."""
    if "envelope" not in records.columns:
        return pl.lit(b"")
    return pl.col("envelope").map_batches(
        lambda each: pl.Series(each.name, map(without_token, each), POLARS["bytes"]), POLARS["bytes"]
    )


def without_token(envelope: bytes | None) -> bytes:
    """Return an envelope without the publisher's auth token; empty if it can't be parsed."""
    try:
        return without_auth_token(envelope) if envelope else b""
    except InvalidRequest:  # altered on disk
        return b""


def _is_any_sent_again(partials: pl.DataFrame) -> bool:
    has_earlier_partial = bool((partials["first_place"] < partials["id"]).any())
    # Comparing only the streams is cheaper than comparing whole keys, and nearly always enough.
    return has_earlier_partial or (
        partials["stream"].n_unique() < len(partials) and partials.n_unique(KEY) < len(partials)
    )


def merge(partials: pl.DataFrame) -> pl.DataFrame:
    """Return one partial for each message, merged from all its partials in any order."""
    if partials["stream"].n_unique() == partials.height:
        return partials
    has_change = pl.col("last_status").is_not_null()
    generation = pl.col("id").is_not_null().cum_sum().over(KEY).alias("generation")
    return (
        partials.sort("first_place")
        .with_columns(generation)
        .group_by(*KEY, "generation")
        .agg(
            pl.col("first_place").first(),
            *(pl.col(name).drop_nulls().first() for name in _SENT_COLUMNS),
            pl.col("last_status").drop_nulls().last(),
            pl.col("dead_letterings").drop_nulls().str.join(","),
            pl.col("due").filter(has_change).last(),
            *(pl.col(name).drop_nulls().last() for name in ("attempts", "changed_at")),
            pl.col("redriven").drop_nulls().sum(),
        )
        .with_columns(pl.when(pl.col("dead_letterings") != "").then("dead_letterings"))
        .select(*PARTIAL)
    )


def is_complete() -> pl.Expr:
    """Return whether no further event can follow for the message of a partial."""
    is_archived = pl.col("last_status").is_null() & pl.col("sent_due").is_null()
    return pl.col("id").is_not_null() & (
        pl.col("last_status").is_in(SETTLED).fill_null(value=False) | is_archived
    )


def finish(partials: pl.DataFrame, extents: Sequence[LogExtent]) -> pl.DataFrame:
    """Return the rows of messages from merged partials.

    A message whose `MessageSent` retention removed has no row.

    Arguments:
        extents: extents of the mailboxes; their `at` decides which messages are delayed.
    """
    if not partials.height:
        return pl.DataFrame(schema=PROJECTION.schema)
    now = pl.col("mailbox").replace_strict(
        {extent.name: extent.at for extent in extents}, return_dtype=pl.Int64
    )
    last_status = pl.col("last_status")
    due = pl.when(last_status.is_null()).then("sent_due").when(last_status == MessageStatus.READY).then("due")
    ready = pl.when(pl.col("due") > now).then(pl.lit("delayed")).otherwise(pl.lit("ready"))
    status = (
        pl.when(last_status.is_null() & pl.col("sent_due").is_null())
        .then(pl.lit("archived"))
        .when(last_status.is_null() | (last_status == MessageStatus.READY))
        .then(ready)
        .otherwise(last_status)
    )
    return (
        partials.filter(pl.col("id").is_not_null())
        .with_columns(due.alias("due"))
        .with_columns(
            status.alias("status"),
            pl.col("attempts").fill_null(0),
            pl.col("redriven").fill_null(0),
            pl.coalesce("changed_at", "created_at").alias("changed_at"),
            _dead_letterings_json(),
        )
        .select(*PROJECTION.schema)
    )


def as_partials(rows: pl.DataFrame) -> pl.DataFrame:
    """Return stored messages as partials with empty envelopes, to be merged with later ones."""
    status = pl.col("status")
    last_status = pl.when(status == "delayed").then(pl.lit("ready")).otherwise(status)
    is_archived = status == "archived"
    return rows.with_columns(
        pl.col("id").alias("first_place"),
        pl.when(~is_archived).then(last_status).alias("last_status"),
        pl.lit(None, pl.Int64).alias("sent_due"),
        pl.col("dead_letterings").str.strip_prefix("[").str.strip_suffix("]"),
        pl.lit(b"").alias("envelope_blob"),
    ).select(*PARTIAL)


def _dead_letterings(later: pl.DataFrame) -> pl.DataFrame:
    """Return the JSON elements of each message's dead-letterings and redrives."""
    pieces: dict[tuple[str, bytes], list[str]] = {}
    rows = later.filter(pl.col("event").is_in(_DEAD_LETTER_EVENTS))
    rows = rows.select(*KEY, "event", "at", "reason", "attempt", "last_error")
    for mailbox, stream, event, at, reason, attempt, last_error in rows.iter_rows():
        is_redriven = event == "MessageRedriven"
        piece = {"redriven_at": at} if is_redriven else DeadLettering(at, reason, attempt, last_error)
        pieces.setdefault((mailbox, stream), []).append(_encode(piece).decode())
    columns = [(*key, ",".join(each)) for key, each in pieces.items()]
    types = {"mailbox": pl.String, "stream": pl.Binary, "dead_letterings": pl.String}
    return pl.DataFrame(columns, schema=types, orient="row")


def _dead_letterings_json() -> pl.Expr:
    """Return the JSON of the dead-letterings; elements are parsed only for redriven messages."""
    is_redriven = pl.col("dead_letterings").str.contains("redriven_at", literal=True)
    json_with_redrives = (
        pl.when(is_redriven).then("dead_letterings").map_elements(_join_dead_letterings, pl.String)
    )
    return (
        pl.when(is_redriven)
        .then(json_with_redrives)
        .otherwise("[" + pl.col("dead_letterings") + "]")
        .alias("dead_letterings")
    )


def _join_dead_letterings(pieces: str) -> str | None:
    """Return the dead-letterings of one message as JSON, each with the time of its redrive."""
    dead_letterings: list[DeadLettering] = []
    for piece in _decode_pieces(f"[{pieces}]"):
        if "at" in piece:
            dead_letterings.append(msgspec.convert(piece, DeadLettering))
        elif dead_letterings:
            dead_letterings[-1].redriven_at = piece["redriven_at"]
    return _encode(dead_letterings).decode() if dead_letterings else None


def uuid_text(stream: str) -> pl.Expr:
    """Return a column of 16-byte ids as the text of UUIDs."""
    digits = pl.col(stream).bin.encode("hex")
    return pl.concat_str(
        *(digits.str.slice(start, size) for start, size in ((0, 8), (8, 4), (12, 4), (16, 4), (20, 12))),
        separator="-",
    )


UUID_SQL = "lower({})".format(
    " || '-' || ".join(
        f"hex(substr({{0}}stream, {start}, {size}))"
        for start, size in ((1, 4), (5, 2), (7, 2), (9, 2), (11, 6))
    )
)
"""As `uuid_text`, in the SQL of SQLite and Spark, with `{0}` for the prefix of the column `stream`."""
