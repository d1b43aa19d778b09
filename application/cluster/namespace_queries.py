"""Queries on a namespace: the answers of its mailboxes, merged (ADR 0063)."""

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

from postroom.application.cluster.namespace_members import FixedMembers, Members, NamespaceMembers
from postroom.application.cluster.namespace_merges import merge_backlogs, merge_subscriptions
from postroom.application.operations.mailbox import Mailbox
from postroom.application.operations.operation import Arguments, Operation
from postroom.application.page import Page, read_position
from postroom.application.ports.control_plane import NamespaceDirectory
from postroom.application.query_results import Backlog, DeadLetter, Moment, PeekedMessage
from postroom.application.reports import (
    SubscriptionReport,
)
from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from postroom.domain.namespace import RESERVED_TOPIC
from postroom.domain.search import Cursor, EventFilter, FoundMessage, Order

Place = tuple[int, int]
"""Sort key of results: timestamp of the message, and the number of its mailbox with its position."""


async def search_mailboxes(filter_: EventFilter, mailboxes: Sequence[Mailbox]) -> Page[FoundMessage]:
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
    return Page(tuple(item for _, item in page), None if is_last else Cursor(*page[-1][0]).encode())


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


T = TypeVar("T")
PLACE_BITS = 40
"""Bits of the position in the mailbox; the higher bits of a namespace's position number the mailbox."""


class NamespaceQueries:
    """The queries of `Mailbox` over the mailboxes of a namespace."""

    _directory: NamespaceDirectory
    _members: NamespaceMembers | FixedMembers
    _timeout: float

    async def _get_backlog(self, operation: Operation, arguments: Arguments) -> Backlog:
        """Return the unsettled messages of all mailboxes.

        Its position is the sum of the mailboxes' positions, its epoch the greatest of theirs.

        Raises: InvalidRequest for a position of a namespace with several mailboxes: only a time is the same
            moment in all of them.
        """
        await self._check_moment("at", arguments["at"])
        return merge_backlogs(
            self._directory.namespace,
            await self._ask_all(lambda mailbox: operation.ask(mailbox, arguments)),
        )

    async def _check_moment(self, name: str, moment: Moment | None) -> None:
        """Raise InvalidRequest for a position of a namespace with several mailboxes."""
        members = await self._get_members()
        if isinstance(moment, int) and len(members.names) > 1:
            raise InvalidRequest(
                f"The {len(members.names)} mailboxes of the namespace have no position in common; name a "
                f"time for {name}."
            )

    async def _list_dead_letters(self, operation: Operation, arguments: Arguments) -> Page[DeadLetter]:
        """Return a page of dead letters, oldest mailbox first.

        Their positions are of the namespace: 2^40 times the number of the mailbox, plus the position.
        """
        limit = arguments["limit"]
        number, position = divmod(read_position(arguments["cursor"]) or 0, 1 << PLACE_BITS)
        letters: list[DeadLetter] = []
        for place, name in enumerate((await self._get_members()).by_age):
            if place < number:
                continue
            own = {
                "limit": max(1, limit - len(letters)),  # of a full page, to know whether there are more
                "cursor": str(position) if place == number else None,
            }
            page: Page[DeadLetter] = await operation.ask(self._directory.mailbox(name), {**arguments, **own})
            letters += [
                msgspec.structs.replace(each, position=(place << PLACE_BITS) + each.position)
                for each in page.items
            ]
            if page.next_cursor is not None or len(letters) > limit:
                shown = tuple(letters[:limit])
                return Page(shown, str(shown[-1].position))
        return Page(tuple(letters))

    async def _peek_messages(self, operation: Operation, arguments: Arguments) -> list[PeekedMessage]:
        """Return ready messages of all mailboxes by send time."""
        pages: list[list[PeekedMessage]] = await self._ask_all(
            lambda mailbox: operation.ask(mailbox, arguments)
        )
        return list(heapq.merge(*pages, key=lambda peeked: peeked.sent_at))[: arguments["limit"]]

    async def _list_subscriptions(
        self, operation: Operation, arguments: Arguments
    ) -> list[SubscriptionReport]:
        """Return the subscriptions, each with the mailboxes that lack it or have another filter."""
        mailboxes = (await self._get_members()).by_age
        pages = (operation.ask(self._directory.mailbox(each), arguments) for each in mailboxes)
        return merge_subscriptions(mailboxes, await asyncio.gather(*pages))

    async def _search_messages(self, operation: Operation, arguments: Arguments) -> Page[FoundMessage]:
        """Return a page of the messages of all mailboxes that match.

        It takes no offset, and a filter that names a mailbox is answered by that one.
        """
        checked: EventFilter = arguments["filter_"]
        mailboxes = [self._directory.mailbox(name) for name in (await self._get_members()).by_age]
        if checked.mailbox is not None:
            mailboxes = [each for each in mailboxes if each.name == checked.mailbox]
            if not mailboxes:
                raise InvalidRequest(
                    f"The namespace {self._directory.namespace} has no mailbox {checked.mailbox[:80]!r}; "
                    "leave it out to search all."
                )
        return await search_mailboxes(checked, mailboxes)

    async def _get_members(self) -> Members:
        """Return the members; ask again while they can't be found, for the time of a call."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        while True:
            try:
                return await self._members.get()
            except Unavailable as error:
                pause = error.retry_after_ms / 1_000
                if loop.time() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)

    async def _ask_all(self, query: Callable[[Mailbox], Awaitable[T]]) -> list[T]:
        """Return the answers of all mailboxes, oldest mailbox first."""
        members = await self._get_members()
        return await asyncio.gather(*(query(self._directory.mailbox(name)) for name in members.by_age))

    async def _ask_any(self, query: Callable[[Mailbox], Awaitable[T]]) -> T:
        """Return the answer of the mailbox that has the requested object.

        Raises: Unavailable when none of those that answer has it, but one does not answer.
        """
        members = await self._get_members()
        answers = await asyncio.gather(
            *(query(self._directory.mailbox(name)) for name in members.by_age), return_exceptions=True
        )
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        for answer in answers:
            if not isinstance(answer, BaseException):
                return answer
        raise next((each for each in failures if not isinstance(each, NotFound)), failures[0])

    async def _at_each_that_has_it(
        self,
        call: Callable[[Mailbox], Awaitable[T]],
        ask_all: Callable[[Callable[[Mailbox], Awaitable[Any]]], Awaitable[list[Any]]],
    ) -> list[T]:
        """Return the answers of the mailboxes that have the requested object.

        Arguments:
            ask_all: calls all mailboxes.

        Raises: NotFound when none has it.
        """

        async def unless_missing(mailbox: Mailbox) -> T | NotFound:
            try:
                return await call(mailbox)
            except NotFound as refusal:
                return refusal

        answers: list[T | NotFound] = await ask_all(unless_missing)
        results = [each for each in answers if not isinstance(each, NotFound)]
        if not results:
            raise next(each for each in answers if isinstance(each, NotFound))
        return results
