"""Searches and queries of the read models as the bearer of one capability may make them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import msgspec

from postroom.application.access.audit import Auditor
from postroom.application.access.guard import Guard
from postroom.application.page import Page
from postroom.application.ports.dead_letters import DeadLetterFilter
from postroom.application.ports.facets import BARS, Facets, SuggestionField, Timeline
from postroom.application.ports.read_models import ExportOptions, ExportPart, SearchQueries
from postroom.application.service import Search, Session
from postroom.domain.arguments import check_type
from postroom.domain.capability.access import uncovered_topic
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden
from postroom.domain.search import EventFilter, FoundMessage

PAGING = ("limit", "offset", "cursor", "order", "mailbox", "envelopes")
"""Fields of a filter that are not criteria."""


class AuthorizedSearch:
    """Search of the messages of one mailbox (RFC-037 `QueryEvents`); each is audited.

    A capability that is limited to topics must name topics, or globs, that it covers. Words are searched in
    payloads, too, so `match` needs the right to read them. Without that right, answers have no envelopes.
    """

    def __init__(self, search: Search, guard: Guard, auditor: Auditor) -> None:
        self._search = search
        self._guard = guard
        self._auditor = auditor

    async def __call__(self, filter_: EventFilter) -> Page[FoundMessage]:
        """Return a page of the messages that match.

        Raises: Unauthenticated, Forbidden, Saturated; the errors of the search.
        """
        check_type("The filter", filter_, EventFilter)
        return await self._auditor.run(
            Right.READ_HEADERS,
            lambda: self._run(filter_),
            lambda page: len(page.items),
            topics=filter_.topics,
            target=filter_.message_id or "",
            criteria=criteria_of(filter_),
        )

    async def _run(self, filter_: EventFilter) -> Page[FoundMessage]:
        guard = self._guard
        own = await check_filter(guard, filter_)
        may_read = filter_.envelopes and guard.permits(Right.READ_PAYLOAD)
        limit = guard.at_most(filter_.limit)
        page = await self._search(msgspec.structs.replace(own, limit=limit, envelopes=may_read))
        if not may_read:  # a search of unsettled messages has them at hand
            items = tuple(msgspec.structs.replace(each, envelope_blob=b"") for each in page.items)
            return msgspec.structs.replace(page, items=items)
        guard.count_bytes(len(each.envelope_blob) for each in page.items)
        return page


async def check_filter(guard: Guard, filter_: EventFilter) -> EventFilter:
    """Return a filter of the messages of the mailbox that a capability may search; count the call.

    Raises: Unauthenticated, Forbidden, Saturated.
    """
    await guard.check(Right.READ_HEADERS)
    if filter_.mailbox not in (None, guard.mailbox):
        raise Forbidden(f"This server searches the mailbox {guard.mailbox}; ask another server.", "mailbox")
    if filter_.match is not None:
        guard.check_operation(Right.READ_PAYLOAD)
    if not filter_.topics:
        guard.check_all_topics()
    # The text of a glob is covered only if everything that it matches is.
    guard.check_topics(filter_.topics)
    guard.charge()
    return msgspec.structs.replace(filter_, mailbox=guard.mailbox)


def criteria_of(filter_: EventFilter) -> list[str]:
    """Return the names of the fields that are criteria, for the audit log."""
    return [
        name
        for name, value in msgspec.structs.asdict(filter_).items()
        if name not in PAGING and value not in (None, (), {})
    ]


T = TypeVar("T")
READ_HEADERS, READ_PAYLOAD = Right.READ_HEADERS, Right.READ_PAYLOAD


class AuthorizedSearchQueries(SearchQueries):
    """Facets, timelines, suggestions and exports under the rules of `AuthorizedSearch`; each is audited."""

    def __init__(self, queries: SearchQueries, guard: Guard, auditor: Auditor) -> None:
        self._queries = queries
        self._guard = guard
        self._auditor = auditor

    async def facets(self, filter_: EventFilter, /) -> Facets:
        return await self._count(filter_, "facets", self._queries.facets, lambda facets: facets.messages)

    async def timeline(self, filter_: EventFilter, bars: int = BARS, /) -> Timeline:

        async def read(own: EventFilter) -> Timeline:
            return await self._queries.timeline(own, bars)

        return await self._count(filter_, "timeline", read, lambda timeline: sum(timeline.counts))

    async def search_unsettled(self, filter_: EventFilter, /) -> Page[FoundMessage]:
        return await AuthorizedSearch(self._queries.search_unsettled, self._guard, self._auditor)(filter_)

    async def suggest(
        self, field: SuggestionField, start: str, /, *, covers: Callable[[str], bool] = lambda value: True
    ) -> tuple[str, ...]:
        """Return values of a field; see `SearchQueries.suggest`.

        A capability that is limited to topics gets only the topics that it covers, and no other values.
        """
        guard = self._guard

        async def read() -> tuple[str, ...]:
            await guard.check(READ_HEADERS)
            if field != SuggestionField.TOPIC:
                guard.check_all_topics()
            guard.charge()
            if field != SuggestionField.TOPIC:
                return await self._queries.suggest(field, start, covers=covers)
            # Filtered by the query itself, as topics that are not covered would fill the answer.
            return await self._queries.suggest(field, start, covers=guard.covers)

        return await self._auditor.run(READ_HEADERS, read, lambda _: 0, criteria=["suggestions", str(field)])

    @asynccontextmanager
    async def export(
        self, filter_: EventFilter, options: ExportOptions, /
    ) -> AsyncIterator[AsyncIterator[ExportPart]]:
        """Read all matching messages; see `SearchQueries.export`.

        Two entries of the audit log record an export: one before it begins, and one with its size.

        Raises: Unauthenticated between parts when the capability is no longer valid.
        """
        check_type("The filter", filter_, EventFilter)
        check_type("The options", options, ExportOptions)
        guard, operation = self._guard, READ_PAYLOAD if options.payload else READ_HEADERS
        messages = 0

        async def begin() -> EventFilter:
            own = await check_filter(guard, filter_)
            if options.payload:
                guard.check_operation(READ_PAYLOAD)
            return own

        async def audit(criterion: str, read: Callable[[], Awaitable[T]]) -> T:
            return await self._auditor.run(
                operation,
                read,
                lambda _: messages,
                topics=filter_.topics,
                target=filter_.message_id or "",
                criteria=[criterion, *criteria_of(filter_)],
            )

        own = await audit("export", begin)
        limit = guard.access.max_messages
        if limit is not None and (options.limit is None or options.limit > limit):
            options = msgspec.structs.replace(options, limit=limit)

        async def parts(source: AsyncIterator[ExportPart]) -> AsyncIterator[ExportPart]:
            nonlocal messages
            payload_bytes = 0
            async for part in source:
                guard.check_validity()
                guard.count_bytes([part.payload_bytes - payload_bytes])
                messages, payload_bytes = part.messages, part.payload_bytes
                yield part

        try:
            async with self._queries.export(own, options) as source:
                yield parts(source)
        except BaseException as error:
            await audit("export_end", partial(_fail, error))
        else:
            await audit("export_end", _succeed)

    async def _count(
        self,
        filter_: EventFilter,
        criterion: str,
        read: Callable[[EventFilter], Awaitable[T]],
        count: Callable[[T], int],
    ) -> T:
        check_type("The filter", filter_, EventFilter)

        async def run() -> T:
            return await read(await check_filter(self._guard, filter_))

        return await self._auditor.run(
            READ_HEADERS,
            run,
            count,
            topics=filter_.topics,
            target=filter_.message_id or "",
            criteria=[criterion, *criteria_of(filter_)],
        )


async def _succeed() -> None:
    pass


async def _fail(error: BaseException) -> None:
    raise error


F = TypeVar("F", bound=DeadLetterFilter)
R = TypeVar("R")


async def read_dead_letters(
    session: Session,
    filter_: F,
    read: Callable[[F], Awaitable[R]],
    nothing: R,
    count: Callable[[R], int],
    criterion: str,
) -> R:
    """Return the result of a query on dead letters; it is audited, as their errors are texts of consumers.

    Arguments:
        nothing: result for a session whose topics the filter excludes.
        count: returns the number of dead letters in a result.
        criterion: name of the query, for the audit log.

    Raises: as `covered_filter`; Unavailable if the read can't be recorded.
    """

    async def run() -> R:
        visible = await covered_filter(session, filter_)
        return nothing if visible is None else await read(visible)

    return await session.audit(Right.READ_HEADERS, run, count, topics=filter_.topics, criteria=(criterion,))


async def covered_filter(session: Session, filter_: F) -> F | None:
    """Restrict a filter to the dead letters that a session may list, or return None if it may list none.

    Topics and globs that are named must be covered. Without any, the filter is narrowed to the topics with
    dead letters that are.

    Raises: Unauthenticated, Forbidden, Saturated.
    """
    grant, mailbox = session.grant, session.mailbox
    await grant.check(Right.READ_HEADERS)
    if filter_.mailbox not in (None, mailbox.name):
        raise Forbidden(
            f"This server has the dead letters of mailbox {mailbox.name}; ask another server.", "mailbox"
        )
    filter_ = msgspec.structs.replace(filter_, mailbox=mailbox.name)
    if grant.covers_all_topics:
        return filter_
    if filter_.topics:
        # The text of a glob is covered only if everything that it matches is.
        if not all(map(grant.covers, filter_.topics)):
            raise uncovered_topic()
        return filter_
    topics = [each.topic for each in await mailbox.list_topics() if each.dead and grant.covers(each.topic)]
    return msgspec.structs.replace(filter_, topics=tuple(topics)) if topics else None
