"""Archiving: stores commits in consecutive segments before retention removes them."""

import asyncio
from typing import NamedTuple

from postroom.application.mailbox.archived_log import continues
from postroom.application.ports.event_log import EventLogReader
from postroom.application.ports.log_archive import LogArchive
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


async def archive_records(log: EventLogReader, archive: LogArchive, through: int) -> int:
    """Store the commits up to a position that the archive lacks, off the event loop.

    The next run continues an interrupted one.

    Arguments:
        through: the end of a commit.

    Returns: the number of positions that were added.

    Raises: BrokenLog when the log was altered; Unavailable when the archive can't be used or belongs to
        another log.
    """
    end = await asyncio.to_thread(_end, log, archive, through)
    began = end.position
    while end.position < through:
        end = await asyncio.to_thread(_store_next, log, archive, end, through)
    return max(0, end.position - began)


def _end(log: EventLogReader, archive: LogArchive, through: int) -> _End:
    """Return the end of the archive, after checking that it belongs to this log."""
    first = log.first_position() or 1
    last = archive.last_segment(log.mailbox)
    if last is None:
        return _End(first - 1, GENESIS if first == 1 else None)
    if last.last < first - 1:
        if first <= through:
            logger().warning("archive.gap", mailbox=log.mailbox, after=last.last, before=first)
        return _End(first - 1, None)
    if not _continues(log, last.last, last.chain, first):
        raise Unavailable(
            f"The archive of mailbox {log.mailbox} ends at position {last.last} with another history than "
            "the log holds; name another archive folder for this store."
        )
    return _End(last.last, last.chain)


def _continues(log: EventLogReader, position: int, chain: bytes, first: int) -> bool:
    """Return whether the log holds the commit with this chain hash, or the one that follows it."""
    held = log.commits_of([max(position, first)], envelopes=False)
    return bool(held) and continues(position, chain, held[0])


def _store_next(log: EventLogReader, archive: LogArchive, end: _End, through: int) -> _End:
    commits = _next_commits(log, end.position, through)
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
    segment = archive.store(log.mailbox, commits, end.chain)
    return _End(segment.last, segment.chain)


def _next_commits(log: EventLogReader, after: int, through: int) -> list[Commit]:
    """Return the next commits that end at or before `through`, at least one if there is any."""
    commits: list[Commit] = []
    size = 0
    for commit in log.commits(after):
        size += len(commit.envelopes)
        is_full = size > SEGMENT_BYTES or commit.last - after > SEGMENT_POSITIONS
        if commit.last > through or (commits and is_full):
            break
        commits.append(commit)
    return commits
