"""The log archive port over a folder of Parquet files, one per segment (ADR 0012, ADR 0125)."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial, wraps
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from time import time
from typing import ParamSpec, TypeVar

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from postroom.adapters.parquet.archive_folder import NAME as MANIFEST
from postroom.adapters.parquet.archive_folder import (
    ArchiveFolder,
    Entry,
    FileGone,
    read_manifest,
    write_manifest,
)
from postroom.adapters.parquet.segment_checks import (
    another_history,
    changed,
    check_columns,
    check_content,
    check_continues,
    groups_to_merge,
    is_covered,
    is_same_history,
    later_format,
    segment_of,
    split_merged,
    verified_commits,
)
from postroom.adapters.parquet.segment_files import (
    EVENTS,
    FORMAT,
    SCHEMA,
    Part,
    commits_where,
    encode,
    events_at,
    select,
    to_table,
)
from postroom.application.mailbox.records import SCAN_POSITIONS
from postroom.application.ports.event_log import LogArchive, Segment
from postroom.domain.commit import Commit, IndexEntry
from postroom.domain.errors import BrokenLog
from postroom.domain.message import MessageAcked, MessageDeadLettered, MessageExpired, MessageSent
from postroom.projections.log_reader import Range

_NAME = re.compile(r"(\d{13})-(\d{13})(?:\.v(\d+))?\.parquet")
_FIRST_FORMATS = 2
"""Format of files whose names state no format."""
_INDEX_COLUMNS = ("stream", "version", "position", "event")
_ENDS = {each.__name__ for each in (MessageAcked, MessageDeadLettered, MessageExpired)}
KEEP_MERGED_SECONDS = 3_600
"""How long merged files remain, for readers such as Spark that do not look them up again."""
TRIES = 10
"""How often files are looked up again that were merged in between."""

P = ParamSpec("P")
T = TypeVar("T")


def _look_up_again(method: Callable[P, T]) -> Callable[P, T]:
    """Repeat a method while compaction removes files that it has looked up."""

    @wraps(method)
    def repeat(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(TRIES):
            with suppress(FileGone):
                return method(*args, **kwargs)
        return method(*args, **kwargs)

    return repeat


class ParquetLogArchive(LogArchive):
    """An archive of segments `{folder}/{mailbox}/{first}-{last}.v3.parquet`.

    The metadata of a file contains the mailbox, the positions and the chain hashes at both ends, so that each
    file can be verified alone; `manifest.json` lists the files of a mailbox with their hashes.

    Arguments:
        folder: path, or URL of an object store; created if it is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = ArchiveFolder(folder)

    def store(self, mailbox: str, commits: Sequence[Commit], before: bytes | None) -> Segment:
        segment = Segment(mailbox, commits[0].first, commits[-1].last, before, commits[-1].chain)
        name = f"{segment.first:013d}-{segment.last:013d}.v{FORMAT}.parquet"
        content = encode(to_table(segment, commits, partial(self._events_at, mailbox)))
        self._folder.write(self._folder.path(mailbox, name), content)
        self._change_manifest(mailbox, [Entry.of(name, segment, content)])
        return segment

    def mailboxes(self) -> list[str]:
        folders = self._folder.list()
        names = sorted(each.base_name for each in folders if "@" in each.base_name)
        return [name for name in names if self.files(name)]

    def segments(self, mailbox: str) -> list[Segment]:
        return [segment for _, segment in self.segment_files(mailbox)]

    @_look_up_again
    def segment_files(self, mailbox: str) -> list[tuple[Part, Segment]]:
        """Return the files of a mailbox, each with its segment, in the order of their positions."""
        entries = read_manifest(self._folder, mailbox).by_name
        return [
            (file, entries[file.name].segment(mailbox) if file.name in entries else segment_of(mailbox, file))
            for file in self.files(mailbox)
        ]

    @_look_up_again
    def last_segment(self, mailbox: str) -> Segment | None:
        last = max(self.files(mailbox), key=lambda file: file.last, default=None)
        return None if last is None else segment_of(mailbox, last)

    def commits(self, mailbox: str, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
        previous: Segment | None = None
        tries = TRIES
        while file := next((each for each in self.files(mailbox) if each.last > after), None):
            try:
                segment = segment_of(mailbox, file)
                if previous is not None:
                    check_continues(segment, previous, file)
                for commit in verified_commits(segment, file, envelopes=envelopes):
                    if previous is not None and not is_same_history(commit, previous):
                        raise another_history(segment, file)
                    if commit.last > after:
                        yield commit
                        after = commit.last
                previous, tries = segment, TRIES
            except FileGone:  # compaction has merged it
                tries -= 1
                if not tries:
                    raise

    @_look_up_again
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

    @_look_up_again
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

    @_look_up_again
    def position_before(self, mailbox: str, at: int) -> int:
        is_before = (pc.field("at") < at) & pc.field("last").is_valid()
        for part in reversed(self.parts(mailbox)):  # log time never decreases
            before = [position for (position,) in select(part, ["last"], is_before)]
            if before:
                return int(before[-1])
        return 0

    def verify(self, segment: Segment) -> None:
        for file in self.files(segment.mailbox):
            if (file.first, file.last) == segment[1:3]:
                check_columns(segment.mailbox, file, partial(self._events_at, segment.mailbox))

    @_look_up_again
    def check_files(self, mailbox: str) -> None:
        files = self.files(mailbox)
        by_name = {file.name: file for file in files}
        for entry in read_manifest(self._folder, mailbox).segments:
            if file := by_name.get(entry.file):
                check_content(mailbox, file, entry)
            elif not is_covered(entry.first, entry.last, files):
                raise BrokenLog(
                    f"The archive lacks the file {self._folder.path(mailbox, entry.file)}, which the "
                    f"{MANIFEST} beside it lists. Restore it from a backup; if you moved it elsewhere, "
                    "delete that list, and `postroom segments build` writes a new one.",
                    entry.first,
                )

    def check_file(self, mailbox: str, file: Part) -> None:
        """Check the bytes of a file, if the manifest lists it.

        Raises: BrokenLog when they are not those that were written.
        """
        entry = read_manifest(self._folder, mailbox).by_name.get(file.name)
        if entry is not None:
            check_content(mailbox, file, entry)

    def size(self, segment: Segment) -> int:
        sizes = (
            each.size for each in self._all_files(segment.mailbox) if (each.first, each.last) == segment[1:3]
        )
        return next(sizes, 0)

    @_look_up_again
    def update_manifest(self, mailbox: str) -> None:
        files, merged = split_merged(self._all_files(mailbox))
        entries = read_manifest(self._folder, mailbox).by_name
        names = {file.name for file in files}
        added = [
            Entry.of(file.name, segment_of(mailbox, file), self._folder.read(file.path))
            for file in files
            if file.name not in entries
        ]
        replaced = [
            entry.file
            for entry in entries.values()
            if entry.file not in names and is_covered(entry.first, entry.last, files)
        ]
        if added or replaced:
            self._change_manifest(mailbox, added, replaced)
        for file, larger in merged:
            if larger.modified + KEEP_MERGED_SECONDS <= time():
                self._check_copied(mailbox, file)
                self._folder.remove(file.path)

    def compact(self, mailbox: str, progress: Callable[[int], None] = lambda _: None) -> int:
        merged = 0
        for group in groups_to_merge(self.files(mailbox)):
            self._merge(mailbox, group[0].first, max(file.last for file in group))
            merged += len(group)
            progress(group[-1].last)
        self.update_manifest(mailbox)
        return merged

    @_look_up_again
    def _merge(self, mailbox: str, first: int, last: int) -> None:
        """Write a file with the positions of several neighbouring files."""
        file = next((each for each in self.files(mailbox) if each.first == first), None)
        if file is not None:  # otherwise another process has merged the files
            segment = segment_of(mailbox, file)
            commits = takewhile(lambda commit: commit.first <= last, self.commits(mailbox, first - 1))
            self.store(mailbox, list(commits), segment.before)

    def _check_copied(self, mailbox: str, file: Part) -> None:
        """Check that a larger file has the last commit of a file, and so all its commits."""
        segment = segment_of(mailbox, file)
        (commit,) = self.commits_of(mailbox, [file.last], envelopes=False)
        if (commit.last, commit.chain) != (segment.last, segment.chain):
            raise another_history(segment, file)

    def _change_manifest(
        self, mailbox: str, added: Sequence[Entry] = (), removed: Sequence[str] = ()
    ) -> None:
        manifest = read_manifest(self._folder, mailbox)
        write_manifest(self._folder, manifest.with_changes(added, removed))

    @_look_up_again
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
                parts.append(file._replace(first=start, last=end))
                first = end + 1
        return parts

    def divide(self, ranges: Iterable[Range]) -> tuple[list[str], dict[str, list[tuple[int, int]]]]:
        """Return the files of this format that lie within ranges, and the other positions by mailbox.

        Raises: BrokenLog when a file belongs to another mailbox.
        """
        files: list[str] = []
        rest: dict[str, list[tuple[int, int]]] = {}
        for extent, first, last in ranges:
            for file in self.files(extent.name):
                if first <= file.first and file.last <= last and file.format == FORMAT:
                    segment_of(extent.name, file)
                    if first < file.first:
                        rest.setdefault(extent.name, []).append((first, file.first - 1))
                    files.append(self._folder.url(file.path))
                    first = file.last + 1
            if first <= last:
                rest.setdefault(extent.name, []).append((first, last))
        return files, rest

    def files(self, mailbox: str) -> list[Part]:
        """Return the files of a mailbox in the order of their positions; they may overlap.

        Raises: BrokenLog when the size of a file is not the one in the manifest.
        """
        return split_merged(self._all_files(mailbox))[0]

    def _all_files(self, mailbox: str) -> list[Part]:
        infos = self._folder.list(mailbox)
        # Read the manifest after the list, so that it has the new files of the list.
        entries = read_manifest(self._folder, mailbox).by_name if infos else {}
        files = []
        for info in infos:
            if info.is_file and (match := _NAME.fullmatch(info.base_name)):
                entry = entries.get(info.base_name)
                if entry is not None and entry.bytes != info.size:
                    raise changed(info.path, entry)
                format_ = int(match[3] or _FIRST_FORMATS)
                if format_ > FORMAT:
                    raise later_format(info.path, format_)
                modified = (info.mtime_ns or 0) / 1e9
                positions = int(match[1]), int(match[2])
                files.append(Part(*positions, info.path, self._folder, format_, info.size, modified))
        return files
