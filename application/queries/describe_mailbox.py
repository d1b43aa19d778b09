"""`DescribeMailbox`: the mode, owner and size of a mailbox."""

import msgspec

from postroom.application.mailbox.stored_snapshots import fold
from postroom.application.ports.event_log import EventLogReader
from postroom.application.ports.ownership import Ownership
from postroom.domain.mailbox.events import MailboxCreated, MailboxMode
from postroom.domain.names import mailbox_stream


class MailboxSummary(msgspec.Struct, frozen=True):
    """A mailbox of a store.

    Arguments:
        owner: name of the process that owns it now, by default with its id; None if nobody does.
        epoch: of its last owner.
        records: number of records that retention has left in its log.
        bytes: estimated size of these records.
    """

    mailbox: str
    mode: MailboxMode
    owner: str | None
    epoch: int
    records: int
    bytes: int


class DescribeMailbox:
    """A query for the summary of one mailbox; needs no ownership."""

    def __init__(self, log: EventLogReader, ownership: Ownership) -> None:
        self._log = log
        self._ownership = ownership

    async def __call__(self) -> MailboxSummary:
        """Return the summary.

        Raises: Unavailable when the store can't be read.
        """
        log = self._log
        head, first = log.head(), log.first_position()
        return MailboxSummary(
            log.mailbox,
            self._mode(),
            await self._ownership.owner(log.mailbox),
            0 if head is None else head.epoch,
            0 if head is None or first is None else head.position - first + 1,
            log.size().commits,
        )

    def _mode(self) -> MailboxMode:
        for record in self._log.read_stream(mailbox_stream(self._log.mailbox)):
            if isinstance(record.event, MailboxCreated):
                return record.event.mode
        return fold(self._log).mode  # retention removed the first record
