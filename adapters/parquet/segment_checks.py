"""Checks of segments' files: their metadata, chain, columns and bytes."""

from collections.abc import Iterable, Iterator

import pyarrow.parquet as pq
from blake3 import blake3

from postroom.adapters.parquet.archive_folder import NAME as MANIFEST
from postroom.adapters.parquet.archive_folder import Entry, is_named
from postroom.adapters.parquet.segment_files import (
    EVENTS,
    FORMAT,
    FORMAT_2,
    ROW_GROUP_ROWS,
    SCHEMA,
    EventsAt,
    Part,
    commits_where,
    first_difference,
    first_wrong_sent,
    read_table,
    to_rows,
)
from postroom.application.ports.event_log import Segment
from postroom.domain.commit import Commit, chained
from postroom.domain.errors import BrokenLog, InvalidRequest
from postroom.projections.projection import SENT_COLUMNS


def segment_of(mailbox: str, file: Part) -> Segment:
    """Return the segment of a file from its metadata; `file` may be a part of the file.

    Raises: BrokenLog when `file` and the metadata do not match.
    """
    with file.unavailable():
        metadata = pq.read_schema(file.path, filesystem=file.folder.files).metadata or {}
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
    if segment is None or segment.mailbox != mailbox or not is_named(file.name, segment.first, segment.last):
        raise BrokenLog(
            f"The metadata of the archive file {file.path} does not describe positions {file.first} to "
            f"{file.last} of mailbox {mailbox}: it was renamed or not written by Postroom. Restore it from a "
            "backup.",
            file.first,
        )
    return segment


def check_columns(mailbox: str, file: Part, events_at: EventsAt) -> None:
    """Check that the columns of a file equal its commits.

    Arguments:
        events_at: see `sent_columns`.

    Raises: BrokenLog naming the first position at which they differ.
    """
    names = [name for name in SCHEMA.names if file.format == FORMAT or name in FORMAT_2]
    without_sent = [name for name in names if name not in SENT_COLUMNS]
    for group in _group_commits(commits_where(file)):
        stored = read_table(file._replace(first=group[0].first, last=group[-1].last), without_sent)
        position = first_difference(stored, to_rows(mailbox, group).select(without_sent).cast(stored.schema))
        if position is not None:
            raise _altered(file, position)
    if file.format == FORMAT:
        position = first_wrong_sent(read_table(file, list(EVENTS)), events_at)
        if position is not None:
            raise _altered(file, position)


def check_content(mailbox: str, file: Part, entry: Entry) -> None:
    """Check the bytes of a file.

    Raises: BrokenLog when the bytes or the metadata differ from the manifest's entry.
    """
    is_same = blake3(file.folder.read(file.path)).hexdigest() == entry.blake3
    if not is_same or segment_of(mailbox, file) != entry.segment(mailbox):
        raise changed(file.path, entry)


def changed(path: str, entry: Entry) -> BrokenLog:
    """Return the error for a file that was changed after it was written."""
    return BrokenLog(
        f"The archive file {path} of positions {entry.first} to {entry.last} is not the one that the "
        f"{MANIFEST} beside it lists: it was altered. Restore it from a backup.",
        entry.first,
    )


def later_format(path: str, format_: int) -> InvalidRequest:
    """Return the error for a file that a later release has written."""
    return InvalidRequest(
        f"The archive file {path} has format {format_}, of a later release; this one reads formats up to "
        f"{FORMAT}. Upgrade Postroom."
    )


def uncompressed(file: Part) -> int:
    """Return the size of a file's columns in memory, in bytes."""
    with file.unavailable():
        metadata = pq.read_metadata(file.path, filesystem=file.folder.files)
    return sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))


def is_covered(first: int, last: int, files: Iterable[Part]) -> bool:
    """Return whether files, in the order of positions, contain all positions from `first` to `last`."""
    for file in files:
        if file.first <= first <= file.last:
            first = file.last + 1
    return first > last


def _altered(file: Part, position: int) -> BrokenLog:
    return BrokenLog(
        f"The archive file {file.path} differs at position {position} from the commit that it holds: "
        "it was altered. Restore it from a backup.",
        position,
    )


def verified_commits(segment: Segment, file: Part, *, envelopes: bool) -> Iterator[Commit]:
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
        raise another_history(segment, file)


def _group_commits(commits: Iterable[Commit]) -> Iterator[list[Commit]]:
    group: list[Commit] = []
    for commit in commits:
        group.append(commit)
        if commit.last - group[0].first >= ROW_GROUP_ROWS:
            yield group
            group = []
    if group:
        yield group


def is_same_history(commit: Commit, previous: Segment) -> bool:
    """Return whether overlapping segments contain the same commit at the end of the earlier one."""
    if not commit.first <= previous.last <= commit.last:
        return True
    return (commit.last, commit.chain) == (previous.last, previous.chain)


def check_continues(segment: Segment, previous: Segment, file: Part) -> None:
    """Check that a segment follows the previous one, or was archived after a gap.

    Raises: BrokenLog when it does not.
    """
    if segment.first == previous.last + 1 and segment.before not in (None, previous.chain):
        raise another_history(segment, file)
    if segment.first > previous.last + 1 and segment.before is not None:
        raise BrokenLog(
            f"The archive {file.path.rpartition('/')[0]} lacks positions {previous.last + 1} to "
            f"{segment.first - 1}: a file was removed. Restore it from a backup.",
            previous.last + 1,
        )


def another_history(segment: Segment, file: Part) -> BrokenLog:
    """Return the error for a file whose commits differ from its metadata or from its neighbours."""
    return BrokenLog(
        f"The archive file {file.path} does not match the hashes of the files before it or its own last "
        "hash: it was altered or comes from another store. Restore it from a backup.",
        segment.first,
    )


def split_merged(files: Iterable[Part]) -> tuple[list[Part], list[tuple[Part, Part]]]:
    """Return a mailbox's files, and pairs of a replaced file and the larger or newer one that replaces it."""
    remaining: list[Part] = []
    merged: list[tuple[Part, Part]] = []
    for file in sorted(files, key=lambda each: (each.first, -each.last, -each.format)):
        if remaining and file.last <= remaining[-1].last:
            merged.append((file, remaining[-1]))
        else:
            remaining.append(file)
    return remaining, merged


MERGED_POSITIONS = 500_000
MERGED_BYTES = 128 << 20
MERGED_UNCOMPRESSED_BYTES = 256 << 20
"""Maximum size of a merged file, in positions and bytes; the last bounds memory usage."""


def groups_to_merge(files: Iterable[Part]) -> list[list[Part]]:
    """Return the neighbouring files that one file should replace.

    Files of former formats are replaced even if they are alone.

    Arguments:
        files: files of a mailbox, in the order of positions.
    """
    groups: list[list[Part]] = []
    for file in files:
        group = groups[-1] if groups else []
        is_next = bool(group) and file.first <= group[-1].last + 1
        size = sum(each.size for each in group) + file.size
        fits = is_next and file.last - group[0].first < MERGED_POSITIONS and size <= MERGED_BYTES
        if fits and sum(map(uncompressed, (*group, file))) <= MERGED_UNCOMPRESSED_BYTES:
            group.append(file)
        else:
            groups.append([file])
    return [group for group in groups if len(group) > 1 or group[0].format != FORMAT]
