"""`BrowseLog`: pages of a log's events and commits, newest first, each with a bounded amount of reading."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from postroom.application.mailbox.stored_snapshots import refuse_altered_records
from postroom.application.messages import rfc3339
from postroom.application.page import Page, read_position
from postroom.application.ports.event_log import EventLogReader, Head
from postroom.application.queries.get_message import MAX_SAME_IDS, streams_with_id
from postroom.application.queries.read_events import EVERY_EVENT, EventFilter, LoggedEvent, ReadEvents
from postroom.domain.arguments import check_int
from postroom.domain.commit import GENESIS, POSITIONS_PER_MAILBOX, Commit, link
from postroom.domain.errors import NotFound
from postroom.domain.message import MessageSent
from postroom.domain.names import STREAM_BYTES, message_id, topic_streams

MAX_LIMIT = 200
MAX_POSITION = POSITIONS_PER_MAILBOX - 1
POSITIONS_PER_PAGE = 5_000
"""Maximum number of positions that are searched for a page of events."""
LOOKUPS_PER_PAGE = 300
"""Maximum number of messages whose topics are looked up for a page, before it ends early."""
POSITIONS_PER_STEP = 200
"""Maximum number of positions that are read at once, and of lookups beyond `LOOKUPS_PER_PAGE`."""


class EventPage(Page[LoggedEvent], frozen=True):
    """Page of matching events, newest first.

    Arguments:
        first, last: the positions that were searched; 0 if the log has none.
    """

    first: int = 0
    last: int = 0


class CommitLink(NamedTuple):
    """A commit, and whether its chain hash matches the previous commit.

    Arguments:
        previous: chain hash of the previous commit; None if retention removed it.
        is_linked: whether the chain hash matches the commit and `previous`; None if `previous` is None.
    """

    commit: Commit
    previous: bytes | None
    is_linked: bool | None


def missing_position(log: EventLogReader, position: int) -> NotFound:
    """Return the error for a position that a log does not have."""
    first, head = log.first_position(), log.head()
    extent = "is empty" if head is None else f"has positions {first} to {head.position}"
    return NotFound(f"The log of mailbox {log.mailbox} has no position {position}; it {extent}.")


class BrowseLog:
    """Queries of pages of a log; calls block.

    All raise BrokenLog for a commit that was altered, and Unavailable if the log can't be read.
    """

    def __init__(self, log: EventLogReader) -> None:
        self._log = log

    def bounds(self) -> tuple[int, Head] | None:
        """Return the first position and the head of the log, or None if it is empty."""
        first, head = self._log.first_position(), self._log.head()
        return None if first is None or head is None else (first, head)

    @refuse_altered_records
    def events(
        self,
        criteria: EventFilter = EVERY_EVENT,
        *,
        since: int | None = None,
        before: int | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> EventPage:
        """Return a page of matching events, after searching at most `POSITIONS_PER_PAGE` positions.

        The page ends earlier if its events belong to many messages that were sent long before. The events of
        a single message are read through the index, without a limit of positions.

        Arguments:
            since: first position; None for the first of the log.
            before: position after the last one; None for the end of the log.
            cursor: `next_cursor` of the previous page.
            limit: maximum number of events, 1 to 200.
        """
        check_int("limit", limit, 1, MAX_LIMIT)
        bounds = self.bounds()
        if bounds is None:
            return EventPage(())
        first, last = max(bounds[0], since or 0), _last(bounds[1], before, cursor)
        if last < first:
            return EventPage(())
        if criteria.message_id is not None:
            return self._events_of_message(criteria, first, last, limit)
        read, events = ReadEvents(self._log), list[LoggedEvent]()
        end, step, begin = last, min(2 * limit, POSITIONS_PER_STEP), last + 1
        oldest = max(first, last - POSITIONS_PER_PAGE + 1)
        while end >= oldest and len(events) < limit and read.lookups < LOOKUPS_PER_PAGE:
            begin = max(oldest, end - step + 1)
            events += reversed(list(read(criteria, begin - 1, end)))
            end, step = begin - 1, min(2 * step, POSITIONS_PER_STEP)
        if len(events) > limit:
            del events[limit:]
        if len(events) == limit:
            begin = events[-1].record.position
        return EventPage(tuple(events), str(begin) if begin > first else None, begin, last)

    @refuse_altered_records
    def event(self, position: int) -> LoggedEvent:
        """Return the event at a position.

        Raises: NotFound if the log has no such position, or retention removed it.
        """
        check_int("The position", position, 1, MAX_POSITION)
        for each in ReadEvents(self._log)(after=position - 1, through=position):
            if each.record.position == position:
                return each
        raise missing_position(self._log, position)

    @refuse_altered_records
    def commits(
        self, *, before: int | None = None, cursor: str | None = None, limit: int = 50
    ) -> Page[CommitLink]:
        """Return a page of commits without envelopes, newest first, each with its link.

        Arguments:
            before: position after the last one of the first commit; None for the end of the log.
            cursor: `next_cursor` of the previous page.
            limit: maximum number of commits, 1 to 200.
        """
        check_int("limit", limit, 1, MAX_LIMIT)
        bounds = self.bounds()
        if bounds is None:
            return Page(())
        links: list[CommitLink] = []
        commit = self._commit_of(_last(bounds[1], before, cursor))
        while commit is not None and len(links) < limit:
            previous = self._commit_of(commit.first - 1)
            links.append(_link_of(commit, previous))
            commit = previous
        return Page(tuple(links), None if commit is None else str(links[-1].commit.first))

    @refuse_altered_records
    def commit(self, position: int) -> CommitLink:
        """Return the commit that holds a position, with its envelopes.

        Raises: NotFound if the log has no such position, or retention removed it.
        """
        check_int("The position", position, 1, MAX_POSITION)
        commit = next(iter(self._log.commits_of([position])), None)
        if commit is None:
            raise missing_position(self._log, position)
        return _link_of(commit, self._commit_of(commit.first - 1))

    def position_after(self, at: int) -> int:
        """Return the first position written at or after log time `at` (µs), or the one after the end."""
        return self._log.position_before(at) + 1

    def _events_of_message(self, criteria: EventFilter, first: int, last: int, limit: int) -> EventPage:
        streams = list(streams_with_id(self._log, criteria.message_id or ""))
        read = ReadEvents(self._log)
        events: list[LoggedEvent] = []
        histories = self._log.read_streams(streams)
        positions = [each.position for stream in streams for each in histories.get(stream, ())]
        for position in sorted(positions, reverse=True):
            if first <= position <= last:
                events += read(criteria, position - 1, position)
            if len(events) > limit:
                break
        page = events[:limit]
        if len(events) <= limit:
            return EventPage(tuple(page), None, first, last)
        begin = page[-1].record.position
        return EventPage(tuple(page), str(begin), begin, last)

    def _commit_of(self, position: int) -> Commit | None:
        return next(iter(self._log.commits_of([position], envelopes=False)), None)


def _last(head: Head, before: int | None, cursor: str | None) -> int:
    """Return the last position of a page."""
    ends = (before, read_position(cursor))
    return min([head.position, *(each - 1 for each in ends if each is not None)])


def _link_of(commit: Commit, previous: Commit | None) -> CommitLink:
    chain = previous.chain if previous is not None else GENESIS if commit.first == 1 else None
    if chain is None:
        return CommitLink(commit, None, None)
    return CommitLink(commit, chain, link(chain, *commit[:4], commit.events) == commit.chain)


MIN_PREFIX_DIGITS = 4
_PREFIX = re.compile(r"[0-9a-f]{1,8}(-[0-9a-f]{0,4}){0,3}(-[0-9a-f]{0,12})?\Z")
_DASHES = (8, 13, 18, 23)


class MessageCandidate(NamedTuple):
    """A message whose id begins with a prefix."""

    message_id: str
    topic: str
    sent_at: str


class FindMessageIds:
    """A query for the messages whose UUID begins with a prefix; other ids must be named in full."""

    def __init__(self, log: EventLogReader) -> None:
        self._log = log

    def __call__(self, prefix: str, limit: int) -> list[MessageCandidate]:
        """Return up to `limit` messages, in the order of their ids.

        Arguments:
            prefix: at least four hexadecimal digits, with the dashes of a UUID; others match nothing.
        """
        digits = prefix.replace("-", "")
        if not is_prefix(prefix) or len(digits) < MIN_PREFIX_DIGITS:
            return []
        first = bytes.fromhex(digits.ljust(2 * STREAM_BYTES, "0"))
        last = bytes.fromhex(digits.ljust(2 * STREAM_BYTES, "f"))
        candidates = list(self._candidates(prefix, self._log.streams_between(first, last, limit)))
        if len(digits) > STREAM_BYTES:  # an id of a topic and its stream have only the first half in common
            others = self._log.streams_between(*topic_streams(first), MAX_SAME_IDS)
            candidates += self._candidates(prefix, others)
        return sorted(set(candidates))[:limit]

    def _candidates(self, prefix: str, streams: Sequence[bytes]) -> Iterator[MessageCandidate]:
        for sent in self._log.replay_first(streams):
            if isinstance(sent, MessageSent):
                id_ = message_id(sent.stream, sent.headers.message_id)
                if id_.startswith(prefix):
                    yield MessageCandidate(id_, sent.topic, rfc3339(sent.at) or "")


def is_prefix(text: str) -> bool:
    """Return whether a text is the beginning of a UUID as it is printed."""
    return bool(_PREFIX.match(text)) and all(
        (character == "-") == (index in _DASHES) for index, character in enumerate(text)
    )
