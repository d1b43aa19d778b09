"""The volatile log port: an event log in memory that forgets (svc-mailbox I-9)."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from operator import attrgetter

import msgspec

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox.codec import encode_events, to_records
from postroom.application.ports.event_log import LogSize, StoredSnapshot, VolatileLog
from postroom.domain.commit import Commit
from postroom.domain.message import (
    Headers,
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageReceived,
    MessageRedriven,
    MessageRescheduled,
    MessageSent,
)
from postroom.domain.record import Event, Record
from postroom.domain.subscription import SubscriptionAdvanced, SubscriptionDeleted

RECORD_BYTES = 500
"""Estimated memory of a record without its envelope."""
MESSAGE_BYTES = 700
"""Estimated memory of a message besides its records: its state, its place in a queue, and its timer."""
_SETTLED = (MessageAcked, MessageExpired)
_DELIVERY_BEGINS = (MessageReceived, MessageRedriven)
_FORGOTTEN = Headers(0)


class AmnesiaEventLog(MemoryEventLog, VolatileLog):
    """The events of a mailbox in memory, without the content of settled messages; see `VolatileLog`.

    Its commits are kept decoded, so that one message can be forgotten, and encoded again when they are read.
    They keep the chain hashes of the original commits, so the log can't be verified (ADR 0066).
    """

    def __init__(self, mailbox: str) -> None:
        super().__init__(mailbox)
        self._records: dict[int, Record] = {}
        """By position: records of the commits, and records of older messages that compactions left."""
        self._streams: dict[bytes, list[int]] = {}
        self._settled: set[bytes] = set()
        self._behind: set[str] = set()
        self._retained: list[bytes] = []
        """Streams of settled messages whose content late subscriptions may still have to copy."""
        self._used = 0

    @property
    def used_bytes(self) -> int:
        return self._used

    def append(self, commits: Sequence[Commit]) -> None:
        records = [record for commit in commits for record in to_records(commit)]
        super().append([commit._replace(events=b"", envelopes=b"") for commit in commits])
        with self._lock:
            for record in records:
                if isinstance(record.event, MessageAcked) and record.event.result is not None:
                    slim = msgspec.structs.replace(record.event, result=None, result_type=None)
                    record = record._replace(event=slim)
                self._records[record.position] = record
                self._streams.setdefault(record.stream, []).append(record.position)
                self._used += memory_of(record)
                if isinstance(record.event, _SETTLED):
                    self._settled.add(record.stream)
                    self._retained.append(record.stream)
                elif isinstance(record.event, SubscriptionAdvanced) and record.event.status != "live":
                    self._behind.add(record.event.subscription)
                elif isinstance(record.event, SubscriptionAdvanced | SubscriptionDeleted):
                    self._behind.discard(record.event.subscription)
            if not self._behind:
                for stream in self._retained:
                    self._release(stream)
                self._retained.clear()

    def commits(self, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
        return takewhile(bool, map(self._encode, super().commits(after)))  # type: ignore[arg-type]  # no None

    def commits_of(self, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        commits = map(self._encode, super().commits_of(positions))
        return [commit for commit in commits if commit is not None]

    def read(self, after: int = 0, limit: int | None = None) -> Iterator[Record]:
        positions = (
            position
            for commit in super().commits(after)
            for position in range(max(commit.first, after + 1), commit.last + 1)
        )
        records = (self._records.get(position) for position in positions)
        return islice(takewhile(lambda record: record is not None, records), limit)  # type: ignore[arg-type]  # no None

    def replay_runs(self, after: int = 0) -> Iterator[tuple[int, Sequence[Event]]]:
        return ((record.position, [record.event]) for record in self.read(after))

    def read_stream(self, stream: bytes) -> list[Record]:
        with self._lock:
            return [self._records[position] for position in self._streams.get(stream, ())]

    def read_streams(
        self, streams: Iterable[bytes], positions: int | None = None
    ) -> dict[bytes, list[Record]]:
        return {stream: self.read_stream(stream) for stream in streams}

    def replay_first(self, streams: Iterable[bytes]) -> Iterator[Event]:
        records = (self.read_stream(stream)[:1] for stream in streams)
        return (first.event for history in records for first in history if first.version == 1)

    def at_positions(
        self, positions: Iterable[int], optional: Collection[int] = (), *, envelopes: bool = True
    ) -> dict[int, Record]:
        with self._lock:
            return {each: self._records[each] for each in positions if each in self._records}

    def compact(self, through: int, unsettled: Collection[bytes]) -> int:
        with self._lock:
            before = len(self._records)
            count = bisect_left(self._commits, through, key=attrgetter("last"))
            if count:
                self._removed = self._commits[count - 1].last
                del self._commits[:count]
            for stream, positions in list(self._streams.items()):
                older = positions[: bisect_right(positions, self._removed)]
                if stream in unsettled:
                    needed = self._needed(positions)
                elif stream in self._settled:
                    continue
                else:
                    needed = set()
                self._forget(stream, [each for each in older if each not in needed])
            self._settled.clear()
            self._used = self._measure()
            return before - len(self._records)

    def truncate(self, through: int, limit: int) -> int:
        count = super().truncate(through, limit)
        with self._lock:
            self._used = self._measure()
        return count

    def size(self) -> LogSize:
        return LogSize(self._used, self._used)

    def save_snapshot(self, snapshot: StoredSnapshot, keep_from: int = 0) -> None:
        before = self._snapshots
        super().save_snapshot(snapshot, keep_from)
        with self._lock:
            self._used += sum(len(each.state) for each in self._snapshots) - sum(len(e.state) for e in before)

    def _encode(self, commit: Commit) -> Commit | None:
        """Return a commit with its events; None if a compaction has removed it meanwhile."""
        records = self.at_positions(range(commit.first, commit.last + 1)).values()
        if len(records) < commit.event_count:
            return None
        events, envelopes = encode_events(
            [record.event for record in records], [record.distance for record in records]
        )
        return commit._replace(events=events, envelopes=envelopes)

    def _drop_entries(self, commit: Commit) -> None:
        for position in range(commit.first, commit.last + 1):
            self._forget(self._records[position].stream, [position])

    def _forget(self, stream: bytes, positions: Collection[int]) -> None:
        """Drop records of a stream, and their entries in the index."""
        for position in positions:
            del self._records[position]
        rest = [each for each in self._streams[stream] if each in self._records]
        entries = [each for each in self._index.get(stream, ()) if each.position in self._records]
        if rest:
            self._streams[stream] = rest
        else:
            del self._streams[stream]
        if entries:
            self._index[stream] = entries
        else:
            self._index.pop(stream, None)

    def _needed(self, positions: Sequence[int]) -> set[int]:
        """Return the positions of the events that fold an unsettled message.

        They are its send; the first and the last event of its latest delivery, because an extension replaces
        earlier ones; and its last event, which may reschedule it.
        """
        events = {each: self._records[each].event for each in positions}
        begins = [each for each, event in events.items() if isinstance(event, _DELIVERY_BEGINS)] or positions
        ends = [each for each, event in events.items() if not isinstance(event, MessageRescheduled)]
        return {positions[0], begins[-1], ends[-1], positions[-1]}

    def _release(self, stream: bytes) -> None:
        """Replace the records of a message by ones without headers, envelope and tracebacks."""
        if stream not in self._streams:
            return
        for position in self._streams[stream]:
            event = self._records[position].event
            if isinstance(event, MessageDeadLettered) and event.traceback is not None:
                self._used -= len(event.traceback)
                bare = msgspec.structs.replace(event, traceback=None)
                self._records[position] = self._records[position]._replace(event=bare)
        position = self._streams[stream][0]
        sent = self._records[position].event
        if isinstance(sent, MessageSent) and sent.envelope:
            self._used -= len(sent.envelope)
            slim = msgspec.structs.replace(sent, headers=_FORGOTTEN, envelope=b"")
            self._records[position] = self._records[position]._replace(event=slim, envelope_hash=b"")

    def _measure(self) -> int:
        records = sum(map(memory_of, self._records.values()))
        return records + sum(len(each.state) for each in self._snapshots)


def memory_of(record: Record) -> int:
    """Return about how much memory a record takes, in bytes."""
    event = record.event
    if isinstance(event, MessageSent):
        return RECORD_BYTES + MESSAGE_BYTES + len(event.envelope)
    traceback = event.traceback if isinstance(event, MessageDeadLettered) else None
    return RECORD_BYTES + len(traceback or b"")
