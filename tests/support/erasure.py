"""Settings of encryption with a new key store, and a search of all files of a folder."""

import sqlite3
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

import pyarrow.parquet as pq
import zstandard

from postroom.adapters.compose.store import create_key_store, open_master_key, open_subject_keys
from postroom.application.erasure.erase_subject import ErasureSettings
from postroom.application.ports.subject_keys import SubjectKeys
from postroom.domain.subject import SubjectPolicy

ORDERS = SubjectPolicy("principal", ("correlation_id", "attrs.email"))
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def new_erasure(
    folder: Path, topics: Mapping[str, SubjectPolicy] | None = None, *, keys: str | None = None
) -> ErasureSettings:
    """Return settings of a new key store in a folder, or at an address; topic `orders` is encrypted."""
    settings = ErasureSettings(
        keys=keys or str(folder / "keys.db"),
        records=str(folder / "keys.db.erasures"),
        master_key_file=str(folder / "master.key"),
        topics={"orders": ORDERS} if topics is None else topics,
    )
    create_key_store(settings)
    return settings


def keys_of(settings: ErasureSettings) -> SubjectKeys:
    """Return the key store of settings."""
    return open_subject_keys(settings, open_master_key(settings))


def files_with(folder: Path, texts: list[str]) -> dict[str, list[str]]:
    """Return which files below a folder contain which texts, also in other encodings, or compressed."""
    # All files are read before SQLite opens one, as it then merges the WAL into it.
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    hits: dict[str, list[str]] = {}
    for path, file in files.items():
        contents = [file, *_cells(path, file)]
        contents += [each for content in contents for each in _decompressed(content)]
        present = [text for text in texts if any(contains(each, text) for each in contents)]
        if present:
            hits[str(path.relative_to(folder))] = present
    return hits


def contains(content: bytes, text: str) -> bool:
    """Return whether a content has a text of at least 9 bytes, also in other encodings."""
    data = text.encode()
    # The base64 of a text depends on its offset modulo 3, and its ends on the neighbours of the text.
    encoded = [b64encode(bytes(offset) + data)[4 if offset else 0 : -4] for offset in range(3)]
    return any(form in content for form in (data, text.encode("utf-16-le"), data.hex().encode(), *encoded))


def _decompressed(content: bytes) -> Iterator[bytes]:
    """Yield what is compressed by zstd anywhere in a content."""
    start = content.find(ZSTD_MAGIC)
    while start >= 0:
        with suppress(zstandard.ZstdError):
            yield zstandard.ZstdDecompressor().decompressobj().decompress(content[start:])
        start = content.find(ZSTD_MAGIC, start + 1)


def _cells(path: Path, file: bytes) -> Iterator[bytes]:
    """Yield the values of a SQLite or Parquet file, whose pages split or encode them."""
    if path.suffix == ".parquet":
        yield from (_bytes(value) for row in pq.read_table(path).to_pylist() for value in row.values())
    elif file.startswith(b"SQLite format 3"):
        with closing(sqlite3.connect(path)) as connection:
            tables = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table'").fetchall()
            for table, sql in tables:
                if sql is not None and "USING fts5" in sql:
                    # An index without its texts can be read by its terms only.
                    connection.execute(
                        f"CREATE VIRTUAL TABLE temp.{table}_terms USING fts5vocab(main, {table}, row)"
                    )
                    table = f"{table}_terms"
                for row in connection.execute(f'SELECT * FROM "{table}"'):
                    yield from map(_bytes, row)


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else repr(value).encode()
