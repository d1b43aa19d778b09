"""The queries around a search as the bearer of one capability may make them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import msgspec

from postroom.application.access.auditor import Auditor
from postroom.application.access.guard import Guard
from postroom.application.access.search import AuthorizedSearch, check_filter, criteria_of
from postroom.application.ports.facets import BARS, Facets, SuggestionField, Timeline
from postroom.application.ports.read_models import ExportOptions, ExportPart, SearchQueries
from postroom.domain.arguments import check_type
from postroom.domain.capability.rights import Right
from postroom.domain.search import EventFilter, SearchPage

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

    async def search_unsettled(self, filter_: EventFilter, /) -> SearchPage:
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
            # Those of other topics would fill the answer.
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
