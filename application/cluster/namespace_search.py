"""Searches of a namespace: the results of its mailboxes, merged by time (ADR 0063)."""

import asyncio
import heapq
from collections.abc import Iterable, Sequence
from itertools import islice

import msgspec

from postroom.application.operations.mailbox import Mailbox
from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.domain.errors import InvalidRequest
from postroom.domain.namespace.members import RESERVED_TOPIC
from postroom.domain.search import Cursor, EventFilter, FoundMessage, Order, SearchPage

Place = tuple[int, int]
"""Timestamp of a message, and the number of its mailbox with its position: the order of results."""


async def search_mailboxes(filter_: EventFilter, mailboxes: Sequence[Mailbox]) -> SearchPage:
    """Return a page of the messages of several mailboxes, as if they were one.

    Arguments:
        mailboxes: in the order of their age, which tells messages of the same time apart in a cursor.

    Raises: InvalidRequest for an offset; as `Mailbox.search_messages`.
    """
    if filter_.offset and len(mailboxes) > 1:
        raise InvalidRequest("A search of a namespace takes no offset; use next_cursor of the previous page.")
    newest_first = filter_.order == Order.NEWEST_FIRST
    results = await asyncio.gather(
        *(_search(filter_, number, mailbox) for number, mailbox in enumerate(mailboxes))
    )
    merged: Iterable[tuple[Place, FoundMessage]] = heapq.merge(
        *results, key=lambda each: each[0], reverse=newest_first
    )
    page = [*islice(merged, filter_.limit)]
    is_last = sum(map(len, results)) == len(page)
    return SearchPage(tuple(item for _, item in page), None if is_last else Cursor(*page[-1][0]).encode())


async def _search(filter_: EventFilter, number: int, mailbox: Mailbox) -> list[tuple[Place, FoundMessage]]:
    """Return results of one mailbox after the cursor, more than the limit if there are so many."""
    newest_first = filter_.order == Order.NEWEST_FIRST
    after = None if filter_.after is None else (filter_.after.timestamp, filter_.after.id)
    rest = msgspec.structs.replace(filter_, cursor=None)
    if after is not None:  # others of the same time may follow, so the bound includes it
        rest = _limit_time(rest, after[0])
    results: list[tuple[Place, FoundMessage]] = []
    while True:
        page = await mailbox.search_messages(rest)
        places = ((each.timestamp, number * POSITIONS_PER_MAILBOX + each.position) for each in page.items)
        results += [
            (place, item)
            for place, item in zip(places, page.items, strict=True)
            if (after is None or (place < after if newest_first else place > after))
            and item.topic != RESERVED_TOPIC
        ]
        if page.next_cursor is None or len(results) > filter_.limit:
            return results
        rest = msgspec.structs.replace(rest, cursor=page.next_cursor, offset=0)


def _limit_time(filter_: EventFilter, time: int) -> EventFilter:
    """Return a filter of the messages from `time` on, in its order."""
    if filter_.order == Order.NEWEST_FIRST:
        end = time if filter_.end_time is None else min(time, filter_.end_time)
        return msgspec.structs.replace(filter_, end_time=end)
    start = time if filter_.start_time is None else max(time, filter_.start_time)
    return msgspec.structs.replace(filter_, start_time=start)
