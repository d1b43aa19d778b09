"""The file of an export: JSON lines, CSV with a header line, or Parquet."""

import csv
import fcntl
import io
import os
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from postroom.adapters.files import sync
from postroom.application.masking import NO_MASK
from postroom.application.ports.read_models import ExportFormat, ExportOptions, ExportPart
from postroom.application.queries.export_messages import ExportedMessage
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.domain.search import FoundMessage

PART_BYTES = 256 << 10
"""Size from which a part is passed on."""
ROW_GROUP_BYTES = 8 << 20
ROW_GROUP_MESSAGES = 5_000
"""Size from which messages are written to a Parquet file: each write makes a row group."""
MESSAGE_BYTES = 500
"""Estimated size of a message without its envelope and payload."""
_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r", "\n", "'")
"""First characters of text that a spreadsheet evaluates, and the apostrophe that marks text."""
_HEADERS = tuple(name for name in FoundMessage.__struct_fields__ if name != "envelope_blob")

_BEGINNINGS = {
    ExportFormat.CSV: f"{_HEADERS[0]},".encode(),
    ExportFormat.JSON: f'{{"{_HEADERS[0]}":'.encode(),
    ExportFormat.PARQUET: b"PAR1",
}


class File(Protocol):
    """A file that is being written."""

    def write(self, messages: Sequence[ExportedMessage]) -> None:
        """Add messages."""

    def close(self) -> None:
        """Finish the file."""


@contextmanager
def whole_file(target: Path, format_: ExportFormat, overwrite: bool) -> Iterator[BinaryIO]:
    """Yield a file that is renamed to `target` when the context ends, and removed on an error.

    Only its owner may read it. Leftovers of a killed export to the same file are removed.

    Arguments:
        overwrite: replace an export of the same format.

    Raises: InvalidRequest when the target is anything else, or another process exports to it; Unavailable
        when it can't be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check(target, format_, overwrite)
        partial = target.with_name(f".{target.name}.partial")
        with _open_locked(partial, target) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                _check(target, format_, overwrite)
                partial.rename(target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        sync(target.parent)
    except OSError as error:
        raise Unavailable(f"The export {target} can't be written: {error.strerror or error}.") from error


@contextmanager
def _open_locked(path: Path, target: Path) -> Iterator[BinaryIO]:
    """Open an empty file for writing, locked against other processes."""
    while True:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidRequest(f"Another process exports to {target}; name another file.") from None
            if _is_at(path, file):  # else the export that wrote the file ended meanwhile
                file.truncate()
                yield file
                return


def _is_at(path: Path, file: BinaryIO) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _check(target: Path, format_: ExportFormat, overwrite: bool) -> None:
    """Raise InvalidRequest if `target` exists and may not be replaced."""
    if target.is_dir():
        raise InvalidRequest(f"{target} is a folder; name a file.")
    try:
        with open(target, "rb") as file:
            beginning = file.read(len(_BEGINNINGS[format_]))
    except FileNotFoundError:
        return
    if beginning not in (b"", _BEGINNINGS[format_]):
        raise InvalidRequest(f"{target} is not an export as {format_}; name another file.")
    if not overwrite:
        raise InvalidRequest(f"{target} exists; add --overwrite to replace it, or name another file.")


class LimitReached(Exception):
    """The export has as many messages as it may have."""


class StreamedExport:
    """An export that passes its bytes on as they are written.

    Arguments:
        put: takes the parts; the first one at once.
        envelope: include a column for envelopes.
    """

    def __init__(self, options: ExportOptions, put: Callable[[ExportPart], None], envelope: bool) -> None:
        self._options = options
        self._put = put
        self._sink = _Sink()
        self._file = _open_file(self._sink, options, envelope)
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

    def finish(self) -> int:
        """Write what remains, and return the size of the export in bytes."""
        self._flush()
        self._file.close()
        self._pass_on()
        return self._sink.size

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
    """Collects written bytes; `tell` also counts bytes that were passed on."""

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


def _open_file(sink: _Sink, options: ExportOptions, envelope: bool) -> File:
    file: Any = sink
    if options.format == ExportFormat.PARQUET:
        from postroom.adapters.export.parquet import ParquetFile  # slow to import

        return ParquetFile(file, envelope, options.payload)
    text = CsvFile if options.format == ExportFormat.CSV else JsonFile
    return text(file, envelope, options.payload)


class JsonFile:
    """A file of JSON lines that is being written; its rows are the same as of `postroom search --json`.

    Arguments:
        file: is closed by `close`.
    """

    def __init__(self, file: BinaryIO, envelope: bool, payload: bool) -> None:
        self._file = file
        self._envelope = envelope
        self._payload = payload
        self._encode = msgspec.json.Encoder().encode_lines

    def write(self, messages: Sequence[ExportedMessage]) -> None:
        """Add messages."""
        self._file.write(self._encode([self._row(each) for each in messages]))

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def _row(self, exported: ExportedMessage) -> dict[str, Any]:
        row = _headers(exported.message)
        if self._envelope:
            row["envelope_b64"] = exported.envelope
        if self._payload:
            row |= _payload(exported.payload)
        return row


class CsvFile:
    """A CSV file (RFC 4180) that is being written; missing values are empty.

    Text that a spreadsheet would evaluate as a formula, or that begins with an apostrophe, is preceded by an
    apostrophe; remove one leading apostrophe to restore it.

    Arguments:
        file: is closed by `close`.
    """

    def __init__(self, file: BinaryIO, envelope: bool, payload: bool) -> None:
        columns = [*_HEADERS, *["envelope_b64"] * envelope, *["payload", "payload_b64"] * payload]
        self._file = TextIOWrapper(file, "utf-8", newline="")
        self._rows = csv.DictWriter(self._file, columns, extrasaction="ignore")
        self._rows.writeheader()

    def write(self, messages: Sequence[ExportedMessage]) -> None:
        """Add messages."""
        self._rows.writerows(map(_csv_row, messages))
        self._file.flush()

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


def _csv_row(exported: ExportedMessage) -> dict[str, Any]:
    row = _headers(exported.message) | _payload(exported.payload)
    row["custom_headers"] = msgspec.json.encode(exported.message.custom_headers).decode()
    row["envelope_b64"] = None if exported.envelope is None else b64encode(exported.envelope).decode()
    return {name: value if name.endswith("_b64") else _escape_formula(value) for name, value in row.items()}


def _escape_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA_PREFIXES) else value


def _headers(message: FoundMessage) -> dict[str, Any]:
    row = {name: getattr(message, name) for name in _HEADERS}
    row["status"] = message.status.name.lower()
    return row


def _payload(payload: bytes | None) -> dict[str, str | None]:
    """Return a payload as text, or in base64 if it is not UTF-8."""
    if payload is None:
        return {"payload": None, "payload_b64": None}
    try:
        return {"payload": payload.decode(), "payload_b64": None}
    except UnicodeDecodeError:
        return {"payload": None, "payload_b64": b64encode(payload).decode()}
