"""Columns of commits: the runs of several commits, decoded into Arrow (ADR 0066).

Runs of one type are joined column by column; one permutation brings the rows of all types into the order of
their positions. No Python object is made for an event, only for values that differ within a run.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from operator import and_
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from postroom.application.mailbox.codec import decode_envelopes, decode_runs, to_records
from postroom.application.mailbox.event_columns import HASH_BYTES, AnyRun, SentRun, StoredRun
from postroom.domain.commit import Commit, Run
from postroom.domain.errors import BrokenLog
from postroom.domain.names import STREAM_BYTES
from postroom.projections.log_reader import (
    POSITIONS_PER_READ,
    Condition,
    LogExtent,
    Range,
    may_match,
    split,
    to_arrow,
)
from postroom.projections.projection import COLUMNS, HEADER_COLUMNS, arrow_schema

ROWS_PER_BATCH = 20_000
BYTES_PER_BATCH = 32 << 20
"""Size of the commits of a batch, as they are encoded."""

_SINGULAR = ("due", "expires_at", "custom_headers")
FIELDS = {
    name: name if name in _SINGULAR else f"{name}s"
    for name in (
        *("version", "distance", "topic", "shard", "attempt", "due", "expires_at", "reason", "last_error"),
        *(
            "consumer",
            "size",
            "idem_key",
            "sticky_key",
            "unique_key",
            "note",
            "result",
            "result_type",
            "traceback",
            *HEADER_COLUMNS,
        ),
    )
} | {"priority": "priorities", "capability": "capabilities", "copy_of": "copies_of"}
"""Fields of runs that are columns of the log."""
JOINED = {
    "stream": ("streams", STREAM_BYTES),
    "payload_hash": ("payload_hashes", HASH_BYTES),
    "hash_chain": ("hash_chains", HASH_BYTES),
    "envelope_hash": ("envelopes_hashed", HASH_BYTES),
}
"""Fields of runs with values of one size that are joined, and the size."""
_COMMIT_COLUMNS = ("epoch", "at", "chain")
EXTENT_COLUMNS = ("place", "mailbox_id", "mailbox", "as_of")
"""Columns that follow from the extent and the position."""
_to_lines = msgspec.json.Encoder().encode_lines


def read_ranges(
    select: Callable[[Range], Generator[Commit, None, None]],
    ranges: Iterable[Range],
    columns: Sequence[str],
    where: Sequence[Condition],
    *,
    allow_gaps: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield the events of ranges, in the order of their positions, by several short reads.

    Arguments:
        select: yields the commits that overlap a range, in a transaction of its own.
        columns, where: as for `LogReader.read`.
        allow_gaps: whether commits may be missing between others.

    Raises: BrokenLog when a commit can't be decoded, or does not follow the one before.
    """
    for range_ in split(ranges, POSITIONS_PER_READ):
        extent, first, last = range_
        with closing(select(range_)) as stored:  # an error ends its transaction, too
            commits = stored if allow_gaps else _without_gaps(stored, extent.name)
            yield from _one_ahead(to_batches(commits, extent, columns, where, first=first, last=last))


def _without_gaps(commits: Iterable[Commit], mailbox: str) -> Iterator[Commit]:
    """Yield commits; raise BrokenLog when one does not begin where the one before ended.

    Retention removes commits from the beginning only, so none between two others.
    """
    last: int | None = None
    for commit in commits:
        if last is not None and commit.first != last + 1:
            raise BrokenLog(
                f"The log of {mailbox} lacks what follows position {last}: the next commit begins at "
                f"{commit.first}, so commits were removed or moved. Restore the store from a backup, or "
                "leave them out with allow_gaps.",
                last + 1,
            )
        yield commit
        last = commit.last


def _one_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield each batch after reading the next one, and the last one after the transaction has ended.

    However slow the consumer is, no cursor, lock or transaction stays open between reads.
    """
    previous = next(batches, None)
    for batch in batches:
        yield previous
        previous = batch
    if previous is not None:
        yield previous


def to_batches(
    commits: Iterable[Commit],
    extent: LogExtent,
    columns: Sequence[str],
    where: Sequence[Condition] = (),
    *,
    first: int = 1,
    last: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the events of commits, a row each, in the order of positions.

    Arguments:
        commits: of one mailbox; their envelopes are needed for the column `envelope` only.
        extent: the extent of the mailbox.
        columns: the columns of `COLUMNS` to return.
        where: conditions on `EVENT_COLUMNS`; events must meet all of them.
        first, last: positions outside are left out.

    Raises: BrokenLog when a commit can't be decoded.
    """
    for group in _groups(commits):
        try:
            batch = _to_batch(group, extent, columns, where, first, last)
        except (ValueError, TypeError, pa.ArrowException):
            for commit in group:
                deque(to_records(commit), 0)  # names the commit
            raise
        if batch is not None:
            yield batch


def _groups(commits: Iterable[Commit]) -> Iterator[list[Commit]]:
    group: list[Commit] = []
    rows = size = 0
    for commit in commits:
        group.append(commit)
        rows += commit.event_count
        size += len(commit.events) + len(commit.envelopes)
        if rows >= ROWS_PER_BATCH or size >= BYTES_PER_BATCH:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


def _to_batch(
    commits: Sequence[Commit],
    extent: LogExtent,
    columns: Sequence[str],
    where: Sequence[Condition],
    first: int,
    last: int | None,
) -> pa.RecordBatch | None:
    rows = _Rows(commits, where, needs_envelopes="envelope" in columns)
    if not rows.groups:
        return None
    if commits[0].first < first or (last is not None and commits[-1].last > last):
        rows.filter(_between(rows.positions, first, last))
    if where:
        names = list(dict.fromkeys(condition.column for condition in where))
        arrays = [rows.column(name) for name in names]
        batch = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(names))
        rows.filter(_mask(batch, reduce(and_, map(to_arrow, where))))
    if not len(rows.positions):
        return None
    arrays = [_column(rows, extent, name) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


def _column(rows: "_Rows", extent: LogExtent, name: str) -> pa.Array:
    if name == "position":
        return rows.positions
    if name in EXTENT_COLUMNS:
        return extent_column(name, extent, rows.positions)
    return rows.column(name)


def extent_column(name: str, extent: LogExtent, positions: pa.Array) -> pa.Array:
    """Return a column of `EXTENT_COLUMNS` of events at positions."""
    if name == "place":
        return pc.add(positions, extent.place(0))
    value = {"mailbox_id": extent.id, "mailbox": extent.name, "as_of": extent.at}[name]
    return pa.repeat(pa.scalar(value, COLUMNS[name]), len(positions))


@dataclass
class _Group:
    """Runs of one type with their events, and the envelopes of their messages, if they are needed."""

    size: int = 0
    runs: list[AnyRun] = field(default_factory=list)
    envelopes: list[bytes] = field(default_factory=list)


class _Rows:
    """The events of commits as rows; columns are made when they are asked for.

    Arguments:
        where: runs in which no event can match are left out.
    """

    def __init__(
        self, commits: Sequence[Commit], where: Sequence[Condition], *, needs_envelopes: bool
    ) -> None:
        self.groups: dict[type[Run], _Group] = {}
        self._runs: list[AnyRun] = []
        self._commits: list[Commit] = []  # those of the runs
        positions: list[int] = []
        starts: list[int] = []  # within the group
        for commit in commits:
            position = commit.first
            runs = decode_runs(commit)
            for run in runs:
                kind = type(run)
                if may_match(where, None if kind is StoredRun else kind.event.__name__):
                    group = self.groups.setdefault(kind, _Group())
                    self._runs.append(run)
                    self._commits.append(commit)
                    positions.append(position)
                    starts.append(group.size)
                    group.runs.append(run)
                    group.size += run.count
                position += run.count
            if needs_envelopes and SentRun in self.groups:
                messages = sum(run.count for run in runs if type(run) is SentRun)
                self.groups[SentRun].envelopes.extend(decode_envelopes(commit, messages))
        if not self._runs:
            return
        sizes = accumulate((group.size for group in self.groups.values()), initial=0)
        self._offsets = dict(zip(self.groups, sizes, strict=False))
        counts = [run.count for run in self._runs]
        ends = pa.array(accumulate(counts), pa.int32())
        total = sum(counts)
        self.positions = _ramps(positions, counts, ends, total)
        self._run_numbers = _repeat_values(pa.arange(0, len(counts)).cast(pa.int32()), ends)
        rows = [self._offsets[type(run)] + start for run, start in zip(self._runs, starts, strict=True)]
        self._order = _ramps(rows, counts, ends, total)

    def filter(self, mask: pa.Array) -> None:
        """Keep the rows for which the mask is true."""
        self.positions, self._run_numbers, self._order = (
            each.filter(mask) for each in (self.positions, self._run_numbers, self._order)
        )

    def column(self, name: str) -> pa.Array:
        """Return a column of `EVENT_COLUMNS`, or `distance`."""
        type_ = COLUMNS[name]
        if name in _COMMIT_COLUMNS:
            return self._constants([getattr(commit, name) for commit in self._commits], type_)
        if name in FIELDS or name == "event":
            values = [_values(run, name) for run in self._runs]
            if not any(type(each) is list for each in values):
                return self._constants(values, type_)
        arrays = {kind: _array(kind, group, name, type_) for kind, group in self.groups.items()}
        if all(array is None for array in arrays.values()):
            return pa.nulls(len(self._order), type_)
        return pa.concat_arrays(
            [
                pa.nulls(self.groups[kind].size, type_) if array is None else array
                for kind, array in arrays.items()
            ]
        ).take(self._order)

    def _constants(self, values: Sequence[Any], type_: pa.DataType) -> pa.Array:
        """Return a column with one value for each run."""
        if values.count(values[0]) == len(values):
            return pa.repeat(pa.scalar(values[0], type_), len(self._order))
        return pa.array(values, type_).take(self._run_numbers)


def _values(run: AnyRun, name: str) -> Any:
    """Return the values of a column of a run: a list, or one value; None if it has no such field."""
    if name == "event":
        return run.topics if type(run) is StoredRun else type(run).event.__name__
    values = getattr(run, FIELDS[name], None)
    if name == "custom_headers":
        return _texts(values) if type(values) is list else _texts([values])[0]
    return values


def _array(kind: type[Run], group: _Group, name: str, type_: pa.DataType) -> pa.Array | None:
    """Return a column of the runs of a group, or None if they have no such field."""
    if name == "envelope":
        return pa.array(group.envelopes, type_) if kind is SentRun else None
    if name in JOINED:
        joined, width = JOINED[name]
        if joined not in kind.__struct_fields__:
            return None
        return _split(b"".join([getattr(run, joined) for run in group.runs]), width, group.size)
    if name != "event" and FIELDS[name] not in kind.__struct_fields__:
        return None
    flat: list[Any] = []
    for run in group.runs:
        values = _values(run, name)
        if type(values) is not list:
            flat += [values] * run.count
        elif len(values) == run.count:
            flat += values
        else:
            raise ValueError(f"a column has {len(values)} values of {run.count}")
    return pa.array(flat, type_)


def _split(joined: bytes, width: int, count: int) -> pa.Array:
    """Return values of `width` bytes that are stored joined, without copying them."""
    if len(joined) != width * count:
        raise ValueError(f"a column has {len(joined)} bytes instead of {count} times {width}")
    offsets = pa.arange(0, width * (count + 1), width).cast(pa.int32())
    return pa.BinaryArray.from_buffers(pa.binary(), count, [None, offsets.buffers()[1], pa.py_buffer(joined)])


def _repeat_values(values: pa.Array, ends: pa.Array) -> pa.Array:
    """Return each value as often as its run is long.

    Arguments:
        ends: ends of the runs.
    """
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(ends, values))


def _ramps(starts: Sequence[int], counts: Sequence[int], ends: pa.Array, total: int) -> pa.Array:
    """Return the numbers from each start on, as many as its run is long."""
    begins = accumulate(counts, initial=0)
    shifts = [start - begin for start, begin in zip(starts, begins, strict=False)]
    return pc.add(_repeat_values(pa.array(shifts, pa.int64()), ends), pa.arange(0, total))


def _between(positions: pa.Array, first: int, last: int | None) -> pa.Array:
    mask = pc.greater_equal(positions, first)
    return mask if last is None else pc.and_(mask, pc.less_equal(positions, last))


def _mask(batch: pa.RecordBatch, expression: pc.Expression) -> pa.Array:
    numbered = batch.append_column("row", pa.arange(0, batch.num_rows))
    rows = pa.table(numbered).filter(expression)["row"].combine_chunks()
    return pc.is_in(numbered["row"], rows)


def _texts(headers: list[dict[str, str] | None]) -> list[str | None]:
    """Return headers as JSON objects, encoded at once, or None where there are none."""
    lines: list[str | None] = _to_lines(headers).decode().split("\n")[:-1]  # type: ignore[assignment]
    if all(headers):
        return lines
    return [line if each else None for line, each in zip(lines, headers, strict=True)]
