"""The volatile log port: an event log in memory that forgets (svc-mailbox I-9)."""

from collections.abc import Collection, Sequence

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.ports.event_log import LogSize, StoredSnapshot
from postroom.domain.record import HEADERS, NO_HEADERS, Record

RECORD_BYTES = 500
"""Estimated memory of a record without its state and envelope."""
MESSAGE_BYTES = 700
"""Estimated memory of a message besides its records: its state, its place in a queue, and its timer."""
_SENT = "MessageSent."
_SETTLED = ("MessageAcked.", "MessageExpired.")
_DELIVERY_BEGINS = ("MessageReceived.", "MessageRedriven.")


class AmnesiaEventLog(MemoryEventLog):
    """The records of a mailbox in memory, without the content of settled messages; see `VolatileLog`.

    Records that a compaction leaves of older messages are apart from the others, which have no gaps.
    """

    def __init__(self, mailbox: str) -> None:
        super().__init__(mailbox)
        self._older: dict[int, Record] = {}
        self._settled: set[bytes] = set()
        self._used = 0

    @property
    def used_bytes(self) -> int:
        """Return about how much memory records and snapshots take; see `VolatileLog.used_bytes`."""
        return self._used

    def append(self, records: Sequence[Record]) -> None:
        """Append records, and release the content of messages that they settle; see `EventLog.append`."""
        super().append(records)
        with self._lock:
            for record in records:
                self._used += memory_of(record)
                if record.type.startswith(_SETTLED):
                    self._settled.add(record.stream)
                    self._release(record.stream)

    def at_positions(self, positions: Sequence[int]) -> dict[int, Record]:
        """Return the records at these positions; see `EventLogReader.at_positions`."""
        records = super().at_positions(positions)
        with self._lock:
            return records | {each: self._older[each] for each in positions if each in self._older}

    def compact(self, through: int, unsettled: Collection[bytes]) -> int:
        """Forget the records before a snapshot; see `VolatileLog.compact`."""
        with self._lock:
            count = max(0, min(through - self._removed - 1, len(self._records)))
            before = len(self._older) + count
            rest: dict[int, Record] = {}
            for stream, records in self._streams.items():
                older = [each for each in records if each.position < through]
                if stream in unsettled:
                    older = _shorten(older, records)
                elif stream not in self._settled:
                    older = []
                rest.update((each.position, each) for each in older)
                records[:] = [*older, *(each for each in records if each.position >= through)]
            for stream in [stream for stream, records in self._streams.items() if not records]:
                del self._streams[stream]
            del self._records[:count]
            self._removed += count
            self._older = rest
            self._settled.clear()
            self._used = self._measure()
            return before - len(self._older)

    def truncate(self, through: int, limit: int) -> int:
        """Remove the oldest records through `through`; see `EventLog.truncate`."""
        count = super().truncate(through, limit)
        with self._lock:
            self._used = self._measure()
        return count

    def size(self) -> LogSize:
        """Return the estimated size of the log; see `EventLog.size`."""
        return LogSize(self._used, self._used)

    def save_snapshot(self, snapshot: StoredSnapshot, keep_from: int = 0) -> None:
        """Save a part of a snapshot, unless its record was not appended; see `EventLog.save_snapshot`."""
        record = self.at_positions([snapshot.position]).get(snapshot.position)
        if record is None or record.chain != snapshot.chain:
            return
        before = self._snapshots
        super().save_snapshot(snapshot, keep_from)
        with self._lock:
            self._used += sum(len(each.state) for each in self._snapshots) - sum(len(e.state) for e in before)

    def _release(self, stream: bytes) -> None:
        """Replace the record of a message by one without headers and envelope."""
        records = self._streams[stream]
        sent = records[0]
        if sent.envelope is None:
            return
        self._used -= len(sent.envelope)
        slim = Record._make((*sent[:HEADERS], *NO_HEADERS))
        records[0] = slim
        if sent.position in self._older:
            self._older[sent.position] = slim
        else:
            self._records[sent.position - self._removed - 1] = slim

    def _measure(self) -> int:
        records = sum(map(memory_of, self._records)) + sum(map(memory_of, self._older.values()))
        return records + sum(len(each.state) for each in self._snapshots)


def memory_of(record: Record) -> int:
    """Return about how much memory a record takes, in bytes."""
    message = MESSAGE_BYTES if record.type.startswith(_SENT) else 0
    return RECORD_BYTES + message + len(record.state) + len(record.envelope or b"")


def _shorten(older: list[Record], records: list[Record]) -> list[Record]:
    """Return the send of an unsettled message and the last records of its latest delivery.

    An extension replaces those before it, so two records of a delivery suffice to fold the message.
    """
    begins = [n for n, each in enumerate(records) if each.type.startswith(_DELIVERY_BEGINS)]
    first = begins[-1] if begins else 0
    positions = {records[0].position, records[first].position, records[-1].position}
    return [each for each in older if each.position in positions]
