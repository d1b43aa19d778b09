"""Segments: copies of commits in the archive, written before retention removes them from the log."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from postroom.application.mailbox.archived_log import another_history, continues
from postroom.application.ports.event_log import CommitReader, EventLogReader, LogArchive, Segment
from postroom.application.telemetry import logger
from postroom.domain.commit import GENESIS, Commit, verify_chain
from postroom.domain.errors import Unavailable

SEGMENT_POSITIONS = 50_000
SEGMENT_BYTES = 64 << 20
"""Maximum size of a segment, in bytes of envelopes; bounds memory usage."""


class _End(NamedTuple):
    """End of the archive; `chain` is None if the commit was removed without being archived."""

    position: int
    chain: bytes | None


class BuiltSegments(msgspec.Struct, frozen=True):
    """The segments of a mailbox after a build.

    Arguments:
        added: how many segments were added.
        last: last position of all segments, or 0.
        remaining: how many records only the log has.
    """

    mailbox: str
    added: int
    last: int
    remaining: int


def build_closed_segments(
    log: EventLogReader,
    archive: LogArchive,
    *,
    is_whole: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> BuiltSegments:
    """Store the closed part of a log: the commits that fill whole segments.

    Arguments:
        is_whole: store the rest of the log, too, in a smaller segment.
        progress: called with the position after each segment.

    Raises: see `build_segments`.
    """
    added, head = 0, log.head()
    for segment in build_segments(log, archive, head.position if is_whole and head is not None else None):
        added += 1
        progress(segment.last)
    archive.update_manifest(log.mailbox)
    end, head = archive.last_segment(log.mailbox), log.head()
    last = 0 if end is None else end.last
    return BuiltSegments(log.mailbox, added, last, 0 if head is None else max(0, head.position - last))


def build_segments(log: EventLogReader, archive: LogArchive, through: int | None = None) -> Iterator[Segment]:
    """Store the commits that the archive lacks, and yield each segment once it is durable.

    Segments that another process builds at the same time may overlap, which readers allow for. The next run
    continues an interrupted one.

    Arguments:
        through: the end of a commit, up to which all are stored; None for full segments only: the rest stays
            in the log until it fills one.

    Raises: BrokenLog when the log was altered; Unavailable when the archive can't be used or belongs to
        another log.
    """
    while True:
        end = _end(log, archive)
        if through is not None and end.position >= through:
            return
        commits, is_full = _next_commits(log, end.position, through)
        if commits and commits[0].first > end.position + 1:
            continue  # retention has archived and removed others in between
        if through is None and not is_full:
            return
        if not commits:
            raise Unavailable(
                f"The log of mailbox {log.mailbox} ends before position {through}, which should be archived; "
                "open the mailbox again."
            )
        # Commits whose chain does not verify are neither archived nor removed.
        if end.chain is None:
            verify_chain(commits[1:], commits[0].chain, commits[0].last + 1)
        else:
            verify_chain(commits, end.chain, end.position + 1)
        yield archive.store(log.mailbox, commits, end.chain)


def _end(log: EventLogReader, archive: LogArchive) -> _End:
    """Return the end of the archive, after checking that it belongs to this log."""
    while True:
        first = log.first_position()
        last = _last_without_gap(archive.segments(log.mailbox), first)
        if last is None:
            return _End((first or 1) - 1, GENESIS if first in (1, None) else None)
        if first is None:
            return _End(last.last, last.chain)
        if last.last < first - 1:
            logger().warning("archive.gap", mailbox=log.mailbox, after=last.last, before=first)
            return _End(first - 1, None)
        held = log.commits_of([max(last.last, first)], envelopes=False)
        if held and continues(last.last, last.chain, held[0]):
            return _End(last.last, last.chain)
        if log.first_position() == first:  # else retention has archived and removed others in between
            raise another_history(log.mailbox, last.last)


def _last_without_gap(segments: Iterable[Segment], first: int | None) -> Segment | None:
    """Return the last segment before a gap whose positions the log still has, so that they are stored again.

    Arguments:
        first: first position of the log; None when it is empty.
    """
    last: Segment | None = None
    for segment in segments:
        end = (first or 1) - 1 if last is None else last.last
        if first is not None and segment.first > max(end + 1, first):
            break
        if last is None or segment.last > last.last:
            last = segment
    return last


def _next_commits(log: EventLogReader, after: int, through: int | None) -> tuple[list[Commit], bool]:
    """Return the next commits that fill a segment or end at `through`, and whether they fill it.

    There is at least one commit if any follows.
    """
    commits: list[Commit] = []
    size = 0
    for commit in log.commits(after):
        size += len(commit.envelopes)
        is_full = size > SEGMENT_BYTES or commit.last - after > SEGMENT_POSITIONS
        if commits and is_full:
            return commits, True
        if through is not None and commit.last > through:
            break
        commits.append(commit)
    return commits, False


def ends_with(log: CommitReader, position: int, chain: bytes) -> bool:
    """Return whether a commit with this chain hash ends at a position of the log."""
    return any(
        (commit.last, commit.chain) == (position, chain)
        for commit in log.commits_of([position], envelopes=False)
    )


def last_commit_through(log: CommitReader, position: int) -> Commit | None:
    """Return the last commit that ends at or before a position, without envelopes, or None.

    Arguments:
        position: at most the position of the log's end.
    """
    for commit in log.commits_of([position], envelopes=False):
        if commit.last == position:
            return commit
        return next(iter(log.commits_of([commit.first - 1], envelopes=False)), None)
    return None
