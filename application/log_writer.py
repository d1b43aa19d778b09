"""Writes to a mailbox's log, in order, from a thread of their own."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from postroom.application.ports.event_log import EventLog, Seal, StoredSnapshot
from postroom.application.telemetry import logger
from postroom.domain.errors import PostroomError, Unavailable
from postroom.domain.record import Record

T = TypeVar("T")

TRUNCATE_ROWS = 5_000
"""Records removed in one transaction, so that appends never wait long behind retention."""
GIVE_BACK_BYTES = 1 << 20
"""What is given back to the disk in one transaction, for the same reason."""


class LogWriter:
    """Hand writes to one thread, which carries them out one after the other."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="postroom-append")

    def append(self, records: Sequence[Record]) -> asyncio.Future[None]:
        """Start an append at once and return its future."""
        return self._start(self._append, records)

    def try_save_snapshot(self, snapshot: StoredSnapshot) -> asyncio.Future[None]:
        """Save a snapshot behind the appends; the log is complete without it, so failure is only noted."""
        return self._start(self._try, "mailbox.snapshot_failed", self._log.save_snapshot, snapshot)

    def save_snapshot(self, snapshot: StoredSnapshot) -> asyncio.Future[None]:
        """Save a snapshot that something depends on."""
        return self._start(self._log.save_snapshot, snapshot)

    def try_seal(self, seal: Seal) -> asyncio.Future[None]:
        """Seal the log's end; an earlier owner's seal holds without it, so a failure is only noted."""
        return self._start(self._try, "mailbox.seal_failed", self._log.seal, seal)

    async def truncate(self, through: int) -> int:
        """Remove the records through a position, letting appends pass in between; return how many went."""
        removed = 0
        while gone := await self._start(self._log.truncate, through, TRUNCATE_ROWS):
            removed += gone
        return removed

    async def give_back(self, enough: int) -> int:
        """Give freed space back to the disk, letting appends pass in between; return how many bytes went.

        Arguments:
            enough: bytes after which to stop.
        """
        given = 0
        while given < enough and (gone := await self._start(self._log.give_back, GIVE_BACK_BYTES)):
            given += gone
        return given

    def close(self) -> None:
        """Carry out what was handed over, and end the thread."""
        self._thread.shutdown(wait=True)

    def _start(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _append(self, records: Sequence[Record]) -> None:
        try:
            self._log.append(records)
        except PostroomError:
            raise
        except Exception as error:  # a defect of the adapter must not leave callers without an answer
            logger().exception("mailbox.append_failed", mailbox=self._log.mailbox)
            raise Unavailable(f"The log of mailbox {self._log.mailbox} failed: {error!r}.") from error

    def _try(self, failure: str, write: Callable[[T], None], what: T) -> None:
        try:
            write(what)
        except PostroomError as error:
            logger().warning(failure, mailbox=self._log.mailbox, error=str(error))
