"""The log archive port over a folder of Parquet files, one per segment (ADR 0012)."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec.structs import replace

from postroom.adapters.parquet.segment_files import (
    READ_ROWS,
    SCHEMA,
    Part,
    commits_where,
    events_at,
    file_columns,
    first_difference,
    make_folder,
    read_table,
    remove_unfinished,
    select,
    to_rows,
    to_table,
    unavailable,
    write,
)
from postroom.adapters.parquet.sent_columns import (
    EVENTS,
    SENT_COLUMNS,
    STEP_COLUMNS,
    first_wrong_sent,
)
from postroom.application.mailbox.records import SCAN_POSITIONS
from postroom.application.ports.event_log import LogArchive, Segment
from postroom.domain.commit import Commit, IndexEntry, chained
from postroom.domain.errors import BrokenLog
from postroom.domain.message import MessageAcked, MessageDeadLettered, MessageExpired, MessageSent
from postroom.projections.log_reader import Range

_NAME = re.compile(r"(\d{13})-(\d{13})\.parquet")
_INDEX_COLUMNS = ("stream", "version", "position", "event")
_ENDS = {each.__name__ for each in (MessageAcked, MessageDeadLettered, MessageExpired)}


class ParquetLogArchive(LogArchive):
    """An archive of segments `{folder}/{mailbox}/{first}-{last}.parquet`, with file mode 0600.

    A temporary file is synced and renamed when it is complete. Its metadata contains the mailbox, the
    positions and the chain hashes at both ends, so that each file can be verified alone.

    Arguments:
        folder: created if it is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def store(self, mailbox: str, commits: Sequence[Commit], before: bytes | None) -> Segment:
        segment = Segment(mailbox, commits[0].first, commits[-1].last, before, commits[-1].chain)
        folder = self._folder / mailbox
        table = to_table(segment, commits, partial(self._events_at, mailbox))
        with unavailable(folder, "written"):
            make_folder(folder)
            remove_unfinished(folder)
            write(table, folder / _name(segment.first, segment.last))
        return segment

    def mailboxes(self) -> list[str]:
        with unavailable(self._folder, "read"):
            if not self._folder.is_dir():
                return []
            names = sorted(each.name for each in self._folder.iterdir() if "@" in each.name)
        return [name for name in names if self.files(name)]

    def segments(self, mailbox: str) -> list[Segment]:
        return [_segment(mailbox, file) for file in self.files(mailbox)]

    def last_segment(self, mailbox: str) -> Segment | None:
        last = max(self.files(mailbox), key=lambda file: file.last, default=None)
        return None if last is None else _segment(mailbox, last)

    def commits(self, mailbox: str, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
        previous: Segment | None = None
        for file in self.files(mailbox):
            if file.last <= after:
                continue
            segment = _segment(mailbox, file)
            if previous is not None:
                _check_continues(segment, previous, file)
            for commit in _verify_segment(segment, file, envelopes=envelopes):
                if previous is not None and not _same_history(commit, previous):
                    raise _another_history(segment, file)
                if commit.last > after:
                    yield commit
                    after = commit.last
            previous = segment

    def commits_of(self, mailbox: str, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        targets = sorted(set(positions))
        commits: list[Commit] = []
        for part in self.parts(mailbox) if targets else ():
            within = [position for position in targets if part.first <= position <= part.last]
            if within:
                heads = list(select(part, ["position", "last"], pc.field("last").is_valid()))
                firsts = [first for first, _ in heads]
                extents = dict(heads[bisect_right(firsts, each) - 1] for each in within)
                held = [
                    each for first, last in extents.items() for each in range(first, min(last, part.last) + 1)
                ]
                is_held = pc.field("position").isin(held)
                commits += commits_where(part, is_held, envelopes=envelopes)
        return commits

    def index_of(self, mailbox: str, streams: Iterable[bytes]) -> list[IndexEntry]:
        targets = pa.array(set(streams), SCHEMA.field("stream").type)
        in_streams = pc.field("stream").isin(targets)
        entries: dict[tuple[bytes, int], IndexEntry] = {}
        sent: dict[bytes, IndexEntry] = {}
        for part in self.parts(mailbox) if len(targets) else []:
            for stream, version, position, event in select(part, _INDEX_COLUMNS, in_streams):
                if event == MessageSent.__name__ or not event.startswith("Message"):
                    sent[stream] = entries[stream, position] = IndexEntry(stream, version, position)
                elif stream in sent and event in _ENDS and position > sent[stream].position + SCAN_POSITIONS:
                    entries[stream, sent[stream].position] = replace(sent[stream], last=position)
        return sorted(entries.values(), key=attrgetter("stream", "version", "position"))

    def position_before(self, mailbox: str, at: int) -> int:
        is_before = (pc.field("at") < at) & pc.field("last").is_valid()
        for part in reversed(self.parts(mailbox)):  # log time never decreases
            before = [position for (position,) in select(part, ["last"], is_before)]
            if before:
                return int(before[-1])
        return 0

    def verify(self, segment: Segment) -> None:
        path = self._folder / segment.mailbox / _name(segment.first, segment.last)
        columns = file_columns(path)
        names = [name for name in columns if name not in SENT_COLUMNS]
        for group in _group_commits(commits_where(Part(segment.first, segment.last, path))):
            stored = read_table(Part(group[0].first, group[-1].last, path), names)
            position = first_difference(
                stored, to_rows(segment.mailbox, group).select(names).cast(stored.schema)
            )
            if position is not None:
                raise _altered(path, position)
        if len(names) < len(columns):
            events = read_table(Part(segment.first, segment.last, path), [*STEP_COLUMNS, *SENT_COLUMNS])
            position = first_wrong_sent(events, partial(self._events_at, segment.mailbox))
            if position is not None:
                raise _altered(path, position)

    def size(self, segment: Segment) -> int:
        path = self._folder / segment.mailbox / _name(segment.first, segment.last)
        with unavailable(path, "read"):
            return path.stat().st_size

    def _events_at(self, mailbox: str, positions: pl.Series) -> pl.DataFrame:
        """Return archived events at sorted positions; see `sent_columns`."""
        parts = self.parts(mailbox, positions[0], positions[-1])
        frames = [
            events_at(part, within)
            for part in parts
            if (within := positions.filter(positions.is_between(part.first, part.last))).len()
        ]
        return pl.concat(frames) if frames else pl.DataFrame(schema=EVENTS)

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

    def divide(self, ranges: Iterable[Range]) -> tuple[list[str], dict[str, list[tuple[int, int]]]]:
        """Return the files of this format that lie within ranges, and the other positions by mailbox."""
        files: list[str] = []
        rest: dict[str, list[tuple[int, int]]] = {}
        for extent, first, last in ranges:
            for file in self.files(extent.name):
                if first <= file.first and file.last <= last and "sent_position" in file_columns(file.path):
                    if first < file.first:
                        rest.setdefault(extent.name, []).append((first, file.first - 1))
                    files.append(str(file.path))
                    first = file.last + 1
            if first <= last:
                rest.setdefault(extent.name, []).append((first, last))
        return files, rest

    def files(self, mailbox: str) -> list[Part]:
        """Return the files of a mailbox in the order of their positions; they may overlap."""
        folder = self._folder / mailbox
        with unavailable(folder, "read"):
            names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
        matches = (_NAME.fullmatch(name) for name in names)
        return sorted(Part(int(m[1]), int(m[2]), folder / m[0]) for m in matches if m is not None)


def _name(first: int, last: int) -> str:
    return f"{first:013d}-{last:013d}.parquet"


def _segment(mailbox: str, file: Part) -> Segment:
    with unavailable(file.path, "read"):
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


def _altered(path: Path, position: int) -> BrokenLog:
    return BrokenLog(
        f"The archive file {path} differs at position {position} from the commit that it holds: "
        "it was altered. Restore it from a backup.",
        position,
    )


def _verify_segment(segment: Segment, file: Part, *, envelopes: bool) -> Iterator[Commit]:
    """Yield the commits of one file, verified to be complete."""
    commits = commits_where(file, envelopes=envelopes)
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


def _group_commits(commits: Iterable[Commit]) -> Iterator[list[Commit]]:
    group: list[Commit] = []
    for commit in commits:
        group.append(commit)
        if commit.last - group[0].first >= READ_ROWS:
            yield group
            group = []
    if group:
        yield group


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
