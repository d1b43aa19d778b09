"""Records of a log, read from its commits with the histories of messages."""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from operator import attrgetter
from typing import NamedTuple

from postroom.application.mailbox.codec import (
    decode_by_type,
    decode_events,
    is_intact,
    stream_ids,
    to_records,
)
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.commit import Commit, IndexEntry
from postroom.domain.errors import BrokenLog
from postroom.domain.message import (
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageRedriven,
    MessageSent,
)
from postroom.domain.record import Event, Record
from postroom.domain.subscription import SubscriptionFilter

FEW = 4
"""Streams that are searched for in the bytes of a commit; for more, decoding their ids is faster."""


class History:
    """The records of a message, as far as they were read."""

    def __init__(
        self, sent: Record, records: list[Record], is_at_rest: Callable[[Record, Event], bool]
    ) -> None:
        """Initialise with its first record, all that are known, and whether later ones are near the first.

        Arguments:
            records: extended by those that are added.
            is_at_rest: called with the first and the latest record, returns whether the index has what
                follows far from the first.
        """
        self.stream = sent.stream
        self._sent = sent
        self._records = records
        self._check = is_at_rest
        self._is_complete = False
        self._is_at_rest = False
        self._note(records[-1])

    @property
    def position(self) -> int:
        """Return the position of the latest record."""
        return self._records[-1].position

    def ends_before(self, position: int) -> bool:
        """Return whether no later record is to be found by reading on from a position.

        Arguments:
            position: beginning of the next commit, less the distance from which the index has last events.
        """
        return self._is_complete or (self._is_at_rest and position > self._sent.position)

    def add(self, record: Record) -> None:
        """Add the next record of the message, unless it is known."""
        if self._is_complete or record.position <= self.position:
            return
        if isinstance(record.event, MessageSent):
            self._is_complete = True  # sent again, after retention had removed the message from the log
            return
        self._records.append(record)
        self._note(record)

    def _note(self, latest: Record) -> None:
        self._is_at_rest = self._check(self._sent, latest.event)
        self._is_complete = isinstance(latest.event, MessageAcked | MessageExpired)


def may_hold(commit: Commit, streams: Collection[bytes]) -> bool:
    """Return whether a commit may have events of one of these streams."""
    if len(streams) > FEW:
        try:
            return not set(streams).isdisjoint(stream_ids(commit))
        except BrokenLog:
            pass  # those whose ids are not in its bytes need not know
    return any(stream in commit.events for stream in streams)  # ids stand in a commit as they are


SCAN_POSITIONS = 20_000
"""Distance of a message's last event from its first above which the index has the last one.

The last event of such a message is added to the index when the message is settled, dead-lettered or redriven.
Readers find all other events by reading the commits in between, which takes some milliseconds.
"""

POSITIONS_AT_ONCE = 200
"""Maximum number of positions whose commits are in memory at a time."""
FIRST_POSITIONS = 8
"""The same for the first commits with envelopes: each may have 16 MiB, and their sizes are unknown."""
BYTES_AT_ONCE = 8 << 20
"""Size of later commits that are in memory at a time, if they are as large as the ones before them."""

_ENDS = (MessageAcked, MessageExpired, MessageDeadLettered)
INDEXED = (*_ENDS, MessageRedriven)


class Records(EventLogReader):
    """Methods of `EventLogReader` over the methods of `CommitReader`."""

    mailbox: str

    def read(self, after: int = 0, limit: int | None = None) -> Iterator[Record]:
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
        return chain.from_iterable(enumerate(events, first) for first, events in self.replay_runs(after))

    def replay_runs(self, after: int = 0) -> Iterator[tuple[int, Sequence[Event]]]:
        for commit in self.commits(after, envelopes=False):
            first = commit.first
            for events in decode_by_type(commit):
                later = events[max(0, after + 1 - first) :]
                if later:
                    yield first + len(events) - len(later), later
                first += len(events)

    def read_stream(self, stream: bytes) -> list[Record]:
        entries = self.index_of([stream])
        # The mailbox's own events are many, and stand among messages. Only messages have version 1 alone.
        return self._histories(entries, envelopes=all(entry.version == 1 for entry in entries))[stream]

    def read_streams(
        self, streams: Iterable[bytes], positions: int | None = None
    ) -> Mapping[bytes, Sequence[Record]]:
        return self._histories(self.index_of(streams), envelopes=False, positions=positions)

    def existing_streams(self, streams: Iterable[bytes]) -> set[bytes]:
        return {entry.stream for entry in self.index_of(streams)}

    def replay_first(self, streams: Iterable[bytes]) -> Iterator[Event]:
        first = {entry.position: entry for entry in self.index_of(streams) if entry.version == 1}
        for commit in self.commits_of(first, envelopes=False):
            for position, event in enumerate(decode_events(commit), commit.first):
                if position in first and first[position].stream == event.stream:
                    yield event

    def at_positions(
        self, positions: Iterable[int], optional: Collection[int] = (), *, envelopes: bool = True
    ) -> dict[int, Record]:
        coming = sorted(set(positions))
        requested = frozenset(coming).union(optional)
        records: dict[int, Record] = {}
        size = FIRST_POSITIONS if envelopes else POSITIONS_AT_ONCE
        while coming:
            part, coming = coming[:size], coming[size:]
            commits = self.commits_of(part, envelopes=envelopes)
            total = sum([len(each.events) + len(each.envelopes) for each in commits])
            if total:
                size = min(max(1, BYTES_AT_ONCE * len(commits) // total), POSITIONS_AT_ONCE)
            for commit in commits:
                records.update(
                    (each.position, each) for each in to_records(commit) if each.position in requested
                )
                coming = coming[bisect_right(coming, commit.last) :]  # no commit is decoded twice
        return records

    def _histories(
        self, entries: Sequence[IndexEntry], *, envelopes: bool, positions: int | None = None
    ) -> defaultdict[bytes, list[Record]]:
        """Return the records of the streams that have these entries in the index."""
        first = self.at_positions([entry.position for entry in entries], envelopes=envelopes)
        records: defaultdict[bytes, list[Record]] = defaultdict(list)
        sent: dict[bytes, Record] = {}
        last: dict[bytes, int] = {}
        for entry in entries:
            record = first.get(entry.position)
            if record is not None and record.stream == entry.stream:
                records[entry.stream].append(record)
                if isinstance(record.event, MessageSent):
                    sent[entry.stream] = record
                    if entry.last is not None:
                        last[entry.stream] = entry.last
        for stream, older in self._back_from(last, sent).items():
            records[stream] += older
        # An entry that leads to no event of the message was altered: nothing more is known of that one.
        readable = [stream for stream in sent if stream not in last or len(records[stream]) > 1]
        histories = [History(sent[stream], records[stream], self._is_at_rest) for stream in readable]
        self._add_later(histories, positions)
        return records

    def _back_from(
        self, last: Mapping[bytes, int], sent: Mapping[bytes, Record]
    ) -> dict[bytes, list[Record]]:
        """Return the later records of messages, from the last one of each backwards, oldest first."""
        records: dict[bytes, list[Record]] = {stream: [] for stream in last}
        positions = {stream: each for stream, each in last.items() if each > sent[stream].position}
        while positions:
            later = self.at_positions(positions.values(), envelopes=False)
            for stream, position in list(positions.items()):
                record = later.get(position)
                if record is None or record.stream != stream or record.distance < 1:
                    del positions[stream]  # the log was altered
                    continue
                records[stream].append(record)
                positions[stream] -= record.distance
                if positions[stream] <= sent[stream].position:
                    del positions[stream]
        return {stream: older[::-1] for stream, older in records.items()}

    def _add_later(self, histories: Sequence[History], positions: int | None = None) -> None:
        """Add the later records of messages, up to the end of the log if they are unsettled.

        One read of the log serves messages that are near to each other.

        Arguments:
            positions: number that is read at most; None for no limit.
        """
        left = inf if positions is None else positions
        coming = deque(sorted(histories, key=attrgetter("position")))
        while coming:
            waiting: dict[bytes, History] = {}
            for commit in self.commits(coming[0].position, envelopes=False):
                if left <= 0:
                    return
                left -= commit.event_count
                while coming and coming[0].position < commit.last:
                    history = coming.popleft()
                    waiting[history.stream] = history
                # For messages at rest, the index has any later event that is further away.
                limit = commit.first - SCAN_POSITIONS
                waiting = {stream: each for stream, each in waiting.items() if not each.ends_before(limit)}
                if may_hold(commit, waiting):
                    for record in to_records(commit):
                        if record.stream in waiting:
                            waiting[record.stream].add(record)
                if not waiting and (not coming or coming[0].position > commit.last + SCAN_POSITIONS):
                    break
            else:
                return

    def _is_at_rest(self, sent: Record, latest: Event) -> bool:
        """Return whether the index has whatever follows the latest event of a message far from its first."""
        return ends_history(latest)


def ends_history(event: Event) -> bool:
    """Return whether an event is the last of its message, unless an operator redrives a dead letter."""
    return isinstance(event, _ENDS) or (isinstance(event, MessageSent) and event.due is None)


TAIL = 10_000
"""Positions of the log that are read while other commands wait, at most."""
COPIES = 500
"""Messages that one commit copies for a subscription, at most; it bounds the wait of senders."""
FIND_BYTES = 4 << 20
"""Size of the payloads after which `find_sent` stops."""


class FoundSent(NamedTuple):
    """Messages of the log, each after its position, and the position through which the log was read.

    `altered` are the positions of messages whose bytes were altered.
    """

    sent: list[tuple[int, MessageSent]]
    through: int
    altered: list[int]


def find_sent(
    log: EventLogReader,
    filter_: SubscriptionFilter,
    after: int,
    *,
    messages: int = COPIES,
    positions: int = TAIL,
) -> FoundSent:
    """Return the messages sent after a position that match a filter, with their envelopes, verified.

    Arguments:
        messages, positions: of the log, after which to stop; the last commit is read in full.
    """
    matches: list[int] = []
    through, size = after, 0
    try:
        for first, events in log.replay_runs(after):
            if len(matches) >= messages or size >= FIND_BYTES or first > after + positions:
                break
            through = first + len(events) - 1
            if type(events[0]) is MessageSent:
                for position, event in enumerate(events, first):
                    if isinstance(event, MessageSent) and filter_.covers(event):
                        matches.append(position)
                        size += event.size
    except BrokenLog:
        if through == after:
            raise
    records = log.at_positions(matches) if matches else {}
    intact = [
        (position, record.event)
        for position in matches
        if (record := records.get(position)) is not None
        and isinstance(record.event, MessageSent)
        and is_intact(record)
    ]
    readable = {position for position, _ in intact}
    return FoundSent(intact, through, [each for each in matches if each not in readable])
