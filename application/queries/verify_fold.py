"""Verification that the events of a log follow from each other."""

from collections.abc import Iterable, Iterator

from postroom.application.mailbox.stored_snapshots import usable_snapshots
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.commit import Commit
from postroom.domain.errors import BrokenLog
from postroom.domain.mailbox.state import Mailbox, evolve
from postroom.domain.record import Record


class FoldCheck:
    """Check that each event of a mailbox can be applied to the state before it.

    After retention, the events before the oldest snapshot can't be applied, and are only read. Those of logs
    that are no mailbox's, whose epoch is 0, never are.
    """

    def __init__(self, log: EventLogReader, start: int) -> None:
        """Take the log, of which the events after `start` will follow."""
        self._mailbox = Mailbox(log.mailbox) if start == 0 else None
        self._snapshots = {} if start == 0 else {each.position: each for each in usable_snapshots(log)}

    def applied(self, commit: Commit, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records of the next commit, each after it was applied.

        Raises: BrokenLog naming the commit, and its first event that can't be applied.
        """
        mailbox = self._mailbox if commit.epoch else None
        if mailbox is not None and commit.at < mailbox.at:
            raise _broken_log(commit, commit.first, "is older than the one before")
        for record in records:
            if mailbox is not None:
                try:
                    evolve(mailbox, record.event)
                except Exception as error:  # an altered event can break `evolve` in any way
                    raise _broken_log(commit, record.position, "can't be applied") from error
            yield record
        if mailbox is not None and mailbox.epoch != commit.epoch:
            raise _broken_log(commit, commit.first, f"has epoch {commit.epoch} instead of {mailbox.epoch}")
        snapshot = self._snapshots.pop(commit.last, None)
        if self._mailbox is None and snapshot is not None:
            self._mailbox = snapshot.restore()


def _broken_log(commit: Commit, position: int, what: str) -> BrokenLog:
    return BrokenLog(
        f"The event at position {position}, in the commit of positions {commit.first} to {commit.last}, "
        f"{what}: it or one before it was altered. Restore the store from a backup.",
        position,
    )
