"""`VerifyArchive`: verify that a mailbox's archive is complete, unaltered and continued by its log."""

from collections.abc import Callable

import msgspec

from postroom.application.mailbox.archived_log import check_history
from postroom.application.mailbox.codec import to_records
from postroom.application.ports.event_log import EventLogReader, LogArchive
from postroom.application.queries.verify import check_message

PROGRESS_EVENTS = 10_000


class Gap(msgspec.Struct, frozen=True):
    """First and last position of a gap: positions that neither the archive nor the log has."""

    first: int
    last: int


class ArchiveVerification(msgspec.Struct, frozen=True):
    """The verified events of an archive, `first` to `last` without `gaps`.

    Arguments:
        segments, records: the numbers of segments and events; an event in several segments counts once.
        chain: hash of the last commit, as hex.
        log_first: first position of the mailbox's log; None when it is empty or was not compared.
    """

    mailbox: str
    first: int
    last: int
    segments: int
    records: int
    chain: str
    log_first: int | None
    gaps: list[Gap]


class VerifyArchive:
    """A verification of every hash of a mailbox's archive, and of its continuation by the log."""

    def __init__(self, archive: LogArchive) -> None:
        self._archive = archive

    def __call__(
        self,
        mailbox: str,
        log: EventLogReader | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> ArchiveVerification | None:
        """Return the verification, or None when nothing is archived.

        Arguments:
            log: the mailbox's log, if it exists.
            progress: called with the position, about every 10,000 events.

        Raises: BrokenLog when events are missing or altered, Unavailable when the log differs.
        """
        log_first = None if log is None else log.first_position()
        end = self._archive.last_segment(mailbox)
        if end is None:
            return None
        self._archive.check_files(mailbox)
        gaps: list[Gap] = []
        first = last = count = 0
        for commit in self._archive.commits(mailbox):
            if count and commit.first > last + 1:
                gaps.append(Gap(last + 1, commit.first - 1))
            for record in to_records(commit):
                check_message(record)
            if (count + commit.event_count) // PROGRESS_EVENTS > count // PROGRESS_EVENTS:
                progress(commit.last)
            first, last, count = first or commit.first, commit.last, count + commit.event_count
        if log is not None:
            check_history(log, self._archive)
        if log_first is not None and log_first > last + 1:
            gaps.append(Gap(last + 1, log_first - 1))
        segments = self._archive.segments(mailbox)
        for segment in segments:
            self._archive.verify(segment)
        return ArchiveVerification(
            mailbox, first, last, len(segments), count, end.chain.hex(), log_first, gaps
        )
