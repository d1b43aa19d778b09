"""The log archive port over a folder of Parquet files, one per segment."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkstemp
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from postroom.adapters.files.durable import sync
from postroom.application.ports.log_archive import Segment
from postroom.domain.errors import BrokenLog, Unavailable
from postroom.domain.record import CHAIN, Record, chained

FORMAT = "1"
ROW_GROUP_ROWS = 10_000
READ_ROWS = 2_000
_NAME = re.compile(r"(\d{13})-(\d{13})\.parquet")
_TEMPORARY = ".tmp"

_LONG, _TEXT, _BYTES = pa.int64(), pa.string(), pa.binary()
_TYPES = {
    **dict.fromkeys(("position", "version", "epoch", "at", "shard", "attempt", "due", "timestamp"), _LONG),
    **dict.fromkeys(("state", "envelope"), _BYTES),
    "stream": pa.binary(16),
    "chain": pa.binary(32),
}
_REQUIRED = ("position", "stream", "version", "epoch", "type", "at", "state", "chain")
SCHEMA = pa.schema(
    pa.field(name, _TYPES.get(name, _TEXT), nullable=name not in _REQUIRED) for name in Record._fields
)
"""The columns are those of `Record`: `at` and `due` are log time in µs, `timestamp` is in ms, all UTC."""

_REPEATING = ["type", "topic", "reason", "content_type", "schema_url", "schema_version", "encryption"]
_REPEATING += ["principal", "namespace", "custom_headers"]


class Part(NamedTuple):
    """A range of positions, and the file that contains it."""

    first: int
    last: int
    path: Path


class ParquetLogArchive:
    """An archive of segments `{folder}/{mailbox}/{first}-{last}.parquet`, with file mode 0600.

    A temporary file is synced and renamed when it is complete. Its metadata contains the mailbox, the
    positions and the chain hashes at both ends, so that each file can be verified alone.

    Arguments:
        folder: created if it is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def store(self, mailbox: str, records: Sequence[Record], before: bytes | None) -> Segment:
        """Store records as one file; see `LogArchive.store`."""
        last = records[-1]
        segment = Segment(mailbox, records[0].position, last.position, before, last.chain)
        folder = self._folder / mailbox
        with _unavailable(folder, "written"):
            _make_folder(folder)
            _remove_unfinished(folder)
            _write(_table(segment, records), folder / _name(segment.first, segment.last))
        return segment

    def mailboxes(self) -> list[str]:
        """Return the mailboxes that have a file; see `LogArchive.mailboxes`."""
        with _unavailable(self._folder, "read"):
            if not self._folder.is_dir():
                return []
            names = sorted(each.name for each in self._folder.iterdir() if "@" in each.name)
        return [name for name in names if self.files(name)]

    def segments(self, mailbox: str) -> list[Segment]:
        """Return the segments of a mailbox; see `LogArchive.segments`."""
        return [_segment(mailbox, file) for file in self.files(mailbox)]

    def last_segment(self, mailbox: str) -> Segment | None:
        """Return the segment with the highest position; see `LogArchive.last_segment`."""
        last = max(self.files(mailbox), key=lambda file: file.last, default=None)
        return None if last is None else _segment(mailbox, last)

    def read(self, mailbox: str, after: int = 0) -> Iterator[Record]:
        """Yield the records of all files, each once, verified; see `LogArchive.read`."""
        previous: Segment | None = None
        for file in self.files(mailbox):
            if file.last <= after:
                continue
            segment = _segment(mailbox, file)
            if previous is not None:
                _check_continues(segment, previous, file)
            for record in _records(segment, file):
                if previous is not None and not _same_history(record, previous):
                    raise _another_history(segment, file)
                if record.position > after:
                    yield record
                    after = record.position
            previous = segment

    def replay(self, mailbox: str, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield the columns up to `state` of each record; see `LogArchive.replay`."""
        for part in self.parts(mailbox, after + 1):
            yield from _rows(part, Record._fields[:CHAIN])

    def read_stream(self, mailbox: str, stream: bytes) -> list[Record]:
        """Return the records of one stream; see `LogArchive.read_stream`."""
        in_stream = pc.field("stream") == pa.scalar(stream, _TYPES["stream"])
        positions = [
            position for part in self.parts(mailbox) for (position,) in _rows(part, ["position"], in_stream)
        ]
        return list(self.at_positions(mailbox, positions).values())

    def at_positions(self, mailbox: str, positions: Sequence[int]) -> dict[int, Record]:
        """Return the records at these positions; see `LogArchive.at_positions`."""
        records: dict[int, Record] = {}
        for part in self.parts(mailbox) if positions else ():
            selected = [position for position in positions if part.first <= position <= part.last]
            if selected:
                is_selected = pc.field("position").isin(selected)
                records |= {row[0]: Record._make(row) for row in _rows(part, Record._fields, is_selected)}
        return records

    def position_before(self, mailbox: str, at: int) -> int:
        """Return the last position before log time `at`; see `LogArchive.position_before`."""
        is_before = pc.field("at") < at
        for part in reversed(self.parts(mailbox)):  # log time never decreases
            before = [position for (position,) in _rows(part, ["position"], is_before)]
            if before:
                return int(before[-1])
        return 0

    def size(self, segment: Segment) -> int:
        """Return the size of the segment's file in bytes; see `LogArchive.size`."""
        path = self._folder / segment.mailbox / _name(segment.first, segment.last)
        with _unavailable(path, "read"):
            return path.stat().st_size

    def parts(self, mailbox: str, first: int = 1, last: int | None = None) -> list[Part]:
        """Return the files of the archived positions from `first` to `last`, in order, without overlaps."""
        parts = []
        for file in self.files(mailbox):
            start = max(file.first, first)
            end = file.last if last is None else min(file.last, last)
            if start <= end:
                parts.append(Part(start, end, file.path))
                first = end + 1
        return parts

    def files(self, mailbox: str) -> list[Part]:
        """Return the files of a mailbox in the order of their positions; they may overlap."""
        folder = self._folder / mailbox
        with _unavailable(folder, "read"):
            names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
        matches = (_NAME.fullmatch(name) for name in names)
        return sorted(Part(int(m[1]), int(m[2]), folder / m[0]) for m in matches if m is not None)


def scan(
    part: Part, columns: Sequence[str], where: pc.Expression | None = None, rows: int = READ_ROWS
) -> Iterator[pa.RecordBatch]:
    """Yield columns of the records of a part in the order of their positions, not verified.

    Row groups and columns that can't match, by the statistics of the file, are not read.

    Arguments:
        where: an expression over the columns of `SCHEMA` that selects records.
        rows: largest number of records in a batch.

    Raises: Unavailable when the file can't be read.
    """
    position = pc.field("position")
    in_part = (position >= part.first) & (position <= part.last)
    with _unavailable(part.path, "read"):
        dataset = ds.dataset(part.path, schema=SCHEMA, format="parquet")
        yield from dataset.to_batches(
            columns=list(columns),
            filter=in_part if where is None else in_part & where,
            batch_size=rows,
            use_threads=False,
            batch_readahead=1,
            fragment_readahead=1,
        )


def _rows(
    part: Part, columns: Sequence[str], where: pc.Expression | None = None
) -> Iterator[tuple[Any, ...]]:
    for batch in scan(part, columns, where):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _name(first: int, last: int) -> str:
    return f"{first:013d}-{last:013d}.parquet"


def _table(segment: Segment, records: Sequence[Record]) -> pa.Table:
    columns = zip(*records, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    metadata = {
        "postroom.format": FORMAT,
        "postroom.mailbox": segment.mailbox,
        "postroom.first": str(segment.first),
        "postroom.last": str(segment.last),
        "postroom.chain": segment.chain.hex(),
    }
    if segment.before is not None:
        metadata["postroom.before"] = segment.before.hex()
    return pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata(metadata))


def _write(table: pa.Table, path: Path) -> None:
    descriptor, temporary = mkstemp(_TEMPORARY, ".", path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            pq.write_table(
                table, file, compression="zstd", use_dictionary=_REPEATING, row_group_size=ROW_GROUP_ROWS
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync(path.parent)


def _make_folder(folder: Path) -> None:
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        sync(each.parent)


def _remove_unfinished(folder: Path) -> None:
    """Remove the incomplete files of a crash; only the mailbox's owner writes any."""
    for file in folder.glob(f".*{_TEMPORARY}"):
        file.unlink(missing_ok=True)


def _segment(mailbox: str, file: Part) -> Segment:
    with _unavailable(file.path, "read"):
        metadata = pq.read_schema(file.path).metadata or {}
    before = metadata.get(b"postroom.before")
    try:
        segment = Segment(
            metadata[b"postroom.mailbox"].decode(),
            int(metadata[b"postroom.first"]),
            int(metadata[b"postroom.last"]),
            None if before is None else bytes.fromhex(before.decode()),
            bytes.fromhex(metadata[b"postroom.chain"].decode()),
        )
    except (KeyError, ValueError):
        segment = None
    if segment is None or segment[:3] != (mailbox, file.first, file.last):
        raise BrokenLog(
            f"The metadata of the archive file {file.path} does not describe positions {file.first} to "
            f"{file.last} of mailbox {mailbox}: it was renamed or not written by Postroom. Restore it from a "
            "backup.",
            file.first,
        )
    return segment


def _records(segment: Segment, file: Part) -> Iterator[Record]:
    """Yield the records of one file, verified to be complete."""
    records = _read_records(file)
    chain, last = segment.before, segment.first - 1
    if chain is None:
        for record in records:  # the hash before the first record is unknown
            yield record
            chain, last = record.chain, record.position
            break
    try:
        for record in chained(records, chain or b"", last + 1):
            yield record
            chain, last = record.chain, record.position
    except BrokenLog as error:
        message = f"The archive file {file.path} was altered. {error}"
        raise BrokenLog(message, error.position) from error
    if (last, chain) != (segment.last, segment.chain):
        raise _another_history(segment, file)


def _read_records(file: Part) -> Iterator[Record]:
    with _unavailable(file.path, "read"), pq.ParquetFile(file.path) as parquet:
        for batch in parquet.iter_batches(READ_ROWS, columns=list(Record._fields)):
            yield from map(Record._make, zip(*(column.to_pylist() for column in batch.columns), strict=True))


def _same_history(record: Record, previous: Segment) -> bool:
    """Return whether overlapping segments contain the same record at the end of the earlier one."""
    return record.position != previous.last or record.chain == previous.chain


def _check_continues(segment: Segment, previous: Segment, file: Part) -> None:
    if segment.first == previous.last + 1 and segment.before not in (None, previous.chain):
        raise _another_history(segment, file)
    if segment.first > previous.last + 1 and segment.before is not None:
        raise BrokenLog(
            f"The archive {file.path.parent} lacks positions {previous.last + 1} to {segment.first - 1}: a "
            "file was removed. Restore it from a backup.",
            previous.last + 1,
        )


def _another_history(segment: Segment, file: Part) -> BrokenLog:
    return BrokenLog(
        f"The archive file {file.path} does not match the hashes of the files before it or its own last "
        "hash: it was altered or comes from another store. Restore it from a backup.",
        segment.first,
    )


@contextmanager
def _unavailable(path: Path, action: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise Unavailable(
            f"The archive {path} can't be {action}: {error}. Check the folder, its permissions and its disk."
        ) from error
