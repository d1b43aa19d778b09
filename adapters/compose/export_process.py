"""The process of a streamed export: it reads an `ExportJob` from stdin and writes parts to stdout.

A process of its own leaves the interpreter of the server to the server, and can be ended at any time.
"""

import os
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import closing

import msgspec

from postroom.adapters.compose.queries import open_read_models
from postroom.adapters.export.stream import LimitReached, StreamedExport
from postroom.application.extras import explain_missing_extra
from postroom.application.ports.search_queries import ExportOptions, ExportPart
from postroom.application.queries.export_messages import ExportMessages
from postroom.domain.errors import InternalError, PostroomError
from postroom.domain.search import EventFilter

HEADER = struct.Struct(">BIQQ")
"""Header of a frame: its kind, the length of its data, messages and bytes of payload so far."""
PART, END, FAILURE = range(3)
NICENESS = 10
"""An export gives way to the server where processors are few."""


class ExportJob(msgspec.Struct, frozen=True):
    """What is exported, from the store at `store`."""

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
        export = StreamedExport(job.options, put)
        try:
            ExportMessages(read_models, envelope=payload, payload=payload)(job.filter, export)
        except LimitReached:
            export.finish()


if __name__ == "__main__":
    main()
