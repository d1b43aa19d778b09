"""Exports read back, and what they have to hold."""

import csv
import json
from base64 import b64decode
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl

from postroom.adapters.compose.export import Format
from postroom.domain.envelope.build import open_envelope, without_auth_token
from postroom.domain.search import FoundMessage

FORMATS: tuple[Format, ...] = ("parquet", "csv", "json")
_NUMBERS = ("timestamp", "position", "shard", "attempts")

Row = dict[str, Any]


def expected(messages: Iterable[FoundMessage]) -> list[Row]:
    """Return the rows of an export of these messages, with envelopes and payloads."""
    return [
        {name: getattr(each, name) for name in FoundMessage.__struct_fields__ if name != "envelope_blob"}
        | {
            "status": each.status.name.lower(),
            "envelope": without_auth_token(each.envelope_blob),
            "payload": None if each.encryption else open_envelope(each.envelope_blob).payload,
        }
        for each in messages
    ]


def read_back(format_: str, file: Path) -> list[Row]:
    """Return the rows of an export, sorted as a search that starts with the oldest sorts them."""
    rows = {"parquet": _parquet, "csv": _csv, "json": _json}[format_](file)
    return sorted(rows, key=lambda row: (row["timestamp"], row["mailbox"], row["position"]))


def _parquet(path: Path) -> Iterable[Row]:
    frame = pl.read_parquet(path).with_columns(pl.col("timestamp").dt.timestamp("ms"))
    for row in frame.iter_rows(named=True):
        yield row | {"custom_headers": dict(row["custom_headers"])}


def _csv(path: Path) -> Iterable[Row]:
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            row = {name: value.removeprefix("'") for name, value in row.items()}
            read: Row = {name: value or None for name, value in row.items()}
            read |= {name: int(row[name]) for name in _NUMBERS}
            read["custom_headers"] = json.loads(row["custom_headers"])
            if "payload" in row and not row["encryption"]:  # then an empty payload is one too
                read["payload"] = row["payload"]
            yield _decoded(read)


def _json(path: Path) -> Iterable[Row]:
    for line in path.read_text("utf-8").split("\n")[:-1]:
        yield _decoded(json.loads(line))


def _decoded(row: Row) -> Row:
    if "envelope_b64" in row:
        row["envelope"] = b64decode(row.pop("envelope_b64"))
    if "payload" in row:
        text, coded = row["payload"], row.pop("payload_b64")
        row["payload"] = b64decode(coded) if coded is not None else None if text is None else text.encode()
    return row
