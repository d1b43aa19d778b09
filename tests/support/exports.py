"""Exports read back, and what they have to hold."""

import csv
import json
from base64 import b64decode
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl

from postroom.adapters.compose.export import Format
from postroom.domain.envelope.build import open_envelope, without_auth_token
from postroom.domain.search import FoundMessage

FORMATS: tuple[Format, ...] = ("parquet", "delta", "csv", "json")
_PARTITIONS = {"day": pl.Date, "topic": pl.String}
_NUMBERS = ("timestamp", "position", "shard", "attempts")

Row = dict[str, Any]


def expected(messages: Iterable[FoundMessage]) -> list[Row]:
    """Return the rows of an export of these messages, with envelopes and payloads."""
    return [
        {name: getattr(each, name) for name in FoundMessage.__struct_fields__ if name != "envelope_blob"}
        | {
            "status": each.status.name.lower(),
            "day": datetime.fromtimestamp(each.timestamp // 1_000, UTC).date().isoformat(),
            "envelope": without_auth_token(each.envelope_blob),
            "payload": None if each.encryption else open_envelope(each.envelope_blob).payload,
        }
        for each in messages
    ]


def read_back(format_: str, folder: Path) -> list[Row]:
    """Return the rows of an export, sorted as a search that starts with the oldest sorts them."""
    rows = {"parquet": _parquet, "delta": _delta, "csv": _csv, "json": _json}[format_](folder)
    return sorted(rows, key=lambda row: (row["timestamp"], row["mailbox"], row["position"]))


def _parquet(folder: Path) -> Iterable[Row]:
    if not list(folder.rglob("*.parquet")):  # for no message there is no file
        return []
    return _rows(pl.read_parquet(folder / "**/*.parquet", hive_schema=_PARTITIONS))


def _delta(folder: Path) -> Iterable[Row]:
    return _rows(pl.read_delta(str(folder)))


def _rows(frame: pl.DataFrame) -> Iterable[Row]:
    for row in frame.with_columns(pl.col("timestamp").dt.timestamp("ms")).iter_rows(named=True):
        yield row | {"day": row["day"].isoformat(), "custom_headers": dict(row["custom_headers"])}


def _csv(folder: Path) -> Iterable[Row]:
    for path in folder.rglob("*.csv"):
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                row = {name: value.removeprefix("'") for name, value in row.items()}
                read: Row = {name: value or None for name, value in row.items()}
                read |= {name: int(row[name]) for name in _NUMBERS}
                read["custom_headers"] = json.loads(row["custom_headers"])
                if "payload" in row and not row["encryption"]:  # then an empty payload is one too
                    read["payload"] = row["payload"]
                yield _decoded(read, path)


def _json(folder: Path) -> Iterable[Row]:
    for path in folder.rglob("*.json"):
        for line in path.read_text("utf-8").split("\n")[:-1]:
            yield _decoded(json.loads(line), path)


def _decoded(row: Row, path: Path) -> Row:
    row["day"] = next(part for part in path.parts if part.startswith("day=")).removeprefix("day=")
    if "envelope_b64" in row:
        row["envelope"] = b64decode(row.pop("envelope_b64"))
    if "payload" in row:
        text, coded = row["payload"], row.pop("payload_b64")
        row["payload"] = b64decode(coded) if coded is not None else None if text is None else text.encode()
    return row
