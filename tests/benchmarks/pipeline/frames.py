"""The fold of a log that was read into Arrow tables, by polars and by DuckDB."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    import pyarrow as pa

HEADERS = (
    *("timestamp", "content_type", "schema_url", "schema_version", "encryption", "correlation_id"),
    *("principal", "namespace", "trace_id", "span_id", "custom_headers"),
)
SENT = ("place", "stream", "at", "topic", "shard", "due", "message_id", *HEADERS, "envelope")
LATER = ("place", "stream", "version", "event", "at", "attempt", "due")
FATES = ("stream", "place", "event", "at", "reason", "attempt", "last_error")
SEARCHED = (
    *("message_id", "topic", "content_type", "schema_url", "schema_version", "encryption"),
    *("correlation_id", "principal", "namespace", "trace_id", "span_id"),
)
IDS = ("message_id", "correlation_id", "trace_id", "span_id")
WORDED = tuple(name for name in SEARCHED if name not in IDS)
STATUS = {
    "MessageAcked": "acked",
    "MessageReceived": "in_flight",
    "MessageVisibilityExtended": "in_flight",
    "MessageDeadLettered": "dead",
    "MessageExpired": "expired",
}
READY_AGAIN = ("MessageRequeued", "MessageRedriven")
POSITIONS = 1 << 40

_json = msgspec.json.Encoder().encode
_custom = msgspec.json.Decoder(dict[str, str]).decode


class Read(NamedTuple):
    """Records of a log by type; each mailbox's id, name and last log time (µs)."""

    sent: "pa.Table"
    later: "pa.Table"
    fates: "pa.Table"
    cut: list[tuple[int, str, int]]


class Rows(NamedTuple):
    """Rows of the search model."""

    mailbox: "pa.Table"
    header: "pa.Table"
    topic: "pa.Table"
    text: "pa.Table"


Fold = Callable[[Read], Rows]


def fold_with_polars(read: Read) -> Rows:
    """Return the search model of a log, folded by polars."""
    import polars as pl

    def mailbox_id() -> pl.Expr:
        return (pl.col("place") // POSITIONS).alias("mailbox_id")

    event = pl.col("event")
    later = (
        pl.DataFrame(pl.from_arrow(read.later))
        .lazy()
        .group_by(mailbox_id(), "stream")
        .agg(
            event.last(),
            pl.col("due").last().alias("later_due"),
            pl.when(event == "MessageRedriven")
            .then(0)
            .otherwise(pl.col("attempt"))
            .drop_nulls()
            .last()
            .alias("attempts"),
            pl.col("at").last().alias("changed_at"),
            (event == "MessageRedriven").sum().cast(pl.Int64).alias("redriven"),
        )
    )
    cut = pl.LazyFrame(
        read.cut, schema={"mailbox_id": pl.Int64, "mailbox": pl.String, "cut_at": pl.Int64}, orient="row"
    )
    dead_letterings = pl.DataFrame(pl.from_arrow(_dead_letterings(read.fates))).lazy()
    digits = pl.col("stream").bin.encode("hex")
    parts = (digits.str.slice(start, size) for start, size in ((0, 8), (8, 4), (12, 4), (16, 4), (20, 12)))
    due = pl.when(event.is_null()).then("due").when(event.is_in(READY_AGAIN)).then("later_due")
    ready = pl.when(pl.col("due") > pl.col("cut_at")).then(pl.lit("delayed")).otherwise(pl.lit("ready"))
    is_archived = event.is_null() & pl.col("due").is_null()
    status = (
        pl.when(is_archived)
        .then(pl.lit("archived"))
        .when(event.is_null() | event.is_in(READY_AGAIN))
        .then(ready)
        .otherwise(event.replace_strict(STATUS, default=None, return_dtype=pl.String))
    )
    key = ["mailbox_id", "stream"]
    mailbox = (
        pl.DataFrame(pl.from_arrow(read.sent))
        .lazy()
        .with_columns(mailbox_id())
        .join(cut, "mailbox_id", "left")
        .join(later, key, "left", maintain_order="left")
        .join(dead_letterings, key, "left", maintain_order="left")
        .with_columns(due.alias("due"))
        .select(
            pl.col("place").alias("id"),
            pl.coalesce("message_id", pl.concat_str(*parts, separator="-")).alias("message_id"),
            *("topic", *HEADERS, pl.col("at").alias("created_at"), "mailbox"),
            (pl.col("place") % POSITIONS).alias("position"),
            "shard",
            status.alias("status"),
            pl.col("attempts").fill_null(0),
            pl.col("redriven").fill_null(0),
            pl.coalesce("changed_at", "at").alias("changed_at"),
            *("due", "dead_letterings", "stream", pl.col("envelope").alias("envelope_blob")),
        )
        .collect()
    )
    return _searched_with_polars(mailbox)


def fold_with_duckdb(read: Read) -> Rows:
    """Return the search model of a log: mailbox rows by DuckDB, what is searched beside them by polars."""
    import duckdb
    import polars as pl

    from tests.benchmarks.pipeline.script import script

    with duckdb.connect() as connection:
        connection.register("sent", read.sent)
        connection.register("later", read.later)
        connection.register("dead_lettering", _dead_letterings(read.fates))
        connection.register("cut", _cut(read.cut))
        mailbox = connection.sql(script("fold_duckdb.sql")).to_arrow_table()
    return _searched_with_polars(pl.DataFrame(pl.from_arrow(mailbox)))


def _searched_with_polars(mailbox: Any) -> Rows:
    import polars as pl

    custom: dict[str, list[str]] = {"custom_headers": [], "custom": []}
    names: set[str] = set()
    for headers in mailbox["custom_headers"].drop_nulls().unique():
        values = _custom(headers)
        names |= values.keys()
        custom["custom_headers"].append(headers)
        custom["custom"].append("\n".join((*values.keys(), *values.values())))
    plain = (pl.when(~pl.col(name).str.contains("^[0-9a-f-]*$")).then(name).alias(name) for name in IDS)

    def written(columns: tuple[str, ...], separator: str) -> pl.Expr:
        present = (pl.when(pl.col(name) != "").then(name) for name in columns)
        return pl.concat_str(*present, "custom", separator=separator, ignore_nulls=True).str.to_lowercase()

    texts = (
        mailbox.select("id", *SEARCHED, "custom_headers")
        .with_columns(plain)
        .join(
            pl.DataFrame(custom, schema=dict.fromkeys(custom, pl.String)),
            "custom_headers",
            "left",
            maintain_order="left",
        )
        .select(
            "id",
            written(SEARCHED, "\n").alias("text"),
            (" " + written(WORDED, " ").str.replace_all("[^a-z0-9_]", " ") + " ").alias("words"),
        )
    )
    topic = mailbox.group_by("topic").agg(
        pl.len().cast(pl.Int64).alias("messages"),
        pl.col("timestamp").min().alias("first_timestamp"),
        pl.col("timestamp").max().alias("last_timestamp"),
    )
    digits = pl.col("stream").bin.encode("hex")
    is_stream = pl.col("message_id").str.replace_all("-", "") == digits
    mailbox = mailbox.drop("envelope_blob").with_columns(
        pl.when(~is_stream).then("message_id").alias("message_id")
    )
    header = pl.DataFrame({"name": sorted(names)}, schema={"name": pl.String})
    return Rows(*(frame.to_arrow() for frame in (mailbox, header, topic, texts)))


def _cut(cut: list[tuple[int, str, int]]) -> "pa.Table":
    import pyarrow as pa

    ids, names, times = zip(*cut, strict=True)
    return pa.table({"id": pa.array(ids, pa.int64()), "name": names, "at": pa.array(times, pa.int64())})


def _dead_letterings(fates: "pa.Table") -> "pa.Table":
    """Return the dead-letterings of each message as JSON; few messages have any."""
    import pyarrow as pa

    by_stream: dict[tuple[int, bytes], list[dict[str, Any]]] = {}
    for row in sorted(fates.to_pylist(), key=lambda row: row["place"]):
        dead_letterings = by_stream.setdefault((row["place"] // POSITIONS, row["stream"]), [])
        if row["event"] == "MessageDeadLettered":
            error = row["last_error"]
            dead_lettering = {"at": row["at"], "reason": row["reason"], "attempt": row["attempt"]}
            dead_letterings.append(
                dead_lettering if error is None else dead_lettering | {"last_error": error}
            )
        elif dead_letterings:
            dead_letterings[-1]["redriven_at"] = row["at"]
    return pa.table(
        {
            "mailbox_id": pa.array([key[0] for key in by_stream], pa.int64()),
            "stream": pa.array([key[1] for key in by_stream], pa.binary()),
            "dead_letterings": pa.array([_json(each).decode() for each in by_stream.values()], pa.string()),
        }
    )
