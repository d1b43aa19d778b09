"""Writes to a mailbox's log, in order, in a dedicated thread."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from postroom.application.mailbox.commit_ends import ends_with
from postroom.application.ports.event_log import EventLog, Seal, StoredSnapshot, VolatileLog
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import DaemonExecutor
from postroom.domain.commit import Commit
from postroom.domain.errors import PostroomError, Unavailable

T = TypeVar("T")

LEASE_RETRY_MS = 1_000

TRUNCATE_COMMITS = 200
"""Commits removed in one transaction; bounds how long an append waits for retention."""
RECLAIM_BYTES = 1 << 20
"""Bytes reclaimed in one transaction, for the same reason."""


class LogWriter:
    """Thread that executes writes to a log in order.

    Arguments:
        may_append: see `MailboxEngine`; asked last here, as an append may have waited for others.
    """

    def __init__(self, log: EventLog, may_append: Callable[[], bool]) -> None:
        self._log = log
        self._may_append = may_append
        self._thread = DaemonExecutor(1, "postroom-append")
        self._saving: set[asyncio.Task[StoredSnapshot]] = set()

    def append(self, commits: Sequence[Commit]) -> asyncio.Future[None]:
        """Start an append at once and return its future."""
        return self._start(self._append, commits)

    def save_snapshot(
        self, rows: Iterator[StoredSnapshot], position: int, keep_from: int
    ) -> asyncio.Future[StoredSnapshot]:
        """Start to save the rows of a part, between appends; see `EventLog.save_snapshot`.

        Arguments:
            rows: iterated in the thread.
            position: of the last row.
            keep_from: position before which rows are removed when all are saved.

        Returns: the last row.
        """
        saving = asyncio.create_task(self._save_rows(rows, position, keep_from))
        self._saving.add(saving)
        saving.add_done_callback(self._saving.discard)
        return saving

    def try_seal(self, seal: Seal) -> asyncio.Future[None]:
        """Seal the end of the log; a failure is only logged, as the previous seal remains valid."""
        return self._start(self._try, "mailbox.seal_failed", self._log.seal, seal)

    async def truncate(self, through: int) -> int:
        """Remove the commits that end at or before `through` in steps, between appends.

        Returns: the number of positions removed.
        """
        removed = 0
        while count := await self._start(self._log.truncate, through, TRUNCATE_COMMITS):
            removed += count
        return removed

    async def reclaim_space(self, enough: int) -> int:
        """Reclaim freed space in steps, between appends; return the number of bytes.

        Arguments:
            enough: bytes after which to stop.
        """
        reclaimed = 0
        while reclaimed < enough and (size := await self._start(self._log.reclaim_space, RECLAIM_BYTES)):
            reclaimed += size
        return reclaimed

    def compact(self, log: VolatileLog, through: int, unsettled: Collection[bytes]) -> asyncio.Future[int]:
        """Compact a log in memory between appends; see `VolatileLog.compact`."""
        return self._start(log.compact, through, unsettled)

    async def close(self) -> None:
        """Finish the pending writes and end the thread."""
        if self._saving:
            await asyncio.wait(self._saving)
        with suppress(Unavailable):  # without a thread, nothing is pending
            await self._start(lambda: None)  # joining the thread would block the event loop
        self._thread.shutdown(wait=False)

    def _start(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _append(self, commits: Sequence[Commit]) -> None:
        if not self._may_append():
            raise lease_ended(self._log.mailbox)
        try:
            self._log.append(commits)
        except PostroomError:
            raise
        except Exception as error:  # a defect of the adapter: callers still get an answer
            logger().exception("mailbox.append_failed", mailbox=self._log.mailbox)
            raise Unavailable(
                f"The log of mailbox {self._log.mailbox} failed: {summarize(error)}."
            ) from error

    async def _save_rows(
        self, rows: Iterator[StoredSnapshot], position: int, keep_from: int
    ) -> StoredSnapshot:
        try:
            while True:
                row = await self._start(self._save_row, rows, position, keep_from)
                if row.position == position:
                    return row
        except PostroomError as error:
            logger().warning("mailbox.snapshot_failed", mailbox=self._log.mailbox, error=str(error))
            raise

    def _save_row(self, rows: Iterator[StoredSnapshot], position: int, keep_from: int) -> StoredSnapshot:
        row = next(rows)
        # Those that it replaces may be needed to read a truncated log.
        if not ends_with(self._log, position, row.chain):
            raise Unavailable(
                f"A snapshot of mailbox {self._log.mailbox} was not saved, as the commit that ends at "
                f"position {position} was not appended; retry shortly."
            )
        self._log.save_snapshot(row, keep_from if row.position == position else 0)
        return row

    def _try(self, failure: str, write: Callable[[T], None], what: T) -> None:
        try:
            write(what)
        except PostroomError as error:
            logger().warning(failure, mailbox=self._log.mailbox, error=str(error))


def lease_ended(mailbox: str) -> Unavailable:
    """Return the answer to callers while the owner of a mailbox may not append; nothing was recorded."""
    return Unavailable(
        f"The lease of mailbox {mailbox} was not renewed in time, so this process may not use it now; "
        "retry shortly.",
        LEASE_RETRY_MS,
    )
