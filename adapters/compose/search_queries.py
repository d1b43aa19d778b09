"""Wiring of the queries around a search: the read models in threads, and exports in processes."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec

from postroom.adapters.compose.export import END, FAILURE, HEADER, ExportFailure, ExportJob
from postroom.application.ports.facets import BARS, Facets, SuggestionField, Timeline
from postroom.application.ports.read_models import ExportOptions, ExportPart, ReadModels
from postroom.application.service import Search
from postroom.application.threads import in_query_thread, wait_uncancelled
from postroom.domain.errors import (
    InternalError,
    InvalidRequest,
    NotFound,
    PostroomError,
    Saturated,
    Unavailable,
)
from postroom.domain.search import EventFilter, SearchPage, filter_of_mailbox

MAX_EXPORTS = 2
"""Number of exports at a time."""
RETRY_MS = 5_000


class StoreSearchQueries:
    """The queries of `SearchQueries` on the read models of a store.

    Arguments:
        read_models: of the store; the caller closes them.
        mailbox: whose messages are read.
        search_unsettled: searches them without read models.
    """

    def __init__(
        self, store: str, read_models: ReadModels, mailbox: str, search_unsettled: Search | None = None
    ) -> None:
        self._store = store
        self._read_models = read_models
        self._mailbox = mailbox
        self._search_unsettled = search_unsettled
        self._exports = 0

    async def facets(self, filter_: EventFilter, /) -> Facets:
        """Count messages by the values of fields; see `SearchQueries.facets`."""
        return await in_query_thread(self._read_models.facets, filter_of_mailbox(filter_, self._mailbox))

    async def timeline(self, filter_: EventFilter, bars: int = BARS, /) -> Timeline:
        """Count messages by time; see `SearchQueries.timeline`."""
        own = filter_of_mailbox(filter_, self._mailbox)
        return await in_query_thread(self._read_models.timeline, own, bars)

    async def search_unsettled(self, filter_: EventFilter, /) -> SearchPage:
        """Return a page of unsettled messages; see `SearchQueries.search_unsettled`."""
        if self._search_unsettled is None:
            raise NotFound("There are no read models yet; build them with `postroom project rebuild`.")
        return await self._search_unsettled(filter_of_mailbox(filter_, self._mailbox))

    async def suggest(
        self, field: SuggestionField, start: str, /, *, covers: Callable[[str], bool] = lambda value: True
    ) -> tuple[str, ...]:
        """Return values of a field; see `SearchQueries.suggest`."""
        return await in_query_thread(
            self._read_models.suggest, field, start, mailbox=self._mailbox, covers=covers
        )

    @asynccontextmanager
    async def export(
        self, filter_: EventFilter, options: ExportOptions, /
    ) -> AsyncIterator[AsyncIterator[ExportPart]]:
        """Read all matching messages; see `SearchQueries.export`.

        Raises: Saturated when as many exports run as may.
        """
        job = ExportJob(self._store, filter_of_mailbox(filter_, self._mailbox), options)
        if self._exports >= MAX_EXPORTS:
            raise Saturated(f"{MAX_EXPORTS} exports are running; try again when one ends.", RETRY_MS)
        self._exports += 1
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "postroom.adapters.compose.export", stdin=PIPE, stdout=PIPE
            )
            try:
                parts = _read_parts(process, msgspec.msgpack.encode(job))
                first = await anext(parts)
                yield _chain(first, parts)
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                # Not `wait()`, which waits for the end of a pipe that has unread data and is not read.
                await wait_uncancelled(process.communicate())
        finally:
            self._exports -= 1


async def _chain(first: ExportPart, parts: AsyncIterator[ExportPart]) -> AsyncIterator[ExportPart]:
    yield first
    async for part in parts:
        yield part


async def _read_parts(process: Process, job: bytes) -> AsyncIterator[ExportPart]:
    """Yield the parts of an export; raise its error.

    The job is not an argument of the process, as it may contain a password.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(ConnectionError):
        process.stdin.write(job)
        await process.stdin.drain()
    process.stdin.close()
    while True:
        try:
            kind, size, messages, payload_bytes = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
            data = await process.stdout.readexactly(size)
        except asyncio.IncompleteReadError:
            raise Unavailable("The process of the export ended early; try again.") from None
        if kind == END:
            return
        if kind == FAILURE:
            raise _error(msgspec.json.decode(data, type=ExportFailure))
        yield ExportPart(data, messages, payload_bytes)


def _error(failure: ExportFailure) -> PostroomError:
    kinds: tuple[type[PostroomError], ...] = (NotFound, InvalidRequest, Unavailable)
    return next(
        (kind(failure.message) for kind in kinds if kind.code == failure.code), InternalError(failure.message)
    )
