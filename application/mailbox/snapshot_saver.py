"""Saving the parts of snapshots in the thread that writes to the log."""

import asyncio
from collections.abc import Callable

from postroom.application.mailbox.loaded_mailbox import LoadedMailbox
from postroom.application.mailbox.log_writer import LogWriter
from postroom.application.ports.event_log import StoredSnapshot


class SnapshotSaver:
    """Saver of parts, which wakes the engine's loop after each."""

    def __init__(self, writer: LogWriter, wake: asyncio.Event) -> None:
        self._writer = writer
        self._wake = wake

    def save(self, take: Callable[[], StoredSnapshot], keep_from: int) -> "asyncio.Future[StoredSnapshot]":
        """Start to save a part; see `LogWriter.save_snapshot`."""
        saving = self._writer.save_snapshot(take, keep_from)
        saving.add_done_callback(lambda _: self._wake.set())  # the next one may have been asked for
        return saving

    async def finish(self, state: LoadedMailbox) -> None:
        """Save a snapshot when nothing is decided any more; a failure is only logged, as it is optional."""
        answer = state.snapshots.ask()
        while not answer.done():
            self._wake.clear()
            if state.snapshots.is_active:
                state.advance_snapshot(self.save)
                await asyncio.sleep(0)
            else:
                await self._wake.wait()
        answer.exception()  # has been logged
