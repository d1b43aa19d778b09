"""`TailLog`: messages that are sent, or events of messages, as they are appended to a log."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count, islice, repeat
from operator import itemgetter
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from postroom.application.mailbox.codec import decode_envelopes, decode_runs, to_records
from postroom.application.mailbox.event_columns import (
    AckedRun,
    AnyRun,
    DeadLetteredRun,
    ExpiredRun,
    RequeuedRun,
    SentRun,
)
from postroom.application.mailbox.stored_snapshots import refuse_altered_records
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.get_message import message_item
from postroom.application.queries.read_events import LoggedEvent
from postroom.domain.commit import Commit, expand
from postroom.domain.message import MessageSent, Status
from postroom.domain.names import message_id
from postroom.domain.search import BodyRules, EventFilter, FoundMessage, topic_matches

Show = Literal["messages", "events", "failures"]
"""Which events: those that send a message, all of messages, or failed deliveries and dead-letterings."""
SHOWN: Final[tuple[Show, ...]] = get_args(Show)
MAX_BEHIND: Final = 50_000
"""Number of positions that a step reads; of more, the oldest are skipped."""
MAX_COMPARED: Final = 5_000
"""Messages that a step compares with criteria other than topics before it ends."""
COST_OF_WORDS: Final = 20
"""Comparisons that a search for the words of a message counts as."""
MAX_LOOKUPS: Final = 100
"""Messages sent before that a step looks up."""
MAX_REMEMBERED: Final = 20_000
"""Messages, and topics, of which it is remembered whether they match."""
_ANY_BODY: Final = BodyRules(("*",))


class TailStep(NamedTuple):
    """What a step read of a log.

    Arguments:
        events: the latest that match, newest first.
        last: position through which the log was read.
        first: first position that was read; 0 if nothing was.
        skipped: number of positions before `first` that were not read, as the log was too far ahead or
            retention removed them.
        omitted: number of other events of the step that match, which are older.
        unknown: number of events that may match, as their messages were too many to be looked up.
    """

    events: tuple[LoggedEvent, ...]
    last: int
    first: int = 0
    skipped: int = 0
    omitted: int = 0
    unknown: int = 0


class _Matches:
    """The events of a step that match: their number, and the commits of the latest by position.

    Arguments:
        unknown: of the latest events whose messages are not known: position, stream and commit.
        unknown_count: number of all such events.
    """

    def __init__(self, limit: int) -> None:
        self.count = self.unknown_count = 0
        self.latest: deque[tuple[int, Commit]] = deque(maxlen=limit)
        self.unknown: deque[tuple[int, bytes, Commit]] = deque(maxlen=MAX_LOOKUPS)

    def add(self, position: int, commit: Commit) -> None:
        self.count += 1
        self.latest.append((position, commit))


class TailLog:
    """A query for what is new in a log, step by step.

    A step reads a bounded part, and compares the columns of commits: only the events that it returns are
    decoded in full. Envelopes are read if the criteria have words.

    Arguments:
        filter_: criteria of the messages, without statuses and times; its mailbox and paging do not count.
    """

    def __init__(self, log: EventLogReader, filter_: EventFilter, show: Show) -> None:
        self._log = log
        self._filter = msgspec.structs.replace(filter_, mailbox=None)
        self._show = show
        self._compares = msgspec.structs.replace(self._filter, topics=()) != EventFilter(limit=filter_.limit)
        self._comparisons = 0
        self._topics: dict[str, bool] = {}
        self._matching: dict[bytes, bool] = {}
        """Whether each message matches, until the tail has read its end."""

    @refuse_altered_records
    def __call__(self, after: int, limit: int) -> TailStep:
        """Read the log after a position.

        Arguments:
            limit: number of events to return at most, the latest that match.

        Raises: BrokenLog for a commit that was altered, and Unavailable if the log can't be read.
        """
        head, first = self._log.head(), self._log.first_position()
        if head is None or first is None or head.position <= after:
            return TailStep((), min(after, 0 if head is None else head.position))
        start = max(after, head.position - MAX_BEHIND, first - 1)
        matches, last, self._comparisons = _Matches(limit), start, 0
        for commit in self._log.commits(start, envelopes=self._filter.match is not None):
            self._read(commit, start, matches)
            last = commit.last
            if last >= head.position or self._comparisons >= MAX_COMPARED:
                break
        if self._filter.match is not None:
            matches.unknown.clear()  # their payloads are not at hand
        unknown = matches.unknown_count - len(matches.unknown)
        self._look_up(matches)
        events = self._describe(matches)
        return TailStep(events, last, start + 1, start - after, matches.count - len(events), unknown)

    def _read(self, commit: Commit, after: int, matches: _Matches) -> None:
        """Add the events of a commit that match, and those whose messages are not known."""
        runs = decode_runs(commit)
        envelopes = decode_envelopes(commit, sum(run.count for run in runs if type(run) is SentRun))
        position = commit.first
        for run in runs:
            if type(run) is SentRun:
                own = islice(envelopes, run.count)
                self._read_sent(run, commit, position, after, matches, own)
            elif self._show != "messages" and run.event.__name__.startswith("Message"):
                self._read_later(run, commit, position, after, matches)
            position += run.count

    def _read_sent(
        self,
        run: SentRun,
        commit: Commit,
        position: int,
        after: int,
        matches: _Matches,
        envelopes: Iterator[bytes],
    ) -> None:
        is_match: Iterable[bool]
        if self._compares:
            self._comparisons += run.count * (1 if self._filter.match is None else COST_OF_WORDS)
            sent = run.events(commit.at, envelopes)
            is_match = [isinstance(each, MessageSent) and self._matches(each) for each in sent]
        elif type(run.topics) is str:
            is_match = repeat(self._covers(run.topics), run.count)
        else:
            is_match = map(self._covers, expand(run.topics, run.count))
        for at, stream, each in zip(count(position), run.stream_ids(), is_match, strict=False):
            if self._show != "messages":
                self._remember(stream, is_match=each)
            if each and at > after and self._show != "failures":
                matches.add(at, commit)

    def _read_later(self, run: AnyRun, commit: Commit, position: int, after: int, matches: _Matches) -> None:
        is_shown = self._show == "events" or isinstance(run, RequeuedRun | DeadLetteredRun)
        is_end = isinstance(run, AckedRun | ExpiredRun)
        takes_all = not self._compares and not self._filter.topics
        reasons = expand(run.reasons, run.count) if isinstance(run, RequeuedRun) else repeat("")
        for at, stream, reason in zip(count(position), run.stream_ids(), reasons, strict=False):
            is_match = self._matching.pop(stream, None) if is_end else self._matching.get(stream)
            if not is_shown or at <= after or (reason == "released" and self._show == "failures"):
                continue
            if takes_all or is_match:
                matches.add(at, commit)
            elif is_match is None:
                matches.unknown_count += 1
                matches.unknown.append((at, stream, commit))

    def _look_up(self, matches: _Matches) -> None:
        """Add the events that match of those whose messages are not known."""
        sent = self._first_events({stream for _, stream, _ in matches.unknown})
        for stream, each in sent.items():
            self._remember(stream, is_match=self._matches(each))
        matching = [(at, commit) for at, stream, commit in matches.unknown if self._matching.get(stream)]
        if matching:
            matches.count += len(matching)
            latest = sorted([*matches.latest, *matching], key=itemgetter(0))
            matches.latest.clear()
            matches.latest.extend(latest)

    def _describe(self, matches: _Matches) -> tuple[LoggedEvent, ...]:
        """Return the latest events that match, newest first."""
        positions = {at for at, _ in matches.latest}
        commits = {commit.first: commit for _, commit in matches.latest}
        records = [each for commit in commits.values() for each in to_records(commit)]
        shown = sorted((each for each in records if each.position in positions), reverse=True)
        sent = {each.stream: each.event for each in shown if isinstance(each.event, MessageSent)}
        sent |= self._first_events({each.stream for each in shown} - sent.keys())
        events = []
        for record in shown:
            first = sent.get(record.stream)
            id_ = None if first is None else message_id(first.stream, first.headers.message_id)
            events.append(LoggedEvent(record, None if first is None else first.topic, id_))
        return tuple(events)

    def _first_events(self, streams: set[bytes]) -> dict[bytes, MessageSent]:
        """Return the first events of messages; none of those that retention removed."""
        events = self._log.replay_first(streams) if streams else ()
        return {each.stream: each for each in events if isinstance(each, MessageSent)}

    def _covers(self, topic: str) -> bool:
        """Return whether a topic matches."""
        is_match = self._topics.get(topic)
        if is_match is None:
            patterns = self._filter.topics
            is_match = not patterns or any(topic_matches(each, topic) for each in patterns)
            if len(self._topics) >= MAX_REMEMBERED:
                self._topics.clear()
            self._topics[topic] = is_match
        return is_match

    def _matches(self, sent: MessageSent) -> bool:
        """Return whether a message matches all criteria."""
        if not self._covers(sent.topic) or not self._compares:
            return self._covers(sent.topic)
        return self._filter.matches(message_when_sent(self._log.mailbox, 0, sent), _ANY_BODY)

    def _remember(self, stream: bytes, *, is_match: bool) -> None:
        if len(self._matching) >= MAX_REMEMBERED:
            del self._matching[next(iter(self._matching))]
        self._matching[stream] = is_match


def message_when_sent(mailbox: str, position: int, sent: MessageSent) -> FoundMessage:
    """Return a message as a search finds it before its first delivery."""
    item = message_item(sent)
    fields = {name: getattr(item, name) for name in item.__struct_fields__}
    return FoundMessage(
        **fields, mailbox=mailbox, position=position, status=Status.READY, attempts=0, shard=sent.shard
    )
