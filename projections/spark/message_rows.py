"""Rows of `postroom_messages`: the messages of a mailbox, folded from its log in one task."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import polars as pl
import pyarrow as pa
from msgspec.structs import replace

from postroom.domain.errors import NotFound
from postroom.projections.log_reader import (
    POSITIONS_PER_READ,
    Bucket,
    Condition,
    IsIn,
    LogExtent,
    LogReader,
    Range,
    split,
)
from postroom.projections.models import messages
from postroom.projections.spark.columns import MESSAGES, convert
from postroom.projections.spark.options import position_of
from postroom.projections.spark.source import PARTS_PER_CORE, Part

POSITIONS_PER_FOLD = 3_000_000
"""Positions that one task folds, keeping messages in memory that are unsettled after 50,000 positions."""
BUCKETS = 256
"""Number of buckets that divide messages among tasks: the values of the last byte of a stream id."""
_FROM_MODEL = {"sent_at": "created_at", "envelope": "envelope_blob"}
"""Columns with another name in the read model `mailbox`."""
_KINDS = {column.name: column.kind for column in MESSAGES}


def message_parts(
    ranges: Sequence[Range], cores: int | None = None, positions: int = POSITIONS_PER_FOLD
) -> list[Part]:
    """Divide logs among tasks: small logs share a task, the messages of a large log are divided by id.

    Arguments:
        ranges: ranges of whole logs.
        cores: number of cores of the cluster, if known.
        positions: maximum number of positions of a task; each task of a larger log reads all of it.
    """
    shared = positions
    if cores is not None:
        share = sum(each.size for each in ranges) // (cores * PARTS_PER_CORE)
        shared = min(max(share, POSITIONS_PER_READ), positions)
    parts: list[Part] = []
    small = Part([])
    for range_ in sorted(ranges, key=lambda each: each.size, reverse=True):
        count = min(-(-range_.size // positions), BUCKETS)
        if count > 1:
            bounds = [BUCKETS * number // count for number in range(count + 1)]
            buckets = pairwise(bounds)
            parts += [Part([range_], Bucket("stream", low, high)) for low, high in buckets]
            continue
        if small.ranges and sum(each.size for each in small.ranges) + range_.size > shared:
            parts.append(small)
            small = Part([])
        small.ranges.append(range_)
    return [*parts, small] if small.ranges else parts


def extents_as_of(
    log: LogReader, extents: Iterable[LogExtent], position: int | None, time: int | None
) -> Iterator[LogExtent]:
    """Yield the part of each log up to a position or a log time (µs), both inclusive; all of it by default.

    Raises: NotFound if retention removed that part of a log.
    """
    for extent in extents:
        if position is not None and position < extent.last:
            last = min(position, extent.last)
            commit = next(iter(log.commits(Range(extent, last, last), envelopes=False)), None)
            if commit is None:
                raise _removed(extent, f"position {position}")
            yield replace(extent, last=last, at=commit.at)
        elif time is not None:
            last = position_of(log, extent, time + 1) - 1
            if last >= extent.first:
                yield replace(extent, last=last, at=time)
            elif extent.first > 1:
                raise _removed(extent, "that time")
        else:
            yield extent


def _removed(extent: LogExtent, moment: str) -> NotFound:
    return NotFound(
        f"Retention removed the log of mailbox {extent.name} up to position {extent.first - 1}, and with it "
        f"{moment}; pass a later one, or the option archive."
    )


@dataclass(frozen=True)
class MessageRows:
    """Typed rows of messages; it is pickled and sent to tasks.

    Arguments:
        schema: Arrow schema of the rows, with columns of `MESSAGES`.
        statuses: statuses of the messages to return; empty for all.
        topic: a topic, or a prefix followed by `*`; None for all.
    """

    log: LogReader
    schema: pa.Schema
    statuses: tuple[str, ...] = ()
    topic: str | None = None

    def read(self, ranges: Iterable[Range], bucket: Bucket | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of whole logs, or of one bucket of them."""
        where: list[Condition] = [IsIn("event", messages.EVENTS)]
        with self.log.connected() as log:
            for range_ in ranges:
                for rows in self._fold(log, range_, [*where, *([bucket] if bucket else [])]):
                    yield from self._batches(rows)

    def _fold(self, log: LogReader, range_: Range, where: Sequence[Condition]) -> Iterator[pl.DataFrame]:
        """Yield the messages of a log, first those that are settled near their `MessageSent`."""
        columns = [name for name in messages.READS if name != "envelope" or "envelope" in self.schema.names]
        pieces: list[pl.DataFrame] = []
        for part in split([range_], POSITIONS_PER_READ):
            for batch in log.read([part], columns, where):
                records = pl.DataFrame(pa.Table.from_batches([batch]))
                partials, _ = messages.fold(records)
                is_complete = partials.select(messages.is_complete()).to_series()
                yield messages.finish(partials.filter(is_complete), [range_.extent])
                pieces.append(partials.filter(~is_complete))
        if pieces:
            yield messages.finish(messages.merge(pl.concat(pieces)), [range_.extent])

    def _batches(self, rows: pl.DataFrame) -> Iterator[pa.RecordBatch]:
        if self.statuses:
            rows = rows.filter(pl.col("status").is_in(self.statuses))
        if self.topic is not None:
            prefix, topic = self.topic.removesuffix("*"), pl.col("topic")
            rows = rows.filter(topic.str.starts_with(prefix) if prefix != self.topic else topic == prefix)
        if not rows.height:
            return
        columns: Mapping[str, pa.ChunkedArray] = dict(zip(rows.columns, rows.to_arrow().columns, strict=True))
        arrays = [
            self._array(columns[_FROM_MODEL.get(field.name, field.name)], field) for field in self.schema
        ]
        yield from pa.Table.from_arrays(arrays, schema=self.schema).to_batches(max_chunksize=20_000)

    def _array(self, column: pa.ChunkedArray, field: pa.Field) -> pa.Array:
        kind = _KINDS[field.name]
        plain = column.combine_chunks().cast(
            {"bytes": pa.binary(), "text": pa.string(), "map": pa.string()}.get(kind, pa.int64())
        )
        return convert(plain, kind, field.type)
