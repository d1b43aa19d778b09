"""State of a mailbox in its owner's memory, and loading it from the log."""

import asyncio
from collections.abc import Sequence

from postroom.application.mailbox.codec import make_commit
from postroom.application.mailbox.fold import fold_from
from postroom.application.mailbox.group_events import GroupEvents
from postroom.application.mailbox.snapshots import Save, Snapshots
from postroom.application.mailbox.stored_snapshots import SavedPart
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.commit import GENESIS, Commit
from postroom.domain.errors import PostroomError
from postroom.domain.mailbox.commands import TakeOwnership
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.state import Mailbox, evolve


class LoadedMailbox:
    """Mailbox in memory, which may be ahead of its log by the appends in progress.

    Arguments:
        chain: chain hash of the last commit.
        parts: those of the snapshot from which it was loaded, oldest first.

    `position` is that of the last commit: the mailbox is ahead of it while a group is decided. `epoch` is the
    epoch of new commits. `failure` is the failed append that made the state void, as the log
    lacks events that are applied to the state.
    """

    __slots__ = ("chain", "epoch", "failure", "mailbox", "position", "snapshots")

    def __init__(self, mailbox: Mailbox, chain: bytes, parts: Sequence[SavedPart] = ()) -> None:
        self.mailbox = mailbox
        self.position = mailbox.position
        self.chain = chain
        self.snapshots = Snapshots(parts)
        self.epoch = mailbox.epoch
        self.failure: PostroomError | None = None

    def commit(self, events: GroupEvents) -> list[Commit]:
        """Return the commits of the events that were applied since the last one.

        Raises: see `make_commit`.
        """
        commits = []
        position, chain = self.position, self.chain
        for part in events.commits:
            if not part.events:
                continue
            commit = make_commit(
                part.events,
                part.distances,
                first=position + 1,
                epoch=self.epoch,
                previous=chain,
                last_events=part.last_events,
            )
            position, chain = commit.last, commit.chain
            commits.append(commit)
        self.position, self.chain = position, chain
        return commits

    def take_ownership(self, command: TakeOwnership, now: int) -> list[Commit]:
        """Evolve the state by a change of owner at `now` (µs), and return its commits, to be appended.

        Raises: Fenced when the command has an epoch that is not above the log's, WrongMode and
            SettingsConflict when the mailbox has another mode or other settings.
        """
        group = GroupEvents()
        events = decide(command, self.mailbox, now)
        self.epoch = self.mailbox.epoch + 1 if command.epoch is None else command.epoch
        for event in events:
            group.add(event, self.mailbox.position + 1, None)
            evolve(self.mailbox, event)
        return self.commit(group)

    def advance_snapshot(self, save: Save) -> None:
        """Do a step of the next snapshot, if it is time; see `Snapshots.advance`."""
        self.snapshots.advance(self.mailbox, self.chain, save)

    @property
    def records_since_snapshot(self) -> int:
        """Return the number of records after the newest snapshot."""
        return self.mailbox.position - self.snapshots.position


async def load_mailbox(log: EventLogReader) -> LoadedMailbox:
    """Load a mailbox from its log, off the event loop.

    Raises: BrokenLog when the log can't be folded, Unavailable when it can't be read.
    """

    def load() -> LoadedMailbox:
        mailbox, parts = fold_from(log)
        head = log.head()
        return LoadedMailbox(mailbox, head.chain if head is not None else GENESIS, parts)

    return await asyncio.to_thread(load)
