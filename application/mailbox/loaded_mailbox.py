"""State of a mailbox in its owner's memory, and loading it from the log."""

import asyncio
from collections.abc import Sequence

from postroom.application.mailbox.codec import to_record
from postroom.application.mailbox.fold import fold_from
from postroom.application.mailbox.snapshots import Save, Snapshots
from postroom.application.mailbox.stored_snapshots import SavedPart
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.errors import PostroomError
from postroom.domain.event import Event
from postroom.domain.mailbox.commands import TakeOwnership
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.state import Mailbox, evolve
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.record import GENESIS, Record


class LoadedMailbox:
    """Mailbox in memory, which may be ahead of its log by the appends in progress.

    Arguments:
        chain: chain hash of the last record.
        parts: those of the snapshot from which it was loaded, oldest first.

    `epoch` is the epoch of new records. `failure` is the failed append that made the state void, as the log
    lacks events that are applied to the state.
    """

    __slots__ = ("chain", "epoch", "failure", "mailbox", "snapshots")

    def __init__(self, mailbox: Mailbox, chain: bytes, parts: Sequence[SavedPart] = ()) -> None:
        self.mailbox = mailbox
        self.chain = chain
        self.snapshots = Snapshots(parts)
        self.epoch = mailbox.epoch
        self.failure: PostroomError | None = None

    def to_records(self, events: Sequence[Event]) -> list[Record]:
        """Return the records of the next events, without changing the state.

        Raises: see `to_record`.
        """
        records: list[Record] = []
        chain = self.chain
        for position, event in enumerate(events, self.mailbox.position + 1):
            record = to_record(event, position, self.epoch, chain)
            chain = record.chain
            records.append(record)
        return records

    def evolve(self, event: Event, record: Record) -> None:
        """Evolve the state by an event whose record is `record`."""
        evolve(self.mailbox, event)
        self.chain = record.chain

    def take_ownership(self, command: TakeOwnership, now: int) -> list[Record]:
        """Evolve the state by a change of owner at `now` (µs), and return its records, to be appended.

        Raises: Fenced when the command has an epoch that is not above the log's.
        """
        events = decide(command, self.mailbox, now)
        self.epoch = self.mailbox.epoch + 1 if command.epoch is None else command.epoch
        records = self.to_records(events)
        for event, record in zip(events, records, strict=True):
            self.evolve(event, record)
        return records

    def advance_snapshot(self, save: Save) -> None:
        """Do a step of the next snapshot, if it is time; see `Snapshots.advance`."""
        self.snapshots.advance(self.mailbox, self.chain, save)

    @property
    def records_since_snapshot(self) -> int:
        """Return the number of records after the newest snapshot."""
        return self.mailbox.position - self.snapshots.position


async def load_mailbox(
    log: EventLogReader, limits: MailboxLimits | None, default_policy: TopicPolicy | None
) -> LoadedMailbox:
    """Load a mailbox from its log, off the event loop.

    Raises: BrokenLog when the log can't be folded, Unavailable when it can't be read.
    """

    def load() -> LoadedMailbox:
        mailbox, parts = fold_from(log, limits, default_policy)
        head = log.head()
        return LoadedMailbox(mailbox, head.chain if head is not None else GENESIS, parts)

    return await asyncio.to_thread(load)
