"""A search as of a past moment: the messages of the read models with their statuses from the log."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import msgspec

from postroom.application.mailbox.stored_snapshots import fold_message
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.mailbox_past import to_us
from postroom.application.query_results import Moment
from postroom.application.service import Search
from postroom.domain.arguments import MAX_PAGE, check_int
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.message import MS, Message, MessageSent, Status
from postroom.domain.record import Record
from postroom.domain.search import EventFilter, FoundMessage

MAX_READ = 2_000
"""Messages whose events are read for a page."""
CHUNK = 250
"""Messages that are searched, and whose events are read, first; more later, as few of these matched."""
CLOCK_SKEW_MS = 300_000
"""How far the clock of a sender may be ahead of the log: messages published later are not looked at."""


class PastMoment(msgspec.Struct, frozen=True):
    """A moment of a log.

    Arguments:
        position: last position that counts.
        at: log time of that position, or the time that was asked for, µs.
    """

    position: int
    at: int


class PastPage(msgspec.Struct, frozen=True):
    """A page of the messages of a search as of a moment.

    Arguments:
        items: with the status and the attempts that they had.
        count: number of messages whose events were read.
        unknown: number of messages that are left out because retention removed their events.
        is_partial: whether the page ends because enough events were read, not because it is full.
    """

    items: tuple[FoundMessage, ...]
    moment: PastMoment
    count: int
    unknown: int
    is_partial: bool
    next_cursor: str | None


class SearchPast:
    """A search as of a past moment.

    Headers and content of a message never change, so the read models tell which messages match apart from
    their statuses. The status of each is folded from its events up to that moment.

    Arguments:
        search: searches the messages that the caller may see.
        log: the log of the mailbox.
        now: the wall clock, µs.
    """

    def __init__(self, search: Search, log: EventLogReader, now: Callable[[], int]) -> None:
        self._search = search
        self._log = log
        self._now = now

    async def __call__(self, filter_: EventFilter, at: Moment) -> PastPage:
        """Return a page of the messages that matched at a moment.

        Raises: InvalidRequest for a moment in the future, NotFound for one that retention removed; the errors
            of the search.
        """
        moment = await asyncio.to_thread(find_moment, self._log, at, self._now())
        rest = _until(filter_, moment.at // MS + CLOCK_SKEW_MS)
        items: list[FoundMessage] = []
        count = unknown = 0
        while rest is not None:
            page = await self._search(rest)
            sent = [each for each in page.items if each.position <= moment.position]
            states = await asyncio.to_thread(self._states, sent, moment.position)
            count += len(sent)
            for each in sent:
                state = states.get(each.position)
                if state is None:
                    unknown += 1
                elif not filter_.statuses or state.status in filter_.statuses:
                    items.append(_as_of(each, state))
            if len(items) > filter_.limit:
                items = items[: filter_.limit]
                places = [each.position for each in page.items]
                shorter = msgspec.structs.replace(rest, limit=places.index(items[-1].position) + 1)
                cursor = (await self._search(shorter)).next_cursor
                return PastPage(tuple(items), moment, count, unknown, False, cursor)
            if page.next_cursor is None:
                break
            more = min(MAX_PAGE, max(1, MAX_READ - count))
            rest = msgspec.structs.replace(rest, cursor=page.next_cursor, limit=more)
            if len(items) == filter_.limit or count >= MAX_READ:
                is_partial = len(items) < filter_.limit
                return PastPage(tuple(items), moment, count, unknown, is_partial, rest.cursor)
        return PastPage(tuple(items), moment, count, unknown, False, None)

    def _states(self, messages: Sequence[FoundMessage], position: int) -> Mapping[int, Message]:
        """Return the states that messages had at a position, by the positions of their sends."""
        sends = self._log.at_positions([each.position for each in messages], envelopes=False)
        records = self._log.read_streams({each.stream for each in sends.values()})
        states: dict[int, Message] = {}
        for start, send in sends.items():
            state = fold_message(_life(records.get(send.stream, ()), start, position))
            if state is not None:
                states[start] = state
        return states


def find_moment(log: EventLogReader, at: Moment, now: int) -> PastMoment:
    """Return a moment of a log.

    Arguments:
        now: the wall clock, µs.

    Raises: InvalidRequest for one in the future, NotFound for one that retention removed.
    """
    head = log.head()
    last, end = (0, 0) if head is None else (head.position, head.at)
    if isinstance(at, datetime):
        time = to_us(at)
        if time > max(now, end):
            raise InvalidRequest(f"{rfc3339(time)} is in the future; pass a time in the past.")
        position = last if time >= end else log.position_before(time + 1)
    else:
        position = check_int("at", at)
        if position > last:
            raise InvalidRequest(f"The log ends at position {last:,}; it has no position {position:,} yet.")
        record = log.at_positions([position], envelopes=False).get(position)
        time = 0 if record is None else record.at
    first = log.first_position() or 1
    if position < first - 1 or (position == first - 1 and first > 1):
        raise NotFound(
            f"Retention removed the events before position {first:,}, so what was at {_write(at)} is unknown."
        )
    return PastMoment(position, time)


def _write(at: Moment) -> str:
    return f"position {at:,}" if isinstance(at, int) else rfc3339(to_us(at)) or ""


def _until(filter_: EventFilter, time: int) -> EventFilter | None:
    """Return the search for all statuses up to a time, or None if it matches nothing."""
    if filter_.start_time is not None and filter_.start_time > time:
        return None
    end = time if filter_.end_time is None else min(filter_.end_time, time)
    limit = max(filter_.limit, CHUNK)
    return msgspec.structs.replace(filter_, statuses=(), end_time=end, limit=limit, envelopes=False)


def _life(records: Sequence[Record], start: int, end: int) -> list[Record]:
    """Return the records of a message from its send on, up to a position; its id may have been sent again."""
    life: list[Record] = []
    for each in records:
        if start <= each.position <= end:
            if life and isinstance(each.event, MessageSent):
                break
            life.append(each)
    return life


def _as_of(message: FoundMessage, state: Message) -> FoundMessage:
    return msgspec.structs.replace(message, status=Status(state.status), attempts=state.attempt)
