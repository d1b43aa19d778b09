"""Verification of the index of streams, and of the distances between the events of a stream."""

from array import array
from collections.abc import Collection, Iterator

from postroom.application.mailbox.codec import decode_events
from postroom.application.mailbox.groups import is_indexed
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.commit import IndexEntry
from postroom.domain.errors import BrokenLog
from postroom.domain.message import MessageAcked, MessageExpired, MessageSent
from postroom.domain.names import STREAM_BYTES, mailbox_stream
from postroom.domain.record import Record, StoredEvent

BATCH_STREAMS = 1_000


class IndexCheck:
    """Check that every event is found as it was written, and that the index leads to nothing else.

    The log may be appended to and truncated meanwhile.
    """

    def __init__(self, log: EventLogReader) -> None:
        self._log = log
        self._own = mailbox_stream(log.mailbox)
        self._sent: dict[bytes, int] = {}
        """Positions of messages that were not looked up yet."""
        self._unsettled: dict[bytes, tuple[int, int]] = {}
        """Positions of the first and the latest event of each unsettled message."""
        self._last: dict[bytes, int] = {}
        """Positions of the last events that the index should have."""
        self._with_last: set[bytes] = set()
        """Messages whose last events the index has."""
        self._others: dict[bytes, array[int]] = {}
        """Version and position of each entry of the streams that may have several."""
        self._streams = 0
        """Number of streams whose first event the log has."""

    def add(self, record: Record) -> None:
        """Check the next record of the log.

        Raises: BrokenLog when it, or the index entry of one before, can't be found as it was written.
        """
        event, position = record.event, record.position
        if isinstance(event, MessageSent):
            if event.stream in self._sent or event.stream in self._unsettled:
                raise self._broken_log(f"The message at position {position} was sent before", position)
            self._streams += 1
            self._sent[event.stream] = position
            if event.due is not None:
                self._unsettled[event.stream] = (position, position)
            if len(self._sent) >= BATCH_STREAMS:
                self._look_up_messages()
        elif isinstance(event, StoredEvent) or event.stream == self._own:
            self._streams += event.version == 1
            self._others.setdefault(event.stream, array("q")).extend((event.version, position))
        elif event.stream in self._unsettled:  # otherwise, retention removed its first event
            first, latest = self._unsettled[event.stream]
            if record.distance != position - latest:
                raise self._broken_log(
                    f"The event at position {position} does not lead to the previous event of its message, "
                    f"at {latest}",
                    position,
                )
            self._unsettled[event.stream] = (first, position)
            if is_indexed(event, position - first):
                self._last[event.stream] = position
            if isinstance(event, MessageAcked | MessageExpired):
                del self._unsettled[event.stream]

    def finish(self, end: int) -> None:
        """Check the index against the whole log.

        Arguments:
            end: position of the last record that was added.

        Raises: BrokenLog when an entry is missing, or leads elsewhere or to nothing.
        """
        self._look_up_messages()
        for streams in _batches(sorted(self._others)):
            self._look_up_others(streams)
        for streams in _batches(sorted(self._with_last | self._last.keys())):
            self._look_up_last(streams, end)
        if sum(map(len, self._pages())) != self._streams:
            for streams in self._pages():
                self._check_targets(self._log.index_of(streams))

    def _look_up_messages(self) -> None:
        entries = self._entries(self._sent)
        for stream, position in self._sent.items():
            self._compare(stream, {1: position}, entries[stream])
            if any(entry.last is not None for entry in entries[stream]):
                self._with_last.add(stream)
        self._sent.clear()

    def _look_up_others(self, streams: list[bytes]) -> None:
        entries = self._entries(streams)
        for stream in streams:
            numbers = iter(self._others[stream])
            self._compare(stream, dict(zip(numbers, numbers, strict=True)), entries[stream])

    def _entries(self, streams: Collection[bytes]) -> dict[bytes, list[IndexEntry]]:
        entries: dict[bytes, list[IndexEntry]] = {stream: [] for stream in streams}
        for entry in self._log.index_of(streams):
            if entry.stream in entries:  # SQLite also returns a row whose altered key is before its place
                entries[entry.stream].append(entry)
        return entries

    def _compare(self, stream: bytes, expected: dict[int, int], entries: list[IndexEntry]) -> None:
        """Compare the entries of a stream with their positions by version."""
        actual = {entry.version: entry.position for entry in entries}
        for version, position in expected.items():
            other = actual.get(version)
            if other != position and self._log.commits_of([position], envelopes=False):
                leads = "no entry" if other is None else f"position {other}"
                raise self._broken_log(
                    f"The index has {leads} for version {version} of stream {stream.hex()}, which is at "
                    f"position {position}",
                    position,
                )
        self._check_targets([entry for entry in entries if entry.version not in expected])

    def _look_up_last(self, streams: list[bytes], end: int) -> None:
        entries = {entry.stream: entry for entry in self._log.index_of(streams) if entry.version == 1}
        for stream in streams:
            entry, expected = entries.get(stream), self._last.get(stream)
            if entry is None or entry.last == expected or (entry.last is not None and entry.last > end):
                continue  # right, or changed since; `add` checked that there is an entry
            where = "none" if entry.last is None else f"position {entry.last}"
            right = "none" if expected is None else f"position {expected}"
            raise self._broken_log(
                f"The index has {where} for the last event of stream {stream.hex()} instead of {right}",
                entry.position,
            )

    def _check_targets(self, entries: list[IndexEntry]) -> None:
        """Check that each entry leads to an event of its stream and version."""
        positions = {entry.position for entry in entries}
        targets = {
            position: (event.stream, event.version)
            for commit in self._log.commits_of(positions, envelopes=False)
            for position, event in enumerate(decode_events(commit), commit.first)
            if position in positions
        }
        for entry in entries:
            if targets.get(entry.position) == (entry.stream, entry.version):
                continue
            if entry not in self._log.index_of([entry.stream]):
                continue  # retention has removed both
            raise self._broken_log(
                f"The index leads to position {entry.position} for version {entry.version} of stream "
                f"{entry.stream.hex()}, which is not there",
                entry.position,
            )

    def _pages(self) -> Iterator[list[bytes]]:
        """Yield the streams of the index whose first event remains, in order."""
        first, last = bytes(STREAM_BYTES), b"\xff" * STREAM_BYTES
        while page := self._log.streams_between(first, last, BATCH_STREAMS):
            yield page
            if page[-1] >= last:
                return
            first = (int.from_bytes(page[-1]) + 1).to_bytes(STREAM_BYTES)

    def _broken_log(self, what: str, position: int) -> BrokenLog:
        return BrokenLog(
            f"{what}: the log of {self._log.mailbox} was altered. Restore the store from a backup.", position
        )


def _batches(streams: list[bytes]) -> Iterator[list[bytes]]:
    return (streams[start : start + BATCH_STREAMS] for start in range(0, len(streams), BATCH_STREAMS))
