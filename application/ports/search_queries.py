"""Port: the queries around a search, for surfaces that people look at."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Protocol

import msgspec

from postroom.application.masking import NO_MASK, Mask
from postroom.application.ports.facets import BARS, Facets, SuggestionField, Timeline
from postroom.domain.search import EventFilter, SearchPage


class ExportFormat(StrEnum):
    """The format of a streamed export."""

    CSV = "csv"
    JSON = "json"
    """JSON lines."""
    PARQUET = "parquet"


class ExportOptions(msgspec.Struct, frozen=True):
    """The content of a streamed export.

    Arguments:
        payload: include envelopes and, unless encrypted, payloads.
        limit: maximum number of messages, oldest first; None for all.
        mask: headers whose values are hidden. With any mask, envelopes are left out; with one of fields of
            payloads, these too.
    """

    format: ExportFormat
    payload: bool = False
    limit: int | None = None
    mask: Mask = NO_MASK


class ExportPart(msgspec.Struct, frozen=True):
    """A part of a streamed export.

    Arguments:
        messages: how many messages the export has so far.
        payload_bytes: bytes of the envelopes so far, if they are included.
    """

    data: bytes
    messages: int
    payload_bytes: int


class SearchQueries(Protocol):
    """Facets, timeline, suggestions and exports of the messages of a mailbox.

    All raise NotFound before the first rebuild, Unavailable when the read models can't be read, and
    InvalidRequest for a filter that names another mailbox.
    """

    async def facets(self, filter_: EventFilter, /) -> Facets:
        """Count the matching messages by the values of fields; see `SearchStatistics.facets`."""

    async def timeline(self, filter_: EventFilter, bars: int = BARS, /) -> Timeline:
        """Count the matching messages by time; see `SearchStatistics.timeline`."""

    async def search_unsettled(self, filter_: EventFilter, /) -> SearchPage:
        """Return a page of the unsettled messages that match, without read models.

        Raises: NotFound where another process has them in memory.
        """

    async def suggest(
        self, field: SuggestionField, start: str, /, *, covers: Callable[[str], bool] = lambda value: True
    ) -> tuple[str, ...]:
        """Return values of a field that begin with a text; see `SearchStatistics.suggest`."""

    def export(
        self, filter_: EventFilter, options: ExportOptions, /
    ) -> AbstractAsyncContextManager[AsyncIterator[ExportPart]]:
        """Read all matching messages in one snapshot, oldest first, as parts of a file.

        Memory is bounded: nothing is read ahead of a slow reader. The end of the context ends the export.
        """
