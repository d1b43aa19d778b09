"""State of a mailbox in its owner's memory, and loading it from the log."""

import asyncio

from postroom.application.mailbox.codec import make_commit
from postroom.application.mailbox.fold import fold_from
from postroom.application.mailbox.group_events import GroupEvents
from postroom.application.ports.event_log import EventLogReader, StoredSnapshot
from postroom.domain.commit import GENESIS, Commit
from postroom.domain.errors import PostroomError
from postroom.domain.mailbox.commands import TakeOwnership
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.snapshot import take_snapshot
from postroom.domain.mailbox.state import Mailbox, evolve
from postroom.domain.policy import MailboxLimits, TopicPolicy

MIN_SNAPSHOT_EVENTS, MAX_SNAPSHOT_EVENTS = 4_000, 100_000
"""Bounds of the records between snapshots, and so of those that the next owner replays."""
SNAPSHOT_RATIO = 2
"""Records between snapshots for each message and key in them; bounds what snapshots cost a record."""


class LoadedMailbox:
    """Mailbox in memory, which may be ahead of its log by the appends in progress.

    Arguments:
        chain: chain hash of the last commit.
        snapshot_position: position of the newest snapshot.

    `position` is that of the last commit: the mailbox is ahead of it while a group is decided. `epoch` is the
    epoch of new commits. `failure` is the failed append that made the state void, as the log
    lacks events that are applied to the state.
    """

    __slots__ = ("chain", "epoch", "failure", "mailbox", "position", "snapshot_position")

    def __init__(self, mailbox: Mailbox, chain: bytes, snapshot_position: int) -> None:
        self.mailbox = mailbox
        self.position = mailbox.position
        self.chain = chain
        self.snapshot_position = snapshot_position
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

        Raises: Fenced when the command has an epoch that is not above the log's.
        """
        group = GroupEvents()
        events = decide(command, self.mailbox, now)
        self.epoch = self.mailbox.epoch + 1 if command.epoch is None else command.epoch
        for event in events:
            group.add(event, self.mailbox.position + 1, None)
            evolve(self.mailbox, event)
        return self.commit(group)

    def snapshot(self) -> StoredSnapshot:
        """Return a snapshot of the state, to be saved; not while a group is decided."""
        assert self.position == self.mailbox.position, "a snapshot was asked for within a group"
        self.snapshot_position = self.position
        return StoredSnapshot(self.position, self.chain, take_snapshot(self.mailbox))

    @property
    def records_since_snapshot(self) -> int:
        """Return the number of records after the newest snapshot."""
        return self.mailbox.position - self.snapshot_position

    @property
    def is_snapshot_due(self) -> bool:
        """Return whether the next owner would replay many records, compared to the size of a snapshot."""
        records = self.records_since_snapshot
        if not MIN_SNAPSHOT_EVENTS <= records < MAX_SNAPSHOT_EVENTS:
            return records >= MAX_SNAPSHOT_EVENTS
        keys = sum(len(topic.window) for topic in self.mailbox.topics.values())
        return records >= SNAPSHOT_RATIO * (len(self.mailbox.messages) + keys)


async def load_mailbox(
    log: EventLogReader, limits: MailboxLimits | None, default_policy: TopicPolicy | None
) -> LoadedMailbox:
    """Load a mailbox from its log, off the event loop.

    Raises: BrokenLog when the log can't be folded, Unavailable when it can't be read.
    """

    def load() -> LoadedMailbox:
        mailbox, snapshot_position = fold_from(log, limits, default_policy)
        head = log.head()
        return LoadedMailbox(mailbox, head.chain if head is not None else GENESIS, snapshot_position)

    return await asyncio.to_thread(load)
