"""Rows of `postroom_events`: events of the log, with the id and topic of their messages.

Segments have id and topic for all events, the log only for `MessageSent`. Most other events follow their
`MessageSent` within the range that a task reads; for the rest, the task follows the distances between the
events of a message back to it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from postroom.projections.log_reader import (
    POSITIONS_PER_READ,
    Condition,
    IsIn,
    LogExtent,
    LogReader,
    Range,
    split,
)
from postroom.projections.models.messages import SENT, is_message, uuid_text
from postroom.projections.spark.columns import EVENTS, convert

MAX_MESSAGES = 500_000
"""Maximum number of messages whose topics a task caches; older ones are read again."""
GAP = 200
"""Maximum gap between positions that one read spans."""
_KINDS = {column.name: column.kind for column in EVENTS}
_RESOLVED = {
    "message_id": pa.string(),
    "topic": pa.string(),
    "shard": pa.int64(),
    "sent_position": pa.int64(),
    "sent_at": pa.int64(),
}
_SENT_SOURCES = {"sent_position": "position", "sent_at": "at"}
"""Columns that the log does not have: values of the `MessageSent` under their own names."""
SEGMENT_SOURCES = {"message_id": "sent_message_id", "topic": "event_topic", "shard": "event_shard"}
"""Columns that segments have under another name than the log; ids that are stream ids are null there."""
_STEP = ("position", "stream", "event", "distance", "at", "message_id", "topic", "shard")
_POSITIONS = {"stream": pl.Binary(), "position": pl.Int64()}
_SENT_SCHEMA = {
    **_POSITIONS,
    **{name: pl.String() if type_ == pa.string() else pl.Int64() for name, type_ in _RESOLVED.items()},
}


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
        with self.log.connected() as log:
            messages: _Messages | None = None
            for range_ in split(ranges, POSITIONS_PER_READ):
                if messages is None or messages.extent != range_.extent:
                    messages = _Messages(log, range_.extent)
                for part, is_resolved in log.divide(range_) if self._needs_messages else [(range_, False)]:
                    sources = SEGMENT_SOURCES if is_resolved else _SENT_SOURCES
                    lookup = messages if self._needs_messages and not is_resolved else None
                    columns, where = self._columns(sources, lookup), self._where(sources, lookup)
                    for batch in log.read([part], columns, where):
                        rows = self._rows(batch, sources, lookup)
                        if rows.num_rows:
                            yield rows

    @property
    def _needs_messages(self) -> bool:
        names = {*self.schema.names, *(("topic",) if self.filter.topic is not None else ())}
        return not self.filter.is_only_sent and not names.isdisjoint(_RESOLVED)

    def _columns(self, sources: Mapping[str, str], lookup: "_Messages | None") -> list[str]:
        """Return the columns to read from the log."""
        needed = ["stream", "sent_position"] if "message_id" in self.schema.names else []
        needed += ["event"] if self.filter != ALL_EVENTS else []
        needed += ["topic"] if self.filter.topic is not None else []
        stored = (sources.get(name, name) for name in (*self.schema.names, *needed))
        return list(dict.fromkeys((*stored, *(() if lookup is None else _STEP))))

    def _where(self, sources: Mapping[str, str], lookup: "_Messages | None") -> list[Condition]:
        events, topic = self.filter
        if lookup is not None:
            return [IsIn("event", tuple(dict.fromkeys((*events, SENT))))] if events else []
        where: list[Condition] = [IsIn("event", events)] if events else []
        if topic is not None and not topic.endswith("*"):
            where.append(IsIn(sources.get("topic", "topic"), (topic,)))
        return where

    def _rows(
        self, batch: pa.RecordBatch, sources: Mapping[str, str], lookup: "_Messages | None"
    ) -> pa.RecordBatch:
        columns = {name: batch[name] for name in batch.schema.names}
        if lookup is not None:
            columns |= lookup.resolve(batch)
        else:
            columns |= {name: columns.get(source) for name, source in sources.items()}
            if "message_id" in self.schema.names:
                columns["message_id"] = _message_ids(columns)
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
    _sent: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=_SENT_SCHEMA))

    def resolve(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        """Return message id, topic and shard of each event of a batch.

        Arguments:
            batch: events with the columns `_STEP`.
        """
        events = pl.DataFrame(batch)
        self._add([events])
        resolved = self._join(events)
        unresolved = events.filter(is_message() & resolved["topic"].is_null())
        if unresolved.height:
            self._look_back(unresolved)
            resolved = self._join(events)
        if self._sent.height > MAX_MESSAGES:
            self._sent = self._sent.tail(MAX_MESSAGES // 2)
        return {name: resolved[name].to_arrow().cast(type_) for name, type_ in _RESOLVED.items()}

    def _add(self, steps: Iterable[pl.DataFrame]) -> None:
        """Add the messages that are sent in some events."""
        sent = (step.filter(pl.col("event") == SENT) for step in steps)
        ids = pl.coalesce("message_id", uuid_text("stream")).alias("message_id")
        values = [ids, *(pl.col(source).alias(name) for name, source in _SENT_SOURCES.items())]
        added = (each.with_columns(values).select(*_SENT_SCHEMA) for each in sent)
        self._sent = pl.concat([self._sent, *added])

    def _join(self, events: pl.DataFrame) -> pl.DataFrame:
        """Return id, topic and shard of the latest message of each event's stream, if messages have it.

        An id may be reused after retention removed its message.
        """
        sent = self._sent.join(events.select("stream").unique(), "stream", "semi").sort("position")
        # Events of the mailbox have no message, but may have a topic themselves.
        nulls = (pl.lit(None, _SENT_SCHEMA[name]).alias(name) for name in ("message_id", *_SENT_SOURCES))
        own = events.with_columns(*nulls)
        joined = own.join_asof(sent, on="position", by="stream", suffix="_sent", check_sortedness=False)
        return joined.select(
            pl.when(is_message()).then(f"{name}_sent").otherwise(name).alias(name) for name in _RESOLVED
        )

    def _look_back(self, events: pl.DataFrame) -> None:
        """Add the messages of events, unless retention removed their `MessageSent`."""
        before = _previous(events)
        while before:
            steps = [
                step
                for range_ in _ranges(self.extent, before.values())
                for step in self._step(range_, before)
            ]
            self._add(steps)
            before = {}
            for step in steps:
                before |= _previous(step.filter(pl.col("event") != SENT))

    def _step(self, range_: Range, before: Mapping[bytes, int]) -> Iterator[pl.DataFrame]:
        """Yield the events at the given position of each stream."""
        positions = pl.DataFrame({"stream": before.keys(), "position": before.values()}, _POSITIONS)
        for batch in self.log.read([range_], _STEP):
            yield pl.DataFrame(batch).join(positions, ["stream", "position"], "semi", maintain_order="left")


def _previous(events: pl.DataFrame) -> dict[bytes, int]:
    """Return the position of the previous event of each message."""
    first = events.filter(pl.col("distance") > 0).unique("stream", keep="first", maintain_order=True)
    return dict(first.select("stream", pl.col("position") - pl.col("distance")).iter_rows())


def _ranges(extent: LogExtent, positions: Iterable[int]) -> list[Range]:
    """Return ranges that contain these positions of a log, except positions that retention removed."""
    ranges: list[Range] = []
    for position in sorted(each for each in positions if each >= extent.first):
        if ranges and position - ranges[-1].last <= GAP and position - ranges[-1].first < POSITIONS_PER_READ:
            ranges[-1] = ranges[-1]._replace(last=position)
        else:
            ranges.append(Range(extent, position, position))
    return ranges


def _message_ids(columns: Mapping[str, pa.Array]) -> pa.Array:
    """Return the ids of messages: the sender's id, or else the stream id as a UUID."""
    streams = pl.DataFrame({"stream": pl.Series(columns["stream"])})
    uuids = streams.select(uuid_text("stream")).to_series().to_arrow().cast(pa.string())
    ids = pc.coalesce(columns["message_id"], uuids)
    return pc.if_else(columns["sent_position"].is_valid(), ids, pa.scalar(None, pa.string()))
