"""The event log port in memory: nothing is written to a disk (svc-mailbox I-9)."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from threading import Lock
from typing import Any

from postroom.application.ports.event_log import Head, LogSize, Seal, StoredSnapshot
from postroom.domain.errors import DuplicateRecord, Fenced, WrongPosition
from postroom.domain.record import CHAIN, Record

RECORD_BYTES = 1_000
"""Estimated size of a record without its state and envelope."""


class MemoryEventLog:
    """The records of a mailbox in a list."""

    durability = "nothing"

    def __init__(self, mailbox: str) -> None:
        self.mailbox = mailbox
        self._records: list[Record] = []
        self._streams: defaultdict[bytes, list[Record]] = defaultdict(list)
        self._snapshots: list[StoredSnapshot] = []
        self._seal: Seal | None = None
        self._removed = 0
        self._lock = Lock()

    def append(self, records: Sequence[Record]) -> None:
        """Append records, all or none; see `EventLog.append`."""
        if not records:
            return
        with self._lock:
            end = self._removed + len(self._records)
            if records[0].position != end + 1:
                epoch = self._records[-1].epoch if self._records else 0
                if epoch > records[0].epoch:
                    raise Fenced(self.mailbox, records[0].epoch, epoch)
                raise WrongPosition(self.mailbox, records[0].position - 1, end)
            self._refuse_duplicates(records)
            self._records += records
            for record in records:
                self._streams[record.stream].append(record)

    def read(self, after: int = 0, limit: int | None = None) -> Iterator[Record]:
        """Yield whole records in the order of their positions; see `EventLogReader.read`."""
        while limit is None or limit > 0:
            with self._lock:
                start = max(0, after - self._removed)
                size = 1_000 if limit is None else min(limit, 1_000)
                records = self._records[start : start + size]
            if not records:
                return
            yield from records
            after = records[-1].position
            limit = None if limit is None else limit - len(records)

    def replay(self, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield the columns up to `state` of each record; see `EventLogReader.replay`."""
        return (record[:CHAIN] for record in self.read(after))

    def read_stream(self, stream: bytes) -> list[Record]:
        """Return the records of one stream; see `EventLogReader.read_stream`."""
        with self._lock:
            return list(self._streams.get(stream, ()))

    def existing_streams(self, streams: Iterable[bytes]) -> set[bytes]:
        """Return which streams have records; see `EventLogReader.existing_streams`."""
        with self._lock:
            return {stream for stream in streams if stream in self._streams}

    def streams_between(self, first: bytes, last: bytes, limit: int) -> list[bytes]:
        """Return the streams of a range; see `EventLogReader.streams_between`."""
        with self._lock:
            between = [s for s, each in self._streams.items() if first <= s <= last and each[0].version == 1]
        return sorted(between)[:limit]

    def replay_first(self, streams: Iterable[bytes]) -> Iterator[tuple[Any, ...]]:
        """Yield the first records of streams; see `EventLogReader.replay_first`."""
        with self._lock:
            first = [self._streams[stream][0] for stream in streams if stream in self._streams]
        return (record[:CHAIN] for record in first if record.version == 1)

    def at_positions(self, positions: Sequence[int]) -> dict[int, Record]:
        """Return the records at these positions; see `EventLogReader.at_positions`."""
        with self._lock:
            places = ((position, position - self._removed - 1) for position in positions)
            return {p: self._records[i] for p, i in places if 0 <= i < len(self._records)}

    def head(self) -> Head | None:
        """Return the end of the log; see `EventLogReader.head`."""
        with self._lock:
            if not self._records:
                return None
            last = self._records[-1]
            return Head(last.position, last.at, last.chain, last.epoch)

    def first_position(self) -> int | None:
        """Return the position of the oldest record; see `EventLogReader.first_position`."""
        with self._lock:
            return self._records[0].position if self._records else None

    def position_before(self, at: int) -> int:
        """Return the last position before log time `at`; see `EventLogReader.position_before`."""
        with self._lock:
            return self._removed + bisect_left(self._records, at, key=attrgetter("at"))

    def position_at_size(self, size: int) -> int:
        """Return where the oldest records take `size` bytes; see `EventLog.position_at_size`."""
        with self._lock:
            for count, record in enumerate(self._records):
                size -= _size(record)
                if size < 0:
                    return self._removed + max(count, 1)
            return self._removed + len(self._records)

    def truncate(self, through: int, limit: int) -> int:
        """Remove the oldest records through `through`; see `EventLog.truncate`."""
        with self._lock:
            count = max(0, min(through - self._removed, limit, len(self._records)))
            for record in islice(self._records, count):
                records = self._streams[record.stream]
                records.remove(record)
                if not records:
                    del self._streams[record.stream]
            del self._records[:count]
            self._removed += count
            return count

    def size(self) -> LogSize:
        """Return the estimated size of the log; see `EventLog.size`."""
        with self._lock:
            size = sum(map(_size, self._records))
        return LogSize(size, size)

    def reclaim_space(self, limit: int) -> int:
        """Return 0: removed records are freed at once."""
        return 0

    def save_snapshot(self, snapshot: StoredSnapshot, keep_from: int = 0) -> None:
        """Save a part of a snapshot, and drop those before a position; see `EventLog.save_snapshot`."""
        with self._lock:
            rest = [e for e in self._snapshots if e.position >= keep_from and e.position != snapshot.position]
            self._snapshots = sorted([snapshot, *rest], key=attrgetter("position"), reverse=True)

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """Yield the saved snapshots, newest first."""
        with self._lock:
            return iter(list(self._snapshots))

    def seal(self, seal: Seal) -> None:
        """Save the end of the log; see `EventLog.seal`."""
        with self._lock:
            if self._seal is None or seal.position > self._seal.position:
                self._seal = seal

    def sealed(self) -> Seal | None:
        """Return the seal of the last owner, or None."""
        return self._seal

    def close(self) -> None:
        """Do nothing: the records are freed with the last reference to the log."""

    def _refuse_duplicates(self, records: Sequence[Record]) -> None:
        versions = {(record.stream, record.version) for record in records}
        has_duplicates = len(versions) < len(records) or any(
            stored.version == record.version
            for record in records
            if record.stream in self._streams and self._streams[record.stream][-1].version >= record.version
            for stored in self._streams[record.stream]
        )
        if has_duplicates:
            raise DuplicateRecord(
                f"The log of mailbox {self.mailbox} already has a record with the same stream and "
                "version; nothing was appended."
            )


def _size(record: Record) -> int:
    return RECORD_BYTES + len(record.state) + len(record.envelope or b"")
