"""Files of the Parquet log archive: a row for each event, from which commits are read."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from tempfile import mkstemp
from typing import Any, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from blake3 import blake3

from postroom.adapters.files.durable import sync
from postroom.adapters.parquet.sent_columns import (
    EVENTS,
    SENT_COLUMNS,
    STEP_COLUMNS,
    EventsAt,
    own_columns,
    sent_columns,
)
from postroom.application.mailbox.codec import encode_envelopes
from postroom.application.ports.event_log import Segment
from postroom.domain.commit import Commit
from postroom.domain.errors import Unavailable
from postroom.projections.commit_columns import to_batches
from postroom.projections.log_reader import LogExtent
from postroom.projections.projection import COLUMNS, EVENT_COLUMNS

FORMAT = "3"
ROW_GROUP_ROWS = 25_000
READ_ROWS = 2_000
_TEMPORARY = ".tmp"

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

Files of format 2 have no `mailbox`, no `distance` and no `SENT_COLUMNS`.
"""

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
    """A range of positions, and the file that contains it."""

    first: int
    last: int
    path: Path


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
    with unavailable(part.path, "read"):
        dataset = ds.dataset(part.path, schema=SCHEMA, format="parquet")
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
    with unavailable(part.path, "read"):
        return pa.Table.from_batches(scan(part, columns, where), schema)


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


def file_columns(path: Path) -> list[str]:
    """Return the names of the columns of `SCHEMA` that a file has; those of format 2 lack some."""
    with unavailable(path, "read"):
        names = set(pq.read_schema(path).names)
    return [name for name in SCHEMA.names if name in names]


def events_at(part: Part, positions: pl.Series) -> pl.DataFrame:
    """Return the events of a part at sorted positions, with the columns `EVENTS`."""
    within = Part(positions[0], positions[-1], part.path)
    if "sent_position" in file_columns(part.path):
        is_at = pc.field("position").isin(positions.to_arrow())
        return pl.DataFrame(read_table(within, list(EVENTS), is_at))
    rows = pl.DataFrame(to_rows("", list(read_commits(within, envelopes=False))).select(STEP_COLUMNS))
    rows = rows.filter(pl.col("position").is_in(positions.implode()))
    return rows.with_columns(own_columns()).select(*EVENTS)


def read_commits(part: Part, *, envelopes: bool = True) -> Iterator[Commit]:
    """Yield the commits that hold the positions of a part, not verified; see `LogArchive.commits`."""
    is_held = pc.field("last") >= part.first
    heads = list(select(Part(1, part.last, part.path), ["position", "last"], is_held))
    if heads:
        yield from commits_where(Part(heads[0][0], heads[-1][1], part.path), envelopes=envelopes)


def _commit(head: tuple[Any, ...], envelopes: list[bytes]) -> Commit:
    first, last, epoch, at, chain, events = head[:6]
    return Commit(first, last, epoch, at, chain, events, encode_envelopes(envelopes))


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
        events_at: as for `sent_columns`.

    Raises: BrokenLog when a commit can't be decoded.
    """
    metadata = {
        "postroom.format": FORMAT,
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


def write(table: pa.Table, path: Path) -> None:
    """Write a file with mode 0600 that is durable and complete, or not there, when this returns."""
    descriptor, temporary = mkstemp(_TEMPORARY, ".", path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            pq.write_table(
                table,
                file,
                compression="zstd",
                use_dictionary=_REPEATING,
                column_encoding=_ENCODINGS,
                row_group_size=ROW_GROUP_ROWS,
                write_page_index=True,
                sorting_columns=[pq.SortingColumn(0)],
                bloom_filter_options=_bloom_filters(table),
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync(path.parent)


def _bloom_filters(table: pa.Table) -> dict[str, dict[str, float]]:
    rows = min(table.num_rows, ROW_GROUP_ROWS)
    names = [name for name in _BLOOM_FILTERS if table[name].null_count < table.num_rows]
    return {name: {"ndv": rows, "fpp": 0.05} for name in names}


def make_folder(folder: Path) -> None:
    """Make a folder and its parents durably, with mode 0700, where they are missing."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        sync(each.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove the incomplete files of a crash; only the mailbox's owner writes any."""
    for file in folder.glob(f".*{_TEMPORARY}"):
        file.unlink(missing_ok=True)


@contextmanager
def unavailable(path: Path, action: str) -> Iterator[None]:
    """Raise Unavailable for errors of files and of PyArrow; `action` completes "can't be"."""
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise Unavailable(
            f"The archive {path} can't be {action}: {error}. Check the folder, its permissions and its disk."
        ) from error
