"""Saving the parts of snapshots in the thread that writes to the log."""

import asyncio
from collections.abc import Iterator

from postroom.application.mailbox.loaded_mailbox import LoadedMailbox
from postroom.application.mailbox.log_writer import LogWriter
from postroom.application.ports.event_log import Seal, StoredSnapshot
from postroom.domain.errors import MailboxClosed

CLOSING_SNAPSHOT_EVENTS = 1_000
"""Events after the newest snapshot from which a mailbox that closes saves another one."""


class SnapshotSaver:
    """Saver of parts, which wakes the engine's loop after each."""

    def __init__(self, writer: LogWriter, wake: asyncio.Event) -> None:
        self._writer = writer
        self._wake = wake

    def save(
        self, rows: Iterator[StoredSnapshot], position: int, keep_from: int
    ) -> "asyncio.Future[StoredSnapshot]":
        """Start to save a part; see `LogWriter.save_snapshot`."""
        saving = self._writer.save_snapshot(rows, position, keep_from)
        saving.add_done_callback(lambda _: self._wake.set())  # the next one may have been asked for
        return saving

    async def close(self, state: LoadedMailbox) -> None:
        """Save a snapshot if the log has grown, seal the log, and refuse requests for further snapshots.

        To be called when nothing is decided any more. A failure is only logged, as both are optional.
        """
        mailbox = state.mailbox
        if state.failure is None:
            if state.records_since_snapshot >= CLOSING_SNAPSHOT_EVENTS:
                await self._finish(state)
            await self._writer.try_seal(Seal(mailbox.position, state.chain))
        state.snapshots.refuse(MailboxClosed(f"Mailbox {mailbox.name} is closed; open it again."))

    async def _finish(self, state: LoadedMailbox) -> None:
        answer = state.snapshots.ask()
        while not answer.done():
            self._wake.clear()
            if state.snapshots.is_active:
                state.advance_snapshot(self.save)
                await asyncio.sleep(0)
            else:
                await self._wake.wait()
        answer.exception()  # has been logged
