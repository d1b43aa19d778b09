"""Exports of all messages that a search finds, and suggestions of values for its form."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any, Final

from starlette.responses import Response, StreamingResponse

from postroom.adapters.console.event_filter import HEADER, PARAMETERS, parse_filter, write_header
from postroom.adapters.console.page import Page, route
from postroom.application.ports.facets import SuggestionField
from postroom.application.ports.read_models import ExportFormat, ExportOptions, ExportPart, SearchQueries
from postroom.domain.errors import InvalidRequest, NotFound

TYPES: Final = {
    ExportFormat.CSV: "text/csv; charset=utf-8",
    ExportFormat.JSON: "application/jsonl; charset=utf-8",
    ExportFormat.PARQUET: "application/vnd.apache.parquet",
}
SUFFIXES: Final = {
    ExportFormat.CSV: "csv",
    ExportFormat.JSON: "jsonl",
    ExportFormat.PARQUET: "parquet",
}


async def download(page: Page, queries: SearchQueries) -> Response:
    """Return all messages that match the filter of the URL as a file.

    An error before the first part is shown as a page; a later one aborts the download.
    """
    try:
        format_ = ExportFormat(page.query.get("format", ""))
    except ValueError:
        raise InvalidRequest("Unknown export format; expected csv, json or parquet.") from None
    filter_ = parse_filter(page.query.multi_items())
    page.mask.check_criteria(filter_)
    options = ExportOptions(format_, payload=page.query.get("payload") == "1", mask=page.mask)
    opened = AsyncExitStack()
    parts = await opened.enter_async_context(queries.export(filter_, options))
    name = f"messages-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.{SUFFIXES[format_]}"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    return _Download(opened, _data(parts), media_type=TYPES[format_], headers=headers)


async def _data(parts: AsyncIterator[ExportPart]) -> AsyncIterator[bytes]:
    async for part in parts:
        yield part.data


class _Download(StreamingResponse):
    """A file that is generated while it is sent, and closed when the request ends."""

    def __init__(self, opened: AsyncExitStack, content: AsyncIterator[bytes], **arguments: Any) -> None:
        super().__init__(content, **arguments)
        self._opened = opened

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the file."""
        async with self._opened:
            await super().__call__(scope, receive, send)


SUGGESTED: Final = ("topics", "principals", HEADER)


async def export(page: Page) -> Response:
    """Download all messages that match."""
    queries = page.search_queries
    if queries is None:
        raise NotFound("Exports need read models, which this store lacks; run `postroom views rebuild`.")
    return await download(page, queries)


async def suggest(page: Page) -> Response:
    """Return values of a field that begin with the typed text, as options of a list."""
    try:
        field = SuggestionField(page.path["field"])
    except ValueError:
        raise NotFound("This field has no suggestions.") from None
    texts = [value for _, value in page.query.multi_items()]
    queries = page.search_queries
    values: Sequence[str] = ()
    if queries is not None and not page.mask.covers_header(field.value):
        values = await queries.suggest(field, texts[-1] if texts else "")
    if field == SuggestionField.HEADER:
        values = [write_header(each, "") for each in values]
    return await page.render("search/suggestions", values=values)


ROUTES: Final = [
    route("/search/export", export, query=(*PARAMETERS, "format", "payload"), lists=PARAMETERS),
    route("/search/suggestions/{field}", suggest, query=SUGGESTED, lists=SUGGESTED),
]
