"""Files of the Parquet log archive: a row for each event, from which commits are read.

In a commit, only `MessageSent` has the topic, shard and id of a message; later events name the position of
the message's previous event. In a file, the row of each event has the values of its `MessageSent`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from itertools import zip_longest
from operator import and_
from typing import Any, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from blake3 import blake3

from postroom.adapters.parquet.archive_folder import ArchiveFolder
from postroom.application.mailbox.codec import encode_envelopes
from postroom.application.ports.event_log import Segment
from postroom.domain.commit import Commit
from postroom.domain.errors import BrokenLog
from postroom.projections.commit_columns import EXTENT_COLUMNS, ROWS_PER_BATCH, extent_column, to_batches
from postroom.projections.log_reader import Condition, LogExtent, to_arrow
from postroom.projections.models.messages import SENT, is_message
from postroom.projections.projection import COLUMNS, EVENT_COLUMNS, SENT_COLUMNS, arrow_schema

STEP_COLUMNS = ("position", "stream", "event", "distance", "at", "topic", "shard", "message_id")
"""Columns from which `SENT_COLUMNS` are made."""

_POLARS = {pa.int64(): pl.Int64(), pa.string(): pl.String(), pa.binary(): pl.Binary()}
EVENTS = {name: _POLARS[COLUMNS[name]] for name in STEP_COLUMNS} | {
    name: _POLARS[type_] for name, (_, type_) in SENT_COLUMNS.items()
}
"""`STEP_COLUMNS` and `SENT_COLUMNS`, with their polars types."""

EventsAt = Callable[[pl.Series], pl.DataFrame]
"""Returns the archived events at sorted positions of earlier segments, with the columns `EVENTS`."""


def sent_columns(events: pa.Table, events_at: EventsAt) -> pa.Table:
    """Return `SENT_COLUMNS` of the events of a segment.

    Columns of a message are null for events of the mailbox, and if the `MessageSent` was never archived.

    Arguments:
        events: all events of consecutive positions, with `STEP_COLUMNS`.
        events_at: reads events before the first of `events`.
    """
    frame = pl.DataFrame(events.select(STEP_COLUMNS)).with_columns(own_columns())
    row = pl.int_range(pl.len(), dtype=pl.Int64)
    is_here = _has_previous() & (pl.col("distance") <= row)
    # The row of the previous event of each message becomes the row of its first event in this segment.
    origin = frame.select(pl.when(is_here).then(row - pl.col("distance")).otherwise(row)).to_series()
    while not (jumped := origin.gather(origin)).equals(origin):
        origin = jumped
    unresolved = frame.filter(_has_previous() & (pl.col("distance") > row))
    if unresolved.height:
        frame = frame.update(_from_earlier(unresolved, events_at), on="position")
    same = frame["stream"].gather(origin) == frame["stream"]
    resolved = frame.select(*SENT_COLUMNS)[origin].select(pl.when(same).then(pl.all()))
    return resolved.to_arrow().cast(pa.schema([(name, type_) for name, (_, type_) in SENT_COLUMNS.items()]))


def first_wrong_sent(events: pa.Table, events_at: EventsAt) -> int | None:
    """Return the first position whose `SENT_COLUMNS` differ from what `sent_columns` returns, or None.

    Values from an earlier segment may be missing on either side: the archive may have lacked that segment
    when this one was written, or may lack it now.

    Arguments:
        events, events_at: see `sent_columns`; the events also have `SENT_COLUMNS`.
    """
    stored = pl.DataFrame(events)
    expected = pl.DataFrame(sent_columns(events, events_at))
    local = pl.DataFrame(sent_columns(events, lambda _: pl.DataFrame(schema=EVENTS)))
    is_lax = stored.select(is_message() & local["sent_position"].is_null()).to_series()
    is_lax &= stored["sent_position"].is_null() | expected["sent_position"].is_null()
    differs = pl.any_horizontal(pl.col(name).ne_missing(expected[name]) for name in SENT_COLUMNS)
    wrong = stored.filter(differs & ~is_lax)
    return None if wrong.is_empty() else int(wrong["position"][0])


def own_columns() -> list[pl.Expr]:
    """Return `SENT_COLUMNS` of the events that need no other event, and null for others."""
    is_sent = pl.col("event") == SENT
    return [
        pl.when(is_sent | ~is_message() if name.startswith("event_") else is_sent).then(source).alias(name)
        for name, (source, _) in SENT_COLUMNS.items()
    ]


def _has_previous() -> pl.Expr:
    return is_message() & (pl.col("event") != SENT) & (pl.col("distance") > 0)


def _from_earlier(unresolved: pl.DataFrame, events_at: EventsAt) -> pl.DataFrame:
    """Return `SENT_COLUMNS` of events, by position, from the previous events of their messages."""
    key = ("stream", "before")
    steps = unresolved.select("position", "stream", before=pl.col("position") - pl.col("distance"))
    resolved = []
    while steps.height:
        earlier = events_at(steps["before"].unique().sort()).rename({"position": "before"})
        steps = steps.join(earlier, on=key, how="inner")
        resolved.append(steps.filter(pl.col("sent_position").is_not_null()).select("position", *SENT_COLUMNS))
        # Files of format 2 have these columns only for a `MessageSent`.
        steps = steps.filter(pl.col("sent_position").is_null() & _has_previous()).select(
            "position", "stream", before=pl.col("before") - pl.col("distance")
        )
    return pl.concat(resolved)


FORMAT = 3
ROW_GROUP_ROWS = 25_000
ROW_GROUP_BYTES = 32 << 20
"""Maximum size of a row group: rows, and about how many bytes of envelopes."""
READ_ROWS = 2_000

_LAST, _COMMIT = pa.field("last", pa.int64()), pa.field("commit", pa.binary())
_COLUMNS = ("position", "mailbox", "distance", *EVENT_COLUMNS)
_REQUIRED = ("position", "mailbox", "distance", "stream", "version", "epoch", "event", "at", "chain")
SCHEMA = pa.schema(
    [
        *(pa.field(name, COLUMNS[name], nullable=name not in _REQUIRED) for name in _COLUMNS),
        *(pa.field(name, type_) for name, (_, type_) in SENT_COLUMNS.items()),
        _LAST,
        _COMMIT,
    ]
)
"""One row for each event, with the columns that log readers provide.

`at`, `due`, `expires_at` and `sent_at` are log time in µs, `timestamp` is in ms, all UTC. `SENT_COLUMNS` have
the values of the `MessageSent` of an event's message. The first event of a commit has the commit's last
position and its encoded events, from which the other columns were made.

Files of format 2 have the columns `FORMAT_2` only.
"""
FORMAT_2 = ("position", *EVENT_COLUMNS, "last", "commit")

_INTEGERS = [field.name for field in SCHEMA if field.type == pa.int64()]
_REPEATING = ["chain", *(field.name for field in SCHEMA if field.type == pa.string())]
_DISTINCT = [
    field.name for field in SCHEMA if field.type == pa.binary() and field.name not in ("chain", "stream")
]
_ENCODINGS = dict.fromkeys(_INTEGERS, "DELTA_BINARY_PACKED") | dict.fromkeys(
    _DISTINCT, "DELTA_LENGTH_BYTE_ARRAY"
)
_BLOOM_FILTERS = ("stream", "sent_message_id")


class Part(NamedTuple):
    """A range of positions, and the file that contains it.

    Arguments:
        path: path of the file in the file system of `folder`.
        format: number of the file's format.
        size: size of the file in bytes.
        modified: when it was written, in s since 1970 UTC.
    """

    first: int
    last: int
    path: str
    folder: ArchiveFolder
    format: int
    size: int
    modified: float

    @property
    def events(self) -> int:
        """Return the number of positions."""
        return self.last - self.first + 1

    @property
    def name(self) -> str:
        """Return the name of the file."""
        return self.path.rpartition("/")[2]

    def unavailable(self) -> AbstractContextManager[None]:
        """Raise Unavailable for errors of reading the file; see `ArchiveFolder.unavailable`."""
        return self.folder.unavailable(self.path, "read")


def scan(
    part: Part, columns: Sequence[str], where: pc.Expression | None = None, rows: int = READ_ROWS
) -> Iterator[pa.RecordBatch]:
    """Yield columns of the events of a part in the order of their positions, not verified.

    Row groups and columns that can't match, by the statistics of the file, are not read.

    Arguments:
        where: an expression over the columns of `SCHEMA` that selects rows.
        rows: largest number of rows in a batch.

    Raises: Unavailable when the file can't be read.
    """
    position = pc.field("position")
    in_part = (position >= part.first) & (position <= part.last)
    with part.unavailable():
        dataset = ds.dataset(part.path, schema=SCHEMA, format="parquet", filesystem=part.folder.files)
        yield from dataset.to_batches(
            columns=list(columns),
            filter=in_part if where is None else in_part & where,
            batch_size=rows,
            use_threads=False,
            batch_readahead=1,
            fragment_readahead=1,
        )


def read_table(part: Part, columns: Sequence[str], where: pc.Expression | None = None) -> pa.Table:
    """Return the rows that `scan` yields."""
    schema = pa.schema([SCHEMA.field(name) for name in columns])
    with part.unavailable():
        return pa.Table.from_batches(scan(part, columns, where, ROW_GROUP_ROWS), schema)


def select(
    part: Part, columns: Sequence[str], where: pc.Expression | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows that `scan` yields in batches."""
    for batch in scan(part, columns, where):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def commits_where(
    part: Part, where: pc.Expression | None = None, *, envelopes: bool = True
) -> Iterator[Commit]:
    """Yield the commits of a part, not verified.

    Arguments:
        where: an expression that selects all rows of some commits.
    """
    columns = ["position", "last", "epoch", "at", "chain", "commit", *(["envelope"] if envelopes else [])]
    is_needed = pc.field("commit").is_valid()
    if envelopes:
        is_needed |= pc.field("envelope").is_valid()
    envelopes_read: list[bytes] = []
    head: tuple[Any, ...] | None = None
    for row in select(part, columns, is_needed if where is None else where & is_needed):
        if row[5] is not None:
            if head is not None:
                yield _commit(head, envelopes_read)
            head, envelopes_read = row, []
        if envelopes and row[6] is not None:
            envelopes_read.append(row[6])
    if head is not None:
        yield _commit(head, envelopes_read)


def events_at(part: Part, positions: pl.Series) -> pl.DataFrame:
    """Return the events of a part at sorted positions, with the columns `EVENTS`."""
    within = part._replace(first=positions[0], last=positions[-1])
    if part.format == FORMAT:
        is_at = pc.field("position").isin(positions.to_arrow())
        return pl.DataFrame(read_table(within, list(EVENTS), is_at))
    rows = pl.DataFrame(to_rows("", list(read_commits(within, envelopes=False))).select(STEP_COLUMNS))
    rows = rows.filter(pl.col("position").is_in(positions.implode()))
    return rows.with_columns(own_columns()).select(*EVENTS)


def read_commits(part: Part, *, envelopes: bool = True) -> Iterator[Commit]:
    """Yield the commits that hold the positions of a part, not verified; see `LogArchive.commits`."""
    is_held = pc.field("last") >= part.first
    heads = list(select(part._replace(first=1), ["position", "last"], is_held))
    if heads:
        yield from commits_where(part._replace(first=heads[0][0], last=heads[-1][1]), envelopes=envelopes)


def _commit(head: tuple[Any, ...], envelopes: list[bytes]) -> Commit:
    first, last, epoch, at, chain, events = head[:6]
    return Commit(first, last, epoch, at, chain, events, encode_envelopes(envelopes))


def read_columns(
    part: Part, extent: LogExtent, columns: Sequence[str], where: Sequence[Condition]
) -> Iterator[pa.RecordBatch]:
    """Yield columns of `COLUMNS` of the events of a part that meet conditions; see `LogReader.read`.

    Raises: BrokenLog when the file lacks some of its positions.
    """
    schema, count = arrow_schema(columns), 0
    stored = [name for name in columns if name not in EXTENT_COLUMNS]
    for batch in scan(part, stored, reduce(and_, map(to_arrow, where)) if where else None, ROWS_PER_BATCH):
        count += batch.num_rows
        if batch.num_rows:
            arrays = {name: batch[name] for name in stored}
            arrays |= {
                name: extent_column(name, extent, batch["position"])
                for name in columns
                if name in EXTENT_COLUMNS
            }
            yield pa.RecordBatch.from_arrays([arrays[name] for name in columns], schema=schema)
    if not where and count != part.events:
        raise BrokenLog(
            f"The archive file {part.path} has {count} of the positions {part.first} to {part.last}: it was "
            "altered. Restore it from a backup.",
            part.first,
        )


def first_difference(stored: pa.Table, expected: pa.Table) -> int | None:
    """Return the first position at which a row or the hash of its envelope differs, or None."""
    if not stored.equals(expected):
        nothing: dict[str, Any] = {}
        rows = zip_longest(stored.to_pylist(), expected.to_pylist(), fillvalue=nothing)
        return next(int((row or other)["position"]) for row, other in rows if row != other)
    names = ("position", "envelope", "envelope_hash")
    columns = (stored[name].to_pylist() for name in names)
    for position, envelope, envelope_hash in zip(*columns, strict=True):
        if envelope is not None and blake3(envelope).digest() != envelope_hash:
            return int(position)
    return None


def to_table(segment: Segment, commits: Sequence[Commit], events_at: EventsAt) -> pa.Table:
    """Return the content of a segment's file, with the segment in its metadata.

    Arguments:
        events_at: see `sent_columns`.

    Raises: BrokenLog when a commit can't be decoded.
    """
    metadata = {
        "postroom.format": str(FORMAT),
        "postroom.mailbox": segment.mailbox,
        "postroom.first": str(segment.first),
        "postroom.last": str(segment.last),
        "postroom.chain": segment.chain.hex(),
    }
    if segment.before is not None:
        metadata["postroom.before"] = segment.before.hex()
    rows = to_rows(segment.mailbox, commits)
    sent = sent_columns(rows, events_at)
    for name in SENT_COLUMNS:
        rows = rows.append_column(name, sent[name])
    return rows.select(SCHEMA.names).cast(SCHEMA).replace_schema_metadata(metadata)


def to_rows(mailbox: str, commits: Sequence[Commit]) -> pa.Table:
    """Return the rows of consecutive commits, without `SENT_COLUMNS`.

    Raises: BrokenLog when a commit can't be decoded.
    """
    first = commits[0].first
    extent = LogExtent(0, mailbox, first, commits[-1].last, commits[-1].at)
    table = pa.Table.from_batches(to_batches(commits, extent, _COLUMNS))
    lasts: list[int | None] = [None] * table.num_rows
    encoded: list[bytes | None] = [None] * table.num_rows
    for commit in commits:
        lasts[commit.first - first] = commit.last
        encoded[commit.first - first] = commit.events
    table = table.append_column(_LAST, pa.array(lasts, _LAST.type))
    return table.append_column(_COMMIT, pa.array(encoded, _COMMIT.type))


def encode(table: pa.Table) -> pa.Buffer:
    """Return the bytes of a file with the content of a segment."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=_REPEATING,
        column_encoding=_ENCODINGS,
        row_group_size=_rows_in_group(table),
        write_page_index=True,
        sorting_columns=[pq.SortingColumn(0)],
        bloom_filter_options=_bloom_filters(table),
    )
    return sink.getvalue()


def _rows_in_group(table: pa.Table) -> int:
    """Return the number of rows in a row group, which readers hold in memory as a whole."""
    size = pc.sum(pc.binary_length(table["envelope"])).as_py() or 1
    return max(1, min(ROW_GROUP_ROWS, int(table.num_rows * ROW_GROUP_BYTES // size)))


def _bloom_filters(table: pa.Table) -> dict[str, dict[str, float]]:
    rows = min(table.num_rows, ROW_GROUP_ROWS)
    names = [name for name in _BLOOM_FILTERS if table[name].null_count < table.num_rows]
    return {name: {"ndv": rows, "fpp": 0.05} for name in names}
