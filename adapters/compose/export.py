"""Exports: from the read models of a store to a file, or, run as a program, to a pipe.

The program reads an `ExportJob` from stdin and writes parts to stdout. A process of its own leaves the
interpreter of the server to the server, and can be ended at any time.
"""

import os
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

import msgspec

from postroom.adapters.compose.queries import open_read_models
from postroom.adapters.export.file import LimitReached, StreamedExport, whole_file
from postroom.application.extras import explain_missing_extra
from postroom.application.ports.read_models import ExportFormat, ExportOptions, ExportPart
from postroom.application.queries.export_messages import ExportMessages, ExportSource
from postroom.domain.errors import InternalError, PostroomError
from postroom.domain.search import EventFilter

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
        file: it contains the complete export afterwards, or is unchanged; its folder is created if missing.
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
    os.dup2(2, 1)  # nothing else may write to it

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
        read_models.facets(job.filter, (), cap=1)  # an error is told before the first part
        export = StreamedExport(job.options, put, envelope=payload)
        with suppress(LimitReached):
            ExportMessages(read_models, envelope=payload, payload=payload)(job.filter, export.write)
        export.finish()


if __name__ == "__main__":
    main()
