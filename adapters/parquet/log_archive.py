"""The log archive port over a folder of Parquet files, one per segment (ADR 0012)."""

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from tempfile import mkstemp
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from blake3 import blake3

from postroom.adapters.files.durable import sync
from postroom.application.mailbox.records import SCAN_POSITIONS
from postroom.application.ports.log_archive import Segment
from postroom.domain.commit import Commit, IndexEntry, chained
from postroom.domain.errors import BrokenLog, Unavailable
from postroom.domain.message import MessageAcked, MessageDeadLettered, MessageExpired, MessageSent
from postroom.projections.commit_columns import to_batches
from postroom.projections.log_columns import EVENT_COLUMNS
from postroom.projections.log_extent import LogExtent

FORMAT = "2"
ROW_GROUP_ROWS = 10_000
READ_ROWS = 2_000
_NAME = re.compile(r"(\d{13})-(\d{13})\.parquet")
_TEMPORARY = ".tmp"

_LAST, _COMMIT = pa.field("last", pa.int64()), pa.field("commit", pa.binary())
_COLUMNS = ("position", *EVENT_COLUMNS)
_REQUIRED = ("position", "stream", "version", "epoch", "event", "at", "chain")
_WIDTHS = {"stream": 16, "chain": 32}
SCHEMA = pa.schema(
    [
        pa.field("position", pa.int64(), nullable=False),
        *(
            pa.field(
                name,
                pa.binary(_WIDTHS[name]) if name in _WIDTHS else column.arrow,
                nullable=name not in _REQUIRED,
            )
            for name, column in EVENT_COLUMNS.items()
        ),
        _LAST,
        _COMMIT,
    ]
)
"""One row for each event, with the columns that log readers provide.

`at`, `due` and `expires_at` are log time in µs, `timestamp` is in ms, all UTC. The first event of a commit
has the commit's last position and its encoded events, from which the other columns were made.
"""

_REPEATING = ["event", "topic", "reason", "consumer", "content_type", "schema_url", "schema_version"]
_REPEATING += ["encryption", "principal", "namespace", "custom_headers"]
_INDEX_COLUMNS = ("stream", "version", "position", "event")
_ENDS = {each.__name__ for each in (MessageAcked, MessageDeadLettered, MessageExpired)}
_encode_envelopes = msgspec.msgpack.Encoder().encode


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

    def store(self, mailbox: str, commits: Sequence[Commit], before: bytes | None) -> Segment:
        """Store commits as one file; see `LogArchive.store`."""
        segment = Segment(mailbox, commits[0].first, commits[-1].last, before, commits[-1].chain)
        folder = self._folder / mailbox
        table = _table(segment, commits)
        with _unavailable(folder, "written"):
            _make_folder(folder)
            _remove_unfinished(folder)
            _write(table, folder / _name(segment.first, segment.last))
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

    def commits(self, mailbox: str, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
        """Yield the commits of all files, each once, verified; see `LogArchive.commits`."""
        previous: Segment | None = None
        for file in self.files(mailbox):
            if file.last <= after:
                continue
            segment = _segment(mailbox, file)
            if previous is not None:
                _check_continues(segment, previous, file)
            for commit in _verified(segment, file, envelopes=envelopes):
                if previous is not None and not _same_history(commit, previous):
                    raise _another_history(segment, file)
                if commit.last > after:
                    yield commit
                    after = commit.last
            previous = segment

    def commits_of(self, mailbox: str, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        """Return the commits that hold these positions; see `LogArchive.commits_of`."""
        wanted = sorted(set(positions))
        commits: list[Commit] = []
        for part in self.parts(mailbox) if wanted else ():
            selected = [position for position in wanted if part.first <= position <= part.last]
            if selected:
                heads = list(_rows(part, ["position", "last"], pc.field("last").is_valid()))
                firsts = [first for first, _ in heads]
                found = dict(heads[bisect_right(firsts, each) - 1] for each in selected)
                held = [each for first, last in found.items() for each in range(first, last + 1)]
                is_held = pc.field("position").isin(held)
                commits += _commits(part, is_held, envelopes=envelopes)
        return commits

    def index_of(self, mailbox: str, streams: Iterable[bytes]) -> list[IndexEntry]:
        """Return the entries of streams; see `LogArchive.index_of`."""
        wanted = pa.array(set(streams), SCHEMA.field("stream").type)
        in_streams = pc.field("stream").isin(wanted)
        entries: dict[tuple[bytes, int, int], IndexEntry] = {}
        sent: dict[bytes, IndexEntry] = {}
        for part in self.parts(mailbox) if len(wanted) else []:
            for stream, version, position, event in _rows(part, _INDEX_COLUMNS, in_streams):
                if event == MessageSent.__name__ or not event.startswith("Message"):
                    sent[stream] = entries[stream, version, position] = IndexEntry(stream, version, position)
                elif stream in sent and event in _ENDS and position > sent[stream].position + SCAN_POSITIONS:
                    entries[sent[stream][:3]] = sent[stream]._replace(last=position)
        return [entries[key] for key in sorted(entries)]

    def position_before(self, mailbox: str, at: int) -> int:
        """Return the last position before log time `at`; see `LogArchive.position_before`."""
        is_before = (pc.field("at") < at) & pc.field("last").is_valid()
        for part in reversed(self.parts(mailbox)):  # log time never decreases
            before = [position for (position,) in _rows(part, ["last"], is_before)]
            if before:
                return int(before[-1])
        return 0

    def verify(self, segment: Segment) -> None:
        """Compare the columns of a file with its commits; see `LogArchive.verify`."""
        path = self._folder / segment.mailbox / _name(segment.first, segment.last)
        for group in _grouped(_commits(Part(segment.first, segment.last, path))):
            with _unavailable(path, "read"):
                batches = scan(Part(group[0].first, group[-1].last, path), SCHEMA.names)
                stored = pa.Table.from_batches(batches, SCHEMA)
            position = _first_difference(stored, _rows_of(segment.mailbox, group))
            if position is not None:
                raise BrokenLog(
                    f"The archive file {path} differs at position {position} from the commit that it holds: "
                    "it was altered. Restore it from a backup.",
                    position,
                )

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
    """Yield columns of the events of a part in the order of their positions, not verified.

    Row groups and columns that can't match, by the statistics of the file, are not read.

    Arguments:
        where: an expression over the columns of `SCHEMA` that selects rows.
        rows: largest number of rows in a batch.

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


def _table(segment: Segment, commits: Sequence[Commit]) -> pa.Table:
    metadata = {
        "postroom.format": FORMAT,
        "postroom.mailbox": segment.mailbox,
        "postroom.first": str(segment.first),
        "postroom.last": str(segment.last),
        "postroom.chain": segment.chain.hex(),
    }
    if segment.before is not None:
        metadata["postroom.before"] = segment.before.hex()
    return _rows_of(segment.mailbox, commits).replace_schema_metadata(metadata)


def _rows_of(mailbox: str, commits: Sequence[Commit]) -> pa.Table:
    first = commits[0].first
    extent = LogExtent(0, mailbox, first, commits[-1].last, commits[-1].at)
    table = pa.Table.from_batches(to_batches(commits, extent, _COLUMNS))
    lasts: list[int | None] = [None] * table.num_rows
    encoded: list[bytes | None] = [None] * table.num_rows
    for commit in commits:
        lasts[commit.first - first] = commit.last
        encoded[commit.first - first] = commit.events
    table = table.append_column(_LAST, pa.array(lasts, _LAST.type))
    return table.append_column(_COMMIT, pa.array(encoded, _COMMIT.type)).cast(SCHEMA)


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


def _verified(segment: Segment, file: Part, *, envelopes: bool) -> Iterator[Commit]:
    """Yield the commits of one file, verified to be complete."""
    commits = _commits(file, envelopes=envelopes)
    chain, last = segment.before, segment.first - 1
    if chain is None:
        for commit in commits:  # the hash before the first commit is unknown
            yield commit
            chain, last = commit.chain, commit.last
            break
    try:
        for commit in chained(commits, chain or b"", last + 1):
            yield commit
            chain, last = commit.chain, commit.last
    except BrokenLog as error:
        message = f"The archive file {file.path} was altered. {error}"
        raise BrokenLog(message, error.position) from error
    if (last, chain) != (segment.last, segment.chain):
        raise _another_history(segment, file)


def _commits(part: Part, where: pc.Expression | None = None, *, envelopes: bool = True) -> Iterator[Commit]:
    """Yield the commits of a part, not verified.

    Arguments:
        where: an expression that selects all rows of some commits.
    """
    columns = ["position", "last", "epoch", "at", "chain", "commit", *(["envelope"] if envelopes else [])]
    is_needed = pc.field("commit").is_valid()
    if envelopes:
        is_needed |= pc.field("envelope").is_valid()
    found: list[bytes] = []
    head: tuple[Any, ...] | None = None
    for row in _rows(part, columns, is_needed if where is None else where & is_needed):
        if row[5] is not None:
            if head is not None:
                yield _commit(head, found)
            head, found = row, []
        if envelopes and row[6] is not None:
            found.append(row[6])
    if head is not None:
        yield _commit(head, found)


def read_commits(part: Part, *, envelopes: bool = True) -> Iterator[Commit]:
    """Yield the commits that hold the positions of a part, not verified; see `LogArchive.commits`."""
    is_held = pc.field("last") >= part.first
    heads = list(_rows(Part(1, part.last, part.path), ["position", "last"], is_held))
    if heads:
        yield from _commits(Part(heads[0][0], heads[-1][1], part.path), envelopes=envelopes)


def _grouped(commits: Iterable[Commit]) -> Iterator[list[Commit]]:
    group: list[Commit] = []
    for commit in commits:
        group.append(commit)
        if commit.last - group[0].first >= READ_ROWS:
            yield group
            group = []
    if group:
        yield group


def _first_difference(stored: pa.Table, expected: pa.Table) -> int | None:
    """Return the first position at which a row or the hash of its envelope differs, or None."""
    if not stored.equals(expected):
        rows = zip_longest(stored.to_pylist(), expected.to_pylist(), fillvalue={})
        return next(int((row or other)["position"]) for row, other in rows if row != other)
    names = ("position", "envelope", "envelope_hash")
    columns = (stored[name].to_pylist() for name in names)
    for position, envelope, envelope_hash in zip(*columns, strict=True):
        if envelope is not None and blake3(envelope).digest() != envelope_hash:
            return int(position)
    return None


def _commit(head: tuple[Any, ...], envelopes: list[bytes]) -> Commit:
    return Commit(*head[:6], _encode_envelopes(envelopes) if envelopes else b"")


def _same_history(commit: Commit, previous: Segment) -> bool:
    """Return whether overlapping segments contain the same commit at the end of the earlier one."""
    if not commit.first <= previous.last <= commit.last:
        return True
    return (commit.last, commit.chain) == (previous.last, previous.chain)


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
