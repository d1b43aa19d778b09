"""Snapshots that stand for commits which are about to be removed."""

import asyncio
from typing import NamedTuple

from postroom.application.mailbox.commit_ends import ends_with
from postroom.application.mailbox.engine import MailboxEngine

TRIES = 5


class SavedSnapshot(NamedTuple):
    """A snapshot at the end of a durable commit.

    Arguments:
        unsettled: streams of the messages that are unsettled there.
    """

    position: int
    unsettled: frozenset[bytes]


async def save_durable_snapshot(engine: MailboxEngine) -> SavedSnapshot | None:
    """Save a snapshot at a durable commit; None if the mailbox is too busy.

    The state may be ahead of the log; a snapshot is void if its commit is never appended.

    Raises: Unavailable when the state is void or the store fails.
    """
    for _ in range(TRIES):
        async with engine.deciding:  # within a group, the state is not at the end of a commit
            state = engine.state
            snapshot, unsettled = state.snapshot(), frozenset(state.mailbox.messages)
        await engine.writer.save_snapshot(snapshot)
        if await asyncio.to_thread(ends_with, engine.log, snapshot.position, snapshot.chain):
            return SavedSnapshot(snapshot.position, unsettled)
    return None
