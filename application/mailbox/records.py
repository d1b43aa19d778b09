"""Reading the records of a log by its commits."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from postroom.application.mailbox.codec import decode_by_type, decode_events, decode_runs, to_records
from postroom.domain.commit import Commit, IndexEntry
from postroom.domain.event import Event
from postroom.domain.message import (
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageRedriven,
    MessageSent,
)
from postroom.domain.record import Record

SCAN_POSITIONS = 20_000
"""Distance of a message's last event from its first above which the index has it.

It has the last event of such a message when it is settled, dead-lettered or redriven. All other events are
found by reading the commits between them, which takes some milliseconds.
"""

POSITIONS_AT_ONCE = 200
"""Positions whose commits, of up to 16 MiB each, are in memory at a time."""

_ENDS = (MessageAcked, MessageExpired, MessageDeadLettered)
_INDEXED = (*_ENDS, MessageRedriven)


class Records:
    """Methods of `EventLogReader` over the methods of `CommitReader`."""

    @abstractmethod
    def commits(self, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
        """See `CommitReader.commits`."""

    @abstractmethod
    def commits_of(self, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        """See `CommitReader.commits_of`."""

    @abstractmethod
    def index_of(self, streams: Iterable[bytes]) -> list[IndexEntry]:
        """See `CommitReader.index_of`."""

    def read(self, after: int = 0, limit: int | None = None) -> Iterator[Record]:
        """Yield records with their envelopes; see `EventLogReader.read`."""
        if limit is not None and limit <= 0:
            return
        for commit in self.commits(after):
            for record in to_records(commit):
                if record.position > after:
                    yield record
                    if limit is not None:
                        limit -= 1
                        if not limit:
                            return

    def replay(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield positions and events without envelopes; see `EventLogReader.replay`."""
        return chain.from_iterable(enumerate(events, first) for first, events in self.replay_runs(after))

    def replay_runs(self, after: int = 0) -> Iterator[tuple[int, Sequence[Event]]]:
        """Yield events without envelopes by type; see `EventLogReader.replay_runs`."""
        for commit in self.commits(after, envelopes=False):
            first = commit.first
            for events in decode_by_type(commit):
                later = events[max(0, after + 1 - first) :]
                if later:
                    yield first + len(events) - len(later), later
                first += len(events)

    def read_stream(self, stream: bytes) -> list[Record]:
        """Return the records of one stream; see `EventLogReader.read_stream`."""
        entries = self.index_of([stream])
        # The mailbox's own events are many, and stand among messages. Only messages have version 1 alone.
        has_envelopes = all(entry.version == 1 for entry in entries)
        records = self._at_positions([entry.position for entry in entries], envelopes=has_envelopes)
        history: list[Record] = []
        for entry in entries:
            record = records.get(entry.position)
            if record is not None and record.stream == stream:
                history.append(record)
                if isinstance(record.event, MessageSent):
                    history += self._later_records(record, entry.last)
        return history

    def existing_streams(self, streams: Iterable[bytes]) -> set[bytes]:
        """Return which streams have records; see `EventLogReader.existing_streams`."""
        return {entry.stream for entry in self.index_of(streams)}

    def replay_first(self, streams: Iterable[bytes]) -> Iterator[Event]:
        """Yield the first events of streams; see `EventLogReader.replay_first`."""
        first = {entry.position: entry for entry in self.index_of(streams) if entry.version == 1}
        for commit in self.commits_of(first, envelopes=False):
            for position, event in enumerate(decode_events(commit), commit.first):
                if position in first and first[position].stream == event.stream:
                    yield event

    def at_positions(self, positions: Sequence[int]) -> dict[int, Record]:
        """Return the records at these positions; see `EventLogReader.at_positions`."""
        return self._at_positions(positions)

    def _at_positions(self, positions: Iterable[int], *, envelopes: bool = True) -> dict[int, Record]:
        distinct = sorted(set(positions))
        records: dict[int, Record] = {}
        for start in range(0, len(distinct), POSITIONS_AT_ONCE):
            part = frozenset(distinct[start : start + POSITIONS_AT_ONCE])
            for commit in self.commits_of(part, envelopes=envelopes):
                records.update((each.position, each) for each in to_records(commit) if each.position in part)
        return records

    def _later_records(self, sent: Record, last: int | None) -> Iterator[Record]:
        """Yield the later records of a message; `last` is that of its entry."""
        older = [] if last is None else self._back_from(last, sent)
        yield from older
        if last is None or older:
            yield from self._later(sent, older[-1] if older else sent)

    def _later(self, sent: Record, start: Record) -> Iterator[Record]:
        """Yield the records of a message after `start`, up to the end of the log if it is unsettled."""
        is_at_rest = self._is_at_rest(sent, start.event)
        for commit in self.commits(start.position, envelopes=False):
            if is_at_rest and commit.first > sent.position + SCAN_POSITIONS:
                return  # the index has a later event
            if sent.stream not in commit.events:  # the ids in a commit stand in it as they are
                continue
            for record in to_records(commit):
                if record.stream == sent.stream and record.position > start.position:
                    if isinstance(record.event, MessageSent):
                        return  # sent again, after retention had removed the message from the log
                    yield record
                    is_at_rest = self._is_at_rest(sent, record.event)
                    if isinstance(record.event, MessageAcked | MessageExpired):
                        return

    def _is_at_rest(self, sent: Record, latest: Event) -> bool:
        """Return whether the index has whatever follows the latest event of a message far from its first."""
        return ends_history(latest)

    def _back_from(self, last: int, sent: Record) -> list[Record]:
        """Return the later records of a message, from its last one backwards, oldest first."""
        records: list[Record] = []
        position = last
        while position > sent.position:
            record = self._at_positions([position], envelopes=False).get(position)
            if record is None or record.stream != sent.stream or record.distance < 1:
                break  # the log was altered
            records.append(record)
            position -= record.distance
        return records[::-1]


def ends_history(event: Event) -> bool:
    """Return whether no event follows, unless an operator redrives a dead letter."""
    return isinstance(event, _ENDS) or (isinstance(event, MessageSent) and event.due is None)


def is_indexed(event: Event, distance_from_sent: int) -> bool:
    """Return whether the index has the position of a message's latest event, as it is far from the first.

    Arguments:
        event: the latest event.
        distance_from_sent: how many positions after `MessageSent` it is.
    """
    return distance_from_sent > SCAN_POSITIONS and isinstance(event, _INDEXED)


def stream_ids(commit: Commit) -> Iterator[bytes]:
    """Yield the stream of each event of a commit.

    Raises: BrokenLog when it can't be decoded.
    """
    for run in decode_runs(commit):
        yield from run.stream_ids()
