"""Messages: every message with its headers and what became of it (RFC-037 `mailbox` table).

A range of the log is folded to *partials*, one a message: what the range tells of it. Partials of one message
merge in the order of their ranges; those that are complete become rows.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import polars as pl

from postroom.application.codec import to_events
from postroom.domain.errors import BrokenLog
from postroom.domain.message import MessageDeadLettered
from postroom.domain.names import message_id
from postroom.domain.record import NO_HEADERS, Record
from postroom.projections.cut import MailboxCut
from postroom.projections.projection import POLARS, Column, Projection, Row

HEADER_COLUMNS = (
    "timestamp",
    "content_type",
    "schema_url",
    "schema_version",
    "encryption",
    "correlation_id",
    "principal",
    "namespace",
    "trace_id",
    "span_id",
    "custom_headers",
)
"""RFC-037's headers that a row takes over from the log as they are."""


class Standing(StrEnum):
    """Say where a message stands at the cut; `delayed` is ready, but not before its `due`."""

    READY = "ready"
    DELAYED = "delayed"
    IN_FLIGHT = "in_flight"
    ACKED = "acked"
    DEAD = "dead"
    EXPIRED = "expired"
    ARCHIVED = "archived"


STANDING_AFTER = {
    "MessageReceived": Standing.IN_FLIGHT,
    "MessageVisibilityExtended": Standing.IN_FLIGHT,
    "MessageAcked": Standing.ACKED,
    "MessageRequeued": Standing.READY,
    "MessageDeadLettered": Standing.DEAD,
    "MessageRedriven": Standing.READY,
    "MessageExpired": Standing.EXPIRED,
}
"""Where a message stands after an event that is not `MessageSent`."""

SETTLED = (Standing.ACKED, Standing.EXPIRED, Standing.ARCHIVED)
"""Nothing can happen any more to a message that stands so."""


class Death(msgspec.Struct, omit_defaults=True):
    """Say when a message died and of what, and when it was put back (log time in µs)."""

    at: int
    reason: str
    attempt: int
    last_error: str | None = None
    redriven_at: int | None = None


class Parked(NamedTuple):
    """A record that can't be folded: where it is, and why it was left out."""

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
        Column("deaths"),
        Column("stream", "bytes", required=True),
        Column("envelope_blob", "bytes", required=True),
    ),
)
"""The `mailbox` table of RFC-037 and what became of the message.

    id: the log's place of its `MessageSent`: unique, and the same after every rebuild.
    timestamp: ms; created_at, changed_at: log time in µs of its first and its last event.
    status: a `Standing`. attempts: deliveries since it was sent or last redriven. redriven: how often it was.
    due: when a ready or delayed message may be delivered (log time, µs).
    deaths: JSON of `Death`s, null for none. stream: its id in the log.
"""

READS = (
    *("place", "mailbox", "position", "stream", "version", "epoch", "type", "event", "at", "topic", "shard"),
    *("attempt", "due", "reason", "message_id", *HEADER_COLUMNS, "envelope", "death_state"),
)
"""The columns of the log that `fold` sees."""

_SENT: dict[str, pl.DataType] = {
    **dict.fromkeys(("id", "timestamp", "created_at", "position", "shard", "sent_due"), POLARS["int"]),
    **dict.fromkeys(("message_id", "topic", *HEADER_COLUMNS[1:]), POLARS["text"]),
    "envelope_blob": POLARS["bytes"],
}
_CHANGED: dict[str, pl.DataType] = {
    **dict.fromkeys(("standing", "deaths"), POLARS["text"]),
    **dict.fromkeys(("due", "attempts", "changed_at", "redriven"), POLARS["int"]),
}
KEY = ("mailbox", "stream")
"""What names a message until its place is known; senders choose ids, so two mailboxes may have one stream."""
PARTIAL: dict[str, pl.DataType] = {
    "mailbox": POLARS["text"],
    "stream": POLARS["bytes"],
    "first_place": POLARS["int"],
    **_SENT,
    **_CHANGED,
}
"""The columns of a partial; those of the sending, or of what followed, are null where the range lacks them.

`first_place` puts the partials of a message in order; `deaths` are pieces of a JSON array, of what died and
what was put back.
"""

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
)
SENT = "MessageSent"
KNOWN = (SENT, *STANDING_AFTER)
_encode = msgspec.json.Encoder().encode
_decode_pieces = msgspec.json.Decoder(list[dict[str, Any]]).decode


def is_message(event: str = "event") -> pl.Expr:
    """Return whether records are of messages, of known types or not."""
    return pl.col(event).str.starts_with("Message")


def is_unknown(event: str = "event") -> pl.Expr:
    """Return whether records are of messages and of types that nobody here knows; they are parked."""
    return is_message(event) & ~pl.col(event).is_in(KNOWN)


def fold(records: pl.DataFrame) -> tuple[pl.DataFrame, list[Parked]]:
    """Return the partials of a range's messages, one a message, and what could not be folded.

    Arguments:
        records: columns `READS` of log records in order; those that are no message's are passed over.
    """
    unknown = records.filter(is_unknown())
    parked = [
        Parked(place, type_, f"An event of unknown type {type_}.")
        for place, type_ in unknown.select("place", "type").iter_rows()
    ]
    known = records.filter(pl.col("event").is_in(KNOWN))
    deaths, undecoded = _deaths(known)
    partials = _partials(known, deaths)
    if _is_any_sent_again(partials):
        # An id that retention forgot may be sent again, and archive and log be read together: one life each.
        life = (pl.col("event") == SENT).cum_sum().over(KEY)
        lives = known.with_columns(life.alias("life")).partition_by("life")
        partials = pl.concat([_partials(each, _deaths(each)[0]) for each in lives])
    return partials, parked + undecoded


def _partials(records: pl.DataFrame, deaths: pl.DataFrame) -> pl.DataFrame:
    event = pl.col("event")
    sent = records.filter(event == SENT).select(
        *KEY,
        pl.col("place").alias("id"),
        *("timestamp", pl.col("at").alias("created_at"), "position", "shard"),
        pl.col("due").alias("sent_due"),
        pl.coalesce("message_id", _uuid("stream")).alias("message_id"),
        *("topic", *HEADER_COLUMNS[1:]),
        pl.col("envelope").alias("envelope_blob"),
    )
    redriven = event == "MessageRedriven"
    attempts = pl.when(redriven).then(0).otherwise(pl.col("attempt"))
    changes = (
        records.filter(event != SENT)
        .group_by(KEY)
        .agg(
            pl.col("place").first().alias("first_place"),
            event.last().replace_strict(STANDING_AFTER, return_dtype=pl.String).alias("standing"),
            pl.col("due").last(),
            attempts.drop_nulls().last().alias("attempts"),
            pl.col("at").last().alias("changed_at"),
            redriven.sum().cast(pl.Int64).alias("redriven"),
        )
    )
    changes = changes.join(deaths, KEY, "left")
    partials = sent.join(changes, KEY, "full", coalesce=True)
    first_place = pl.min_horizontal("id", "first_place").alias("first_place")
    return partials.with_columns(first_place).select(*PARTIAL)


def _is_any_sent_again(partials: pl.DataFrame) -> bool:
    began_before = bool((partials["first_place"] < partials["id"]).any())
    # Nearly always the streams alone tell; to compare the mailboxes, too, costs more.
    return began_before or (
        partials["stream"].n_unique() < len(partials) and partials.n_unique(KEY) < len(partials)
    )


def merge(partials: pl.DataFrame) -> pl.DataFrame:
    """Return one partial a message, made of all there are of it, in any order."""
    changed = pl.col("standing").is_not_null()
    ordered = partials.sort("first_place")
    life = pl.col("id").is_not_null().cum_sum().over(KEY).alias("life")
    return (
        ordered.with_columns(life)
        .group_by(*KEY, "life")
        .agg(
            pl.col("first_place").first(),
            *(pl.col(name).drop_nulls().first() for name in _SENT),
            pl.col("standing").drop_nulls().last(),
            pl.col("deaths").drop_nulls().str.join(","),
            pl.col("due").filter(changed).last(),
            *(pl.col(name).drop_nulls().last() for name in ("attempts", "changed_at")),
            pl.col("redriven").drop_nulls().sum(),
        )
        .with_columns(pl.when(pl.col("deaths") != "").then("deaths"))
        .select(*PARTIAL)
    )


def is_complete() -> pl.Expr:
    """Return whether a partial tells all there will ever be of its message."""
    archived = pl.col("standing").is_null() & pl.col("sent_due").is_null()
    return pl.col("id").is_not_null() & (pl.col("standing").is_in(SETTLED).fill_null(value=False) | archived)


def finish(partials: pl.DataFrame, cuts: Sequence[MailboxCut]) -> pl.DataFrame:
    """Return the rows of messages, of merged partials; those without a beginning are left out.

    Retention may have removed a message's beginning: then it is gone from the read models, too.

    Arguments:
        cuts: tell what time it is in a mailbox, and so which messages are delayed.
    """
    now = pl.col("mailbox").replace_strict({cut.name: cut.at for cut in cuts}, return_dtype=pl.Int64)
    standing = pl.col("standing")
    due = pl.when(standing.is_null()).then("sent_due").when(standing == Standing.READY).then("due")
    ready = pl.when(pl.col("due") > now).then(pl.lit("delayed")).otherwise(pl.lit("ready"))
    status = (
        pl.when(standing.is_null() & pl.col("sent_due").is_null())
        .then(pl.lit("archived"))
        .when(standing.is_null() | (standing == Standing.READY))
        .then(ready)
        .otherwise(standing)
    )
    return (
        partials.filter(pl.col("id").is_not_null())
        .with_columns(due.alias("due"))
        .with_columns(
            status.alias("status"),
            pl.col("attempts").fill_null(0),
            pl.col("redriven").fill_null(0),
            pl.coalesce("changed_at", "created_at").alias("changed_at"),
            _deaths_of_pieces(),
        )
        .select(*PROJECTION.schema)
    )


def as_partials(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows of messages as the partials that `finish` made them of, to merge later ones into."""
    status = pl.col("status")
    standing = pl.when(status == "delayed").then(pl.lit("ready")).otherwise(status)
    is_archived = status == "archived"
    return rows.with_columns(
        pl.col("id").alias("first_place"),
        pl.when(~is_archived).then(standing).alias("standing"),
        pl.lit(None, pl.Int64).alias("sent_due"),
        pl.col("deaths").str.strip_prefix("[").str.strip_suffix("]"),
    ).select(*PARTIAL)


def reference(
    cut: MailboxCut, records: Iterable[Record], known: Iterable[Row] = ()
) -> tuple[list[Row], list[Parked]]:
    """Return the rows of a mailbox's messages, folded record by record, and what could not be folded.

    Arguments:
        known: rows of messages that were sent before, to go on from.
    """
    rows: list[Row] = [_known_row(cut, row) for row in known]
    latest: dict[bytes, Row] = {row["stream"]: row for row in rows}
    parked: list[Parked] = []
    for record in records:
        if not cut.first <= record.position <= cut.last:
            continue
        event = record.type.partition(".")[0]
        if event == SENT:
            latest[record.stream] = _sent_row(cut, record)
            rows.append(latest[record.stream])
        elif event in STANDING_AFTER:
            death, error = _death(record) if event == "MessageDeadLettered" else (None, None)
            if error is not None:
                parked.append(Parked(cut.place(record.position), record.type, error))
            # Retention may have removed a message's beginning: then it is gone from the read models too.
            if record.stream in latest:
                _change_row(latest[record.stream], event, record, death, cut)
        elif event.startswith("Message"):
            place = cut.place(record.position)
            parked.append(Parked(place, record.type, f"An event of unknown type {record.type}."))
    for row in rows:
        row["deaths"] = _encode(row["deaths"]).decode() if row["deaths"] else None
    return rows, parked


def _known_row(cut: MailboxCut, row: Row) -> Row:
    deaths = msgspec.json.decode(row["deaths"], type=list[Death]) if row["deaths"] else []
    is_ready = row["status"] in (Standing.READY, Standing.DELAYED)
    return {**row, "deaths": deaths, "status": _ready(row["due"], cut) if is_ready else row["status"]}


def _sent_row(cut: MailboxCut, record: Record) -> Row:
    return {
        "id": cut.place(record.position),
        "message_id": message_id(record.stream, record.message_id),
        "topic": record.topic,
        **{name: getattr(record, name) for name in HEADER_COLUMNS},
        "created_at": record.at,
        "mailbox": cut.name,
        "position": record.position,
        "shard": record.shard,
        "status": Standing.ARCHIVED if record.due is None else _ready(record.due, cut),
        "attempts": 0,
        "redriven": 0,
        "changed_at": record.at,
        "due": record.due,
        "deaths": [],
        "stream": record.stream,
        "envelope_blob": record.envelope,
    }


def _change_row(row: Row, event: str, record: Record, death: Death | None, cut: MailboxCut) -> None:
    standing = STANDING_AFTER[event]
    is_ready = standing == Standing.READY
    row["status"] = _ready(record.due, cut) if is_ready else standing
    row["due"] = record.due if is_ready else None
    row["changed_at"] = record.at
    if record.attempt is not None:
        row["attempts"] = record.attempt
    if death is not None:
        row["deaths"].append(death)
    if event == "MessageRedriven":
        row["attempts"] = 0
        row["redriven"] += 1
        if row["deaths"]:
            row["deaths"][-1].redriven_at = record.at


def _ready(due: int | None, cut: MailboxCut) -> Standing:
    return Standing.DELAYED if due is not None and due > cut.at else Standing.READY


def _deaths(later: pl.DataFrame) -> tuple[pl.DataFrame, list[Parked]]:
    """Return the pieces of JSON for each message that died or was put back, and what could not be decoded."""
    event = pl.col("event")
    rows = later.filter(event.is_in(("MessageDeadLettered", "MessageRedriven")))
    pieces: dict[tuple[str, bytes], list[str]] = {}
    parked: list[Parked] = []
    selected = rows.select("place", "mailbox", "event", *_RECORD, "death_state")
    for place, mailbox, event_name, *values in selected.iter_rows():
        *columns, state = values
        record = Record._make((*columns, state or b"", b"", *NO_HEADERS))
        if event_name == "MessageRedriven":
            piece: object = {"redriven_at": record.at}
        else:
            piece, error = _death(record)
            if error is not None:
                parked.append(Parked(place, record.type, error))
        pieces.setdefault((mailbox, record.stream), []).append(_encode(piece).decode())
    columns = [(*key, ",".join(each)) for key, each in pieces.items()]
    types = {"mailbox": pl.String, "stream": pl.Binary, "deaths": pl.String}
    return pl.DataFrame(columns, schema=types, orient="row"), parked


def _deaths_of_pieces() -> pl.Expr:
    """Return the JSON of the deaths; only those of messages that were put back have to be looked into."""
    was_put_back = pl.col("deaths").str.contains("redriven_at", literal=True)
    joined = pl.when(was_put_back).then("deaths").map_elements(_joined_deaths, pl.String)
    return pl.when(was_put_back).then(joined).otherwise("[" + pl.col("deaths") + "]").alias("deaths")


def _joined_deaths(pieces: str) -> str | None:
    """Return the pieces of one message as JSON of its deaths, each with the time at which it was put back."""
    deaths: list[Death] = []
    for piece in _decode_pieces(f"[{pieces}]"):
        if "at" in piece:
            deaths.append(msgspec.convert(piece, Death))
        elif deaths:
            deaths[-1].redriven_at = piece["redriven_at"]
    return _encode(deaths).decode() if deaths else None


def _death(record: Record) -> tuple[Death, str | None]:
    """Return how a message died; of a state that can't be decoded, as much as the record's columns tell."""
    death = Death(record.at, record.reason or "unknown", record.attempt or 0)
    try:
        died = next(to_events([record]))
    except (BrokenLog, msgspec.MsgspecError, ValueError, IndexError) as error:
        return death, str(error)
    assert isinstance(died, MessageDeadLettered)
    death.last_error = died.last_error
    return death, None


def _uuid(stream: str) -> pl.Expr:
    digits = pl.col(stream).bin.encode("hex")
    return pl.concat_str(
        *(digits.str.slice(start, size) for start, size in ((0, 8), (8, 4), (12, 4), (16, 4), (20, 12))),
        separator="-",
    )
