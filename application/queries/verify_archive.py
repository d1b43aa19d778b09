"""`VerifyArchive`: check that nothing archived of a mailbox was lost or altered, and that its log goes on."""

from collections.abc import Callable

import msgspec

from postroom.application.archived_log import check_history
from postroom.application.ports.event_log import EventLog
from postroom.application.ports.log_archive import LogArchive

PROGRESS_RECORDS = 10_000


class Gap(msgspec.Struct, frozen=True):
    """Positions, both included, that neither archive nor log holds: they went without being archived."""

    first: int
    last: int


class ArchiveVerification(msgspec.Struct, frozen=True):
    """What was checked of an archive: its records from `first` to `last`, all but those in `gaps`.

    Arguments:
        segments, records: how many there are; what is in several segments counts once.
        chain: hash of the last record, as hex.
        log_first: where the mailbox's log begins; None when it is empty or there is none to compare with.
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
    """Recompute every hash of what is archived of a mailbox, and compare its end with the mailbox's log."""

    def __init__(self, archive: LogArchive) -> None:
        self._archive = archive

    def __call__(
        self, mailbox: str, log: EventLog | None = None, progress: Callable[[int], None] = lambda _: None
    ) -> ArchiveVerification | None:
        """Return what was found, or None where nothing is archived.

        Arguments:
            log: of the same mailbox, where there is one.
            progress: is told the position reached, every 10,000 records.

        Raises: BrokenLog when something was lost or altered, Unavailable when the log has another history.
        """
        log_first = None if log is None else log.first_position()
        end = self._archive.last_segment(mailbox)
        if end is None:
            return None
        gaps: list[Gap] = []
        first = last = count = 0
        for record in self._archive.read(mailbox):
            if count and record.position > last + 1:
                gaps.append(Gap(last + 1, record.position - 1))
            first, last, count = first or record.position, record.position, count + 1
            if count % PROGRESS_RECORDS == 0:
                progress(last)
        if log is not None:
            check_history(log, self._archive)
        if log_first is not None and log_first > last + 1:
            gaps.append(Gap(last + 1, log_first - 1))
        segments = len(self._archive.segments(mailbox))
        return ArchiveVerification(mailbox, first, last, segments, count, end.chain.hex(), log_first, gaps)
