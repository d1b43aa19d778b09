"""The audit log over an event log of the store: hash-chained, durable, and removed by age."""

import asyncio
from collections.abc import Sequence
from itertools import islice

from postroom.application.access.audit import AuditEntry, AuditLog
from postroom.application.access.audit_records import AuditEvent, EntriesRemoved, to_commit
from postroom.application.mailbox.commit_ends import last_commit_through
from postroom.application.ports.event_log import Clock, EventLog, Head, Seal
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import DaemonExecutor
from postroom.domain.errors import PostroomError, Unavailable, WrongPosition

DAY_MS = 86_400_000
RETENTION_MS = 90 * DAY_MS
ENTRIES_PER_APPEND = 1_000
MAX_WAITING = 10_000
"""Maximum number of entries that wait for an append; further accesses are refused."""
REMOVAL_INTERVAL_SECONDS = 3_600
TRUNCATE_COMMITS = 1_000
"""Commits removed in one transaction; bounds how long an append waits for retention."""
ATTEMPTS = 100
"""Maximum number of attempts to append while other processes append first."""


class StoredAuditLog(AuditLog):
    """The audit log of a store, which any number of processes append to; see `AuditLog`.

    Entries that arrive while an append is in progress are appended together.
    """

    def __init__(
        self, log: EventLog, clock: Clock, *, retention_ms: int = RETENTION_MS, max_entries: int | None = None
    ) -> None:
        """Take over the log, which `close` closes.

        Arguments:
            retention_ms: age after which entries are removed.
            max_entries: number after which the oldest are removed, for a log in memory; None is no limit.
        """
        self._log = log
        self._clock = clock
        self._retention_us = retention_ms * 1_000
        self._max_entries = max_entries
        self._thread = DaemonExecutor(1, "postroom-audit")
        self._head: Head | None = None
        self._first = 1
        self._waiting: dict[asyncio.Future[None], Sequence[AuditEntry]] = {}
        self._appending: asyncio.Task[None] | None = None
        self._is_closed = False

    async def record(self, entries: Sequence[AuditEntry], /) -> None:
        if not entries:
            return
        if self._is_closed:
            raise Unavailable("The audit log is closed, so the access is refused; try it again.")
        if sum(map(len, self._waiting.values())) >= MAX_WAITING:
            raise Unavailable(
                f"{MAX_WAITING:,} accesses wait to be audited, so this one is refused; try it again later."
            )
        recorded = asyncio.get_running_loop().create_future()
        self._waiting[recorded] = entries
        if self._appending is None or self._appending.done():
            self._appending = asyncio.create_task(self._append_waiting())
        await recorded

    async def remove_expired(self) -> int:
        """Remove the entries that are older than the retention; return the number of events.

        Raises: Unavailable when the log can't be written.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._remove_expired)

    async def run(self) -> None:
        """Remove expired entries now and every hour, until cancelled."""
        while True:
            try:
                removed = await self.remove_expired()
                if removed:
                    logger().info("audit.entries_removed", count=removed)
            except PostroomError as error:
                logger().warning("audit.removal_failed", error=str(error))
            await asyncio.sleep(REMOVAL_INTERVAL_SECONDS)

    async def close(self) -> None:
        """Finish the appends, seal the log and close it; entries are refused from now on."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._appending is not None:
            await asyncio.wait([self._appending])
        await asyncio.get_running_loop().run_in_executor(self._thread, self._seal_and_close)
        self._thread.shutdown(wait=False)

    async def _append_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            group = dict(islice(self._waiting.items(), ENTRIES_PER_APPEND))
            entries = [entry for each in group.values() for entry in each]
            failure: PostroomError | None = None
            try:
                await loop.run_in_executor(self._thread, self._append, entries)
            except PostroomError as error:
                failure = error
            for recorded in group:
                del self._waiting[recorded]
                if recorded.done():  # its caller was cancelled
                    continue
                if failure is None:
                    recorded.set_result(None)
                else:
                    recorded.set_exception(_refusal(failure))

    # -- in the thread ---

    def _append(self, events: Sequence[AuditEvent]) -> None:
        try:
            self._append_after_others(events)
        except PostroomError:
            self._head = None
            raise
        except Exception as error:  # a defect of the adapter: the access is refused all the same
            self._head = None
            logger().exception("audit.append_failed")
            raise Unavailable(f"The audit log failed: {summarize(error)}.") from error
        if self._max_entries is not None and self._is_too_long(self._max_entries):
            self._try_to_remove()

    def _append_after_others(self, events: Sequence[AuditEvent]) -> None:
        for _ in range(ATTEMPTS):
            head = self._head or self._log.head()
            commit = to_commit(events, head, self._clock.wall())
            try:
                self._log.append([commit])
            except WrongPosition:  # another process appended meanwhile
                self._head = None
                continue
            self._head = Head(commit.last, commit.at, commit.chain, commit.epoch)
            return
        raise Unavailable(f"Other processes appended to the audit log before each of {ATTEMPTS} attempts.")

    def _is_too_long(self, max_entries: int) -> bool:
        # Some more, so that many are removed at a time.
        return self._head is not None and self._head.position - self._first >= max_entries + max_entries // 10

    def _try_to_remove(self) -> None:
        try:
            self._remove_expired()
        except PostroomError as error:  # the entries are recorded
            logger().warning("audit.removal_failed", error=str(error))

    def _remove_expired(self) -> int:
        head, first = self._log.head(), self._log.first_position()
        if head is None or first is None:
            return 0
        through = self._log.position_before(self._clock.wall() - self._retention_us)
        if self._max_entries is not None:
            through = max(through, head.position - self._max_entries)
        last_removed = last_commit_through(self._log, through)
        if last_removed is None:  # nothing to remove, or another process is removing it
            return 0
        # First, so that the chain of the remaining commits can always be verified.
        self._append_after_others([EntriesRemoved(last_removed.last, last_removed.chain)])
        removed = 0
        while count := self._log.truncate(last_removed.last, TRUNCATE_COMMITS):
            removed += count
        self._first = last_removed.last + 1
        return removed

    def _seal_and_close(self) -> None:
        try:
            if self._head is not None:
                self._log.seal(Seal(self._head.position, self._head.chain))
        except PostroomError as error:
            logger().warning("audit.seal_failed", error=str(error))
        finally:
            self._log.close()


def _refusal(failure: PostroomError) -> Unavailable:
    """Return an error for one caller; an exception that several raise would collect their tracebacks."""
    refusal = Unavailable(f"The access can't be audited, so it is refused. {failure}")
    refusal.__cause__ = failure
    return refusal
