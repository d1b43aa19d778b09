"""`BrowseLog`: pages of a log's events and commits, newest first, each with a bounded amount of reading."""

from typing import NamedTuple

from postroom.application.mailbox.fold import refuse_altered_records
from postroom.application.ports.event_log import EventLogReader, Head
from postroom.application.queries.read_events import EVERY_EVENT, EventFilter, LoggedEvent, ReadEvents
from postroom.domain.arguments import check_int
from postroom.domain.commit import GENESIS, POSITIONS_PER_MAILBOX, Commit, link
from postroom.domain.errors import NotFound
from postroom.domain.names import message_stream

MAX_LIMIT = 200
MAX_POSITION = POSITIONS_PER_MAILBOX - 1
POSITIONS_PER_PAGE = 5_000
"""Maximum number of positions of which the events are read for a page of those that match."""
LOOKUPS_PER_PAGE = 300
"""A page with so many messages whose sends were looked up, for their topics, reads no further positions."""
POSITIONS_PER_STEP = 200
"""Maximum number of positions that are read at once, and so of the lookups that exceed those of a page."""


class EventPage(NamedTuple):
    """Events that match, newest first.

    Arguments:
        first, last: the positions that were read for it; 0 when there were none.
        before: position before which the next page begins; None when no older events remain.
    """

    events: tuple[LoggedEvent, ...]
    first: int
    last: int
    before: int | None


class CommitLink(NamedTuple):
    """A commit, and whether its hash follows from that of the commit before it.

    Arguments:
        previous: chain hash of the commit before; None if retention removed that one.
        is_linked: whether the chain hash is that of the commit and of `previous`; None if that is unknown.
    """

    commit: Commit
    previous: bytes | None
    is_linked: bool | None


class CommitPage(NamedTuple):
    """Commits without envelopes, newest first; the next page begins before position `before`."""

    commits: tuple[CommitLink, ...]
    before: int | None


class BrowseLog:
    """Queries of a log for people who look through it; calls block.

    All raise BrokenLog for a commit that can't be read as it was written, and Unavailable when the log can't
    be read.
    """

    def __init__(self, log: EventLogReader) -> None:
        self._log = log

    def bounds(self) -> tuple[int, Head] | None:
        """Return the first position and the end of the log; None while it is empty."""
        first, head = self._log.first_position(), self._log.head()
        return None if first is None or head is None else (first, head)

    @refuse_altered_records
    def events(
        self,
        criteria: EventFilter = EVERY_EVENT,
        *,
        since: int | None = None,
        before: int | None = None,
        limit: int = 50,
    ) -> EventPage:
        """Return a page of the events that match, with at most `POSITIONS_PER_PAGE` positions read.

        It ends earlier where the events are of many messages that were sent long before.
        The events of one message are found by the index, so they are all read.

        Arguments:
            since: first position; None for that of the log.
            before: position after the last one; None for the end of the log.
            limit: maximum number of events, 1 to 200.
        """
        check_int("limit", limit, 1, MAX_LIMIT)
        bounds = self.bounds()
        if bounds is None:
            return EventPage((), 0, 0, None)
        first = max(bounds[0], since or 0)
        last = bounds[1].position if before is None else min(before - 1, bounds[1].position)
        if last < first:
            return EventPage((), 0, 0, None)
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
        return EventPage(tuple(events), begin, last, begin if begin > first else None)

    @refuse_altered_records
    def event(self, position: int) -> LoggedEvent:
        """Return the event at a position.

        Raises: NotFound when the log has no such position, or retention removed it.
        """
        check_int("The position", position, 1, MAX_POSITION)
        for each in ReadEvents(self._log)(after=position - 1, through=position):
            if each.record.position == position:
                return each
        raise self._absent(position)

    @refuse_altered_records
    def commits(self, *, before: int | None = None, limit: int = 50) -> CommitPage:
        """Return a page of commits, each with its link.

        Arguments:
            before: position after the last one of the first commit; None for the end of the log.
            limit: maximum number of commits, 1 to 200.
        """
        check_int("limit", limit, 1, MAX_LIMIT)
        bounds = self.bounds()
        if bounds is None:
            return CommitPage((), None)
        last = bounds[1].position if before is None else min(before - 1, bounds[1].position)
        links: list[CommitLink] = []
        commit = self._commit_of(last)
        while commit is not None and len(links) < limit:
            previous = self._commit_of(commit.first - 1)
            links.append(_link_of(commit, previous))
            commit = previous
        return CommitPage(tuple(links), None if commit is None else links[-1].commit.first)

    @refuse_altered_records
    def commit(self, position: int) -> CommitLink:
        """Return the commit that holds a position, with its envelopes.

        Raises: NotFound when the log has no such position, or retention removed it.
        """
        check_int("The position", position, 1, MAX_POSITION)
        commit = next(iter(self._log.commits_of([position])), None)
        if commit is None:
            raise self._absent(position)
        return _link_of(commit, self._commit_of(commit.first - 1))

    def position_after(self, at: int) -> int:
        """Return the first position written at or after log time `at` (µs), or the one after the end."""
        return self._log.position_before(at) + 1

    def _events_of_message(self, criteria: EventFilter, first: int, last: int, limit: int) -> EventPage:
        stream = message_stream(self._log.mailbox, criteria.message_id)
        read = ReadEvents(self._log)
        events: list[LoggedEvent] = []
        positions = [each.position for each in self._log.read_streams([stream]).get(stream, ())]
        for position in sorted(positions, reverse=True):
            if first <= position <= last:
                events += read(criteria, position - 1, position)
            if len(events) > limit:
                break
        page = events[:limit]
        more = page[-1].record.position if len(events) > limit else None
        return EventPage(tuple(page), first if more is None else more, last, more)

    def _commit_of(self, position: int) -> Commit | None:
        return next(iter(self._log.commits_of([position], envelopes=False)), None)

    def _absent(self, position: int) -> NotFound:
        bounds = self.bounds()
        if bounds is None:
            return NotFound(f"The log of {self._log.mailbox} is empty, so it has no position {position}.")
        first, head = bounds
        return NotFound(
            f"The log of {self._log.mailbox} has the positions {first} to {head.position}, and not "
            f"{position}; name one of these."
        )


def _link_of(commit: Commit, previous: Commit | None) -> CommitLink:
    chain = previous.chain if previous is not None else GENESIS if commit.first == 1 else None
    if chain is None:
        return CommitLink(commit, None, None)
    return CommitLink(commit, chain, link(chain, *commit[:4], commit.events) == commit.chain)
