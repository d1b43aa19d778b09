"""Exported messages as text: JSON Lines, or CSV with a header line.

Unlike Parquet, each row has its topic: text is often read by tools without support for partitions.
"""

import csv
from base64 import b64encode
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any, BinaryIO

import msgspec

from postroom.application.ports.export import ExportedMessage
from postroom.domain.search import FoundMessage

_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r", "\n", "'")
"""First characters of text that a spreadsheet evaluates, and the apostrophe that marks text."""
HEADERS = tuple(name for name in FoundMessage.__struct_fields__ if name != "envelope_blob")


class JsonFile:
    """A file of JSON lines that is being written; its rows are those of `postroom search --json`.

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
        columns = [*HEADERS, *["envelope_b64"] * envelope, *["payload", "payload_b64"] * payload]
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
    row = {name: getattr(message, name) for name in HEADERS}
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
