"""Reading the records of a log by its commits."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from postroom.application.mailbox.codec import decode_events, decode_runs, to_records
from postroom.domain.commit import Commit, IndexEntry
from postroom.domain.event import Event
from postroom.domain.message import MessageAcked, MessageExpired, MessageSent
from postroom.domain.record import Record

SCAN_POSITIONS = 20_000
"""Distance of a message's last event from its first above which the index has it.

The events of other messages are found by reading the commits between them: some milliseconds.
"""


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
        for commit in self.commits(after, envelopes=False):
            for position, event in enumerate(decode_events(commit), commit.first):
                if position > after:
                    yield position, event

    def read_stream(self, stream: bytes) -> list[Record]:
        """Return the records of one stream; see `EventLogReader.read_stream`."""
        entries = self.index_of([stream])
        records = self.at_positions([entry.position for entry in entries])
        found = [record for record in records.values() if record.stream == stream]
        if not found or not isinstance(found[0].event, MessageSent):
            return found
        if found[0].event.due is None:  # an archived message is settled from the start
            return found
        last = entries[0].last
        later = self._until_settled(found[0]) if last is None else self._back_from(last, found[0])
        return [found[0], *later]

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
        wanted = set(positions)
        return {
            record.position: record
            for commit in self.commits_of(wanted)
            for record in to_records(commit)
            if record.position in wanted
        }

    def _until_settled(self, sent: Record) -> Iterator[Record]:
        """Yield the later records of a message, up to the end of the log if it is unsettled."""
        stream = sent.stream
        for commit in self.commits(sent.position - 1, envelopes=False):
            if stream not in commit.events:  # the ids in a commit stand in it as they are
                continue
            for record in to_records(commit):
                if record.stream == stream and record.position > sent.position:
                    yield record
                    if isinstance(record.event, MessageAcked | MessageExpired):
                        return

    def _back_from(self, last: int, sent: Record) -> list[Record]:
        """Return the later records of a message, from its last one backwards, oldest first."""
        records: list[Record] = []
        position = last
        while position > sent.position:
            record = self.at_positions([position]).get(position)
            if record is None or record.stream != sent.stream or record.distance < 1:
                break  # the log was altered
            records.append(record)
            position -= record.distance
        return records[::-1]


def stream_ids(commit: Commit) -> Iterator[bytes]:
    """Yield the stream of each event of a commit.

    Raises: BrokenLog when it can't be decoded.
    """
    for run in decode_runs(commit):
        yield from run.stream_ids()
