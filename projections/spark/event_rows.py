"""Rows of `postroom_events`: events of the log, with the id and topic of their messages.

In the log, only `MessageSent` has these. Most other events follow it within the range that a task reads; for
the rest, the task follows the distances between the events of a message back to it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from postroom.projections.log_conditions import Condition, IsIn
from postroom.projections.log_extent import LogExtent, Range, split
from postroom.projections.models.messages import SENT, uuid_text
from postroom.projections.ports.log_reader import POSITIONS_PER_READ, LogReader
from postroom.projections.spark.columns import EVENTS, convert

MAX_MESSAGES = 500_000
"""Maximum number of messages whose topics a task caches; older ones are read again."""
GAP = 200
"""Maximum gap between positions that one read spans."""
_KINDS = {column.name: column.kind for column in EVENTS}
_OF_MESSAGE = ("message_id", "topic", "shard")
_RESOLVED = {name: pa.int64() if name == "shard" else pa.string() for name in _OF_MESSAGE}
_STEP = ("position", "stream", "event", "distance", *_OF_MESSAGE)
_SENT_SCHEMA = pa.schema([("stream", pa.binary()), ("position", pa.int64()), *_RESOLVED.items()])


class EventFilter(NamedTuple):
    """A filter of events.

    Arguments:
        events: names of types; empty for all.
        topic: a topic, or a prefix followed by `*`; None for all events.
    """

    events: tuple[str, ...] = ()
    topic: str | None = None

    @property
    def is_only_sent(self) -> bool:
        """Return whether no event but `MessageSent` can match."""
        return self.events == (SENT,)

    def mask(self, events: pa.Array, topics: pa.Array | None) -> pa.Array:
        """Return a mask of the matching rows."""
        mask = pa.repeat(True, len(events))
        if self.events:
            mask = pc.is_in(events, pa.array(self.events, pa.string()))
        if self.topic is not None:
            prefix = self.topic.removesuffix("*")
            is_match = pc.starts_with(topics, prefix) if prefix != self.topic else pc.equal(topics, prefix)
            mask = pc.and_(mask, is_match.fill_null(False))
        return mask


ALL_EVENTS = EventFilter()


@dataclass(frozen=True)
class EventRows:
    """Typed rows of events; it is pickled and sent to tasks.

    Arguments:
        schema: Arrow schema of the rows, with columns of `EVENTS`.
    """

    log: LogReader
    schema: pa.Schema
    filter: EventFilter = ALL_EVENTS

    def read(self, ranges: Iterable[Range]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ranges, in the order of positions."""
        columns = list(dict.fromkeys((*self.schema.names, *self._needed())))
        with self.log.connected() as log:
            messages: _Messages | None = None
            for range_ in split(ranges, POSITIONS_PER_READ):
                if messages is None or messages.extent != range_.extent:
                    messages = _Messages(log, range_.extent)
                for batch in log.read([range_], columns, self._where()):
                    rows = self._rows(batch, messages)
                    if rows.num_rows:
                        yield rows

    @property
    def _needs_messages(self) -> bool:
        names = {*self.schema.names, *(("topic",) if self.filter.topic is not None else ())}
        return not self.filter.is_only_sent and not names.isdisjoint(_OF_MESSAGE)

    def _needed(self) -> Sequence[str]:
        if self._needs_messages:
            return _STEP
        needed = ["stream"] if "message_id" in self.schema.names else []
        return [
            *needed,
            *(("event",) if self.filter.events else ()),
            *(("topic",) if self.filter.topic else ()),
        ]

    def _where(self) -> list[Condition]:
        events = self.filter.events
        if not events:
            return []
        return [IsIn("event", tuple(dict.fromkeys((*events, SENT))) if self._needs_messages else events)]

    def _rows(self, batch: pa.RecordBatch, messages: "_Messages") -> pa.RecordBatch:
        columns = {name: batch[name] for name in batch.schema.names}
        if self._needs_messages:
            columns |= messages.resolve(batch)
        elif "message_id" in columns:
            columns["message_id"] = _message_ids(batch)
        if self.filter.events or self.filter.topic is not None:
            mask = self.filter.mask(columns["event"], columns.get("topic"))
            columns = {name: columns[name].filter(mask) for name in self.schema.names}
        arrays = [
            convert(columns[name], _KINDS[name], self.schema.field(name).type) for name in self.schema.names
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


@dataclass
class _Messages:
    """The messages of a mailbox that a task has read, to complete their later events."""

    log: LogReader
    extent: LogExtent
    _sent: pa.Table = field(default_factory=_SENT_SCHEMA.empty_table)

    def resolve(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        """Return message id, topic and shard of each event of a batch.

        Arguments:
            batch: events with the columns `_STEP`.
        """
        is_sent = pc.equal(batch["event"], SENT)
        earlier = self._sent
        self._sent = pa.concat_tables([earlier, _sent_rows(batch.filter(is_sent))])
        is_later = pc.and_(_is_of_message(batch["event"]), pc.invert(is_sent))
        rows = self._before(self._rows_of(batch, is_sent, earlier), batch["position"])
        is_unknown = pc.and_(is_later, pc.is_null(rows))
        if pc.any(is_unknown).as_py():
            self._look_back(batch.filter(is_unknown))
            rows = pc.coalesce(rows, self._before(self._latest_rows(batch["stream"]), batch["position"]))
        rows = pc.if_else(is_later, rows, None)
        own = {**{name: batch[name] for name in _OF_MESSAGE}, "message_id": _message_ids(batch)}
        resolved = {
            # Events of the mailbox may have a topic themselves.
            name: pc.if_else(is_later, self._sent[name].combine_chunks().take(rows), own[name])
            for name in _OF_MESSAGE
        }
        resolved["message_id"] = pc.if_else(_is_of_message(batch["event"]), resolved["message_id"], None)
        if self._sent.num_rows > MAX_MESSAGES:
            self._sent = self._sent.slice(self._sent.num_rows - MAX_MESSAGES // 2).combine_chunks()
        return resolved

    def _before(self, rows: pa.Array, positions: pa.Array) -> pa.Array:
        """Return the rows whose messages were sent before the events at these positions, others as null."""
        sent = self._sent["position"].combine_chunks().take(rows)
        return pc.if_else(pc.less(sent, positions).fill_null(False), rows, None)

    def _rows_of(self, batch: pa.RecordBatch, is_sent: pa.Array, earlier: pa.Table) -> pa.Array:
        """Return the row of each event's message in the table, or null."""
        streams = self._sent["stream"].combine_chunks()
        if pc.count_distinct(streams).as_py() == len(streams):
            return pc.index_in(batch["stream"], streams)
        # An id may be reused after retention removed its message; later events belong to the later message.
        order = pc.sort_indices(earlier["position"]).to_pylist()
        streams_before = earlier["stream"].to_pylist()
        rows = {streams_before[row]: row for row in order}
        of_events, next_row = [], earlier.num_rows
        for stream, begins in zip(batch["stream"].to_pylist(), is_sent.to_pylist(), strict=True):
            of_events.append(rows.get(stream))
            if begins:
                rows[stream] = next_row
                next_row += 1
        return pa.array(of_events, pa.int32())

    def _latest_rows(self, streams: pa.Array) -> pa.Array:
        """Return the latest row of each stream."""
        rows = {stream: row for row, stream in enumerate(self._sent["stream"].to_pylist())}
        return pa.array([rows.get(stream) for stream in streams.to_pylist()], pa.int32())

    def _look_back(self, events: pa.RecordBatch) -> None:
        """Add the messages of events to the table, unless retention removed their `MessageSent`."""
        before = _previous(events)
        while before:
            steps = [
                step
                for range_ in _ranges(self.extent, before.values())
                for step in self._step(range_, before)
            ]
            sent = [_sent_rows(step.filter(pc.equal(step["event"], SENT))) for step in steps]
            self._sent = pa.concat_tables([self._sent, *sent])
            before = {}
            for step in steps:
                before |= _previous(step.filter(pc.not_equal(step["event"], SENT)))

    def _step(self, range_: Range, before: Mapping[bytes, int]) -> Iterator[pa.RecordBatch]:
        """Yield the events at the given position of each stream."""
        for batch in self.log.read([range_], _STEP):
            pairs = zip(batch["stream"].to_pylist(), batch["position"].to_pylist(), strict=True)
            yield batch.filter(pa.array([before.get(stream) == position for stream, position in pairs]))


def _sent_rows(events: pa.RecordBatch) -> pa.Table:
    """Return `MessageSent` events as rows of messages."""
    columns = {name: events[name] for name in _SENT_SCHEMA.names}
    return pa.table({**columns, "message_id": _message_ids(events)}, schema=_SENT_SCHEMA)


def _previous(events: pa.RecordBatch) -> dict[bytes, int]:
    """Return the position of the previous event of each message."""
    previous: dict[bytes, int] = {}
    columns = (events[name].to_pylist() for name in ("stream", "position", "distance"))
    for stream, position, distance in zip(*columns, strict=True):
        if distance > 0 and stream not in previous:
            previous[stream] = position - distance
    return previous


def _ranges(extent: LogExtent, positions: Iterable[int]) -> list[Range]:
    """Return ranges that contain these positions of a log, except positions that retention removed."""
    ranges: list[Range] = []
    for position in sorted(each for each in positions if each >= extent.first):
        if ranges and position - ranges[-1].last <= GAP and position - ranges[-1].first < POSITIONS_PER_READ:
            ranges[-1] = ranges[-1]._replace(last=position)
        else:
            ranges.append(Range(extent, position, position))
    return ranges


def _is_of_message(events: pa.Array) -> pa.Array:
    return pc.starts_with(events, "Message")


def _message_ids(batch: pa.RecordBatch) -> pa.Array:
    """Return the ids of sent messages: the sender's id, or else the stream id as a UUID."""
    streams = pl.DataFrame({"stream": pl.Series(batch["stream"])})
    uuids = streams.select(uuid_text("stream")).to_series().to_arrow().cast(pa.string())
    return pc.coalesce(batch["message_id"], uuids)
