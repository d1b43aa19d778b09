"""Search, facets and export of a store's messages, in processes of their own where they take long."""

import asyncio
import os
import struct
import sys
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Literal

import msgspec

from postroom.adapters.compose.queries import open_read_models
from postroom.adapters.export.file import LimitReached, StreamedExport, whole_file
from postroom.application.extras import explain_missing_extra
from postroom.application.page import Page
from postroom.application.ports.facets import BARS, Facets, SuggestionField, Timeline
from postroom.application.ports.read_models import (
    ExportFormat,
    ExportOptions,
    ExportPart,
    ReadModels,
    SearchQueries,
)
from postroom.application.queries.export_messages import ExportMessages, ExportSource
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
from postroom.domain.search import EventFilter, FoundMessage, filter_of_mailbox

Format = Literal["parquet", "csv", "json"]
HEADER = struct.Struct(">BIQQ")
"""Header of a frame: its kind, the length of its data, messages and bytes of payload so far."""
PART, END, FAILURE = range(3)
NICENESS = 10
"""An export gives way to the server where processors are few."""


def export_messages(
    store: str,
    filter_: EventFilter,
    format_: Format,
    file: str | Path,
    *,
    envelope: bool = True,
    payload: bool = False,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[ExportSource, int]:
    """Export the messages that a filter matches; return the origin of the export and its size in bytes.

    Arguments:
        store: path of a SQLite file, or `postgresql://` URL.
        filter_: selects the messages to export.
        format_: `parquet`, `csv` or `json`, a line for each message.
        file: target file, which afterwards contains the complete export or is unchanged; its folder is
            created if missing.
        envelope: include envelopes, without the publishers' auth tokens.
        payload: include payloads that are not encrypted.
        overwrite: replace an export of the same format.
        progress: called with the number of messages exported so far.

    Raises: NotFound before the first rebuild; InvalidRequest when the file is anything else than an export;
        Unavailable when the read models can't be read, the file can't be written, or a library is missing.
    """
    options = ExportOptions(ExportFormat(format_), payload)
    with (
        closing(open_read_models(store)) as read_models,
        whole_file(Path(file).absolute(), options.format, overwrite) as target,
    ):

        def put(part: ExportPart) -> None:
            target.write(part.data)

        with explain_missing_extra("archive"):
            export = StreamedExport(options, put, envelope)
        query = ExportMessages(read_models, envelope=envelope, payload=payload)
        source = query(filter_, export.write, progress)
        return source, export.finish()


class ExportJob(msgspec.Struct, frozen=True):
    """The messages of the store `store` that an export writes."""

    store: str
    filter: EventFilter
    options: ExportOptions


class ExportFailure(msgspec.Struct, frozen=True):
    """The error that ended an export."""

    code: str
    message: str


def main() -> None:
    """Run the export that stdin describes; it ends when nobody reads stdout any more."""
    os.nice(NICENESS)
    out = open(os.dup(1), "wb", buffering=0)  # noqa: SIM115  # the process ends with it
    os.dup2(2, 1)  # nothing else may write to the pipe

    def write(kind: int, data: bytes, messages: int = 0, payload_bytes: int = 0) -> None:
        frame = memoryview(HEADER.pack(kind, len(data), messages, payload_bytes) + data)
        while frame:
            frame = frame[out.write(frame) :]

    def put(part: ExportPart) -> None:
        write(PART, part.data, part.messages, part.payload_bytes)

    try:
        job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ExportJob)
        _export(job, put)
        write(END, b"")
    except BrokenPipeError:
        os._exit(0)
    except PostroomError as error:
        write(FAILURE, msgspec.json.encode(ExportFailure(error.code, str(error))))
    except Exception:
        traceback.print_exc()
        defect = "The export failed because of a defect; its traceback is in the server's log."
        write(FAILURE, msgspec.json.encode(ExportFailure(InternalError.code, defect)))


@explain_missing_extra("archive")
def _export(job: ExportJob, put: Callable[[ExportPart], None]) -> None:
    payload = job.options.payload
    with closing(open_read_models(job.store)) as read_models:
        read_models.facets(job.filter, (), cap=1)  # report an error before the first part
        export = StreamedExport(job.options, put, envelope=payload)
        with suppress(LimitReached):
            ExportMessages(read_models, envelope=payload, payload=payload)(job.filter, export.write)
        export.finish()


MAX_EXPORTS = 2
"""Number of exports at a time."""
RETRY_MS = 5_000


class StoreSearchQueries(SearchQueries):
    """The queries of `SearchQueries` on the read models of a store.

    Arguments:
        read_models: of the store; the caller closes them.
        mailbox: mailbox whose messages are read.
        search_unsettled: searches unsettled messages without read models.
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
        return await in_query_thread(self._read_models.facets, filter_of_mailbox(filter_, self._mailbox))

    async def timeline(self, filter_: EventFilter, bars: int = BARS, /) -> Timeline:
        own = filter_of_mailbox(filter_, self._mailbox)
        return await in_query_thread(self._read_models.timeline, own, bars)

    async def search_unsettled(self, filter_: EventFilter, /) -> Page[FoundMessage]:
        if self._search_unsettled is None:
            raise NotFound("There are no read models yet; build them with `postroom views rebuild`.")
        return await self._search_unsettled(filter_of_mailbox(filter_, self._mailbox))

    async def suggest(
        self, field: SuggestionField, start: str, /, *, covers: Callable[[str], bool] = lambda value: True
    ) -> tuple[str, ...]:
        return await in_query_thread(
            self._read_models.suggest, field, start, mailbox=self._mailbox, covers=covers
        )

    @asynccontextmanager
    async def export(
        self, filter_: EventFilter, options: ExportOptions, /
    ) -> AsyncIterator[AsyncIterator[ExportPart]]:
        """Read all matching messages; see `SearchQueries.export`.

        Raises: Saturated when the maximum number of exports is running.
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
                # Not `wait()`, which would wait for the end of a pipe whose data nobody reads.
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


if __name__ == "__main__":
    main()
