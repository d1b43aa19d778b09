"""Exports as a stream of bytes: one file, without partitions."""

import io
from collections.abc import Callable, Sequence
from typing import Any

from postroom.adapters.export.partitions import File
from postroom.adapters.export.text import CsvFile, JsonFile
from postroom.application.masking import NO_MASK
from postroom.application.ports.export import ExportedMessage, ExportSize, ExportSource
from postroom.application.ports.search_queries import ExportFormat, ExportOptions, ExportPart

PART_BYTES = 256 << 10
"""Size from which a part is passed on."""
ROW_GROUP_BYTES = 8 << 20
ROW_GROUP_MESSAGES = 5_000
"""Size from which messages are written to a Parquet file: each write makes a row group."""
MESSAGE_BYTES = 500
"""Estimated size of a message without its envelope and payload."""


class LimitReached(Exception):
    """The export has as many messages as it may have."""


class StreamedExport:
    """An export that passes its bytes on as they are written; see `Export`.

    Arguments:
        put: takes the parts, the first at once.
    """

    def __init__(self, options: ExportOptions, put: Callable[[ExportPart], None]) -> None:
        self._options = options
        self._put = put
        self._sink = _Sink()
        self._file = _open_file(self._sink, options)
        is_parquet = options.format == ExportFormat.PARQUET
        self._buffer_bytes, self._buffer_messages = (
            (ROW_GROUP_BYTES, ROW_GROUP_MESSAGES) if is_parquet else (0, 0)
        )
        self._buffer: list[ExportedMessage] = []
        self._bytes = 0
        self._messages = 0
        self._payload_bytes = 0
        self._pass_on()

    def write(self, messages: Sequence[ExportedMessage]) -> None:
        """Write messages, oldest first; raise LimitReached after the last that may be exported."""
        limit = self._options.limit
        rest = len(messages) if limit is None else limit - self._messages - len(self._buffer)
        self._buffer += map(self._mask, messages[:rest])
        self._bytes += sum(
            len(each.envelope or b"") + len(each.payload or b"") + MESSAGE_BYTES for each in messages[:rest]
        )
        if self._bytes >= self._buffer_bytes or len(self._buffer) >= self._buffer_messages:
            self._flush()
        if rest < len(messages):
            raise LimitReached

    def complete(self, source: ExportSource) -> ExportSize:
        """Finish the export."""
        self.finish()
        return ExportSize(1, self._sink.size)

    def finish(self) -> None:
        """Write what remains."""
        self._flush()
        self._file.close()
        self._pass_on()

    def _mask(self, exported: ExportedMessage) -> ExportedMessage:
        mask = self._options.mask
        if mask == NO_MASK:
            return exported
        payload = None if mask.payload_fields else exported.payload
        return ExportedMessage(mask.hide_item(exported.message), None, payload)

    def _flush(self) -> None:
        if self._buffer:
            self._file.write(self._buffer)
            self._messages += len(self._buffer)
            self._payload_bytes += sum(len(each.envelope or b"") for each in self._buffer)
            self._buffer, self._bytes = [], 0
        if len(self._sink.parts) >= PART_BYTES:
            self._pass_on()

    def _pass_on(self) -> None:
        self._put(ExportPart(bytes(self._sink.parts), self._messages, self._payload_bytes))
        self._sink.parts.clear()


class _Sink(io.RawIOBase):
    """Collects what is written; `tell` counts what was passed on, too."""

    def __init__(self) -> None:
        self.parts = bytearray()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.parts += data
        size = memoryview(data).nbytes
        self.size += size
        return size

    def tell(self) -> int:
        return self.size


def _open_file(sink: _Sink, options: ExportOptions) -> File:
    file: Any = sink
    if options.format == ExportFormat.PARQUET:
        from postroom.adapters.export.parquet import ParquetFile, export_schema  # slow to import

        return ParquetFile(file, export_schema(options.payload, options.payload, False))
    text = CsvFile if options.format == ExportFormat.CSV else JsonFile
    return text(file, options.payload, options.payload)
