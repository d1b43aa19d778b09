"""The audit log over an event log of the store: written, read newest first, verified, and removed by age."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from postroom.application.access.audit import (
    REMOVALS,
    AuditEntry,
    AuditEvent,
    AuditLog,
    EntriesRemoved,
    to_commit,
    to_entry,
    to_removal,
)
from postroom.application.mailbox.segments import last_commit_through
from postroom.application.page import Page, read_position
from postroom.application.ports.event_log import Clock, EventLog, EventLogReader, Head, Seal
from postroom.application.queries.verify import VerifyLog
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import DaemonExecutor
from postroom.domain.arguments import MAX_PAGE, check_int
from postroom.domain.errors import PostroomError, Unavailable, WrongPosition
from postroom.domain.search import topic_matches

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
                logger().retry("audit.removal_failed", error=str(error))
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
            logger().retry_defect("audit.append_failed", error=summarize(error))
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
            logger().retry("audit.removal_failed", error=str(error))

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


RECORDS_PER_READ = 1_000


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Criteria that an entry must all meet; an empty filter matches every entry.

    Arguments:
        since, until: µs since 1970 UTC; the former is included, the latter is not.
        topic: a topic or glob; entries that name no topic concern all of them and match.
        target: message id, or name of a mailbox.
    """

    since: int | None = None
    until: int | None = None
    principal: str | None = None
    capability: str | None = None
    operation: str | None = None
    outcome: str | None = None
    topic: str | None = None
    target: str | None = None

    def matches(self, entry: AuditEntry) -> bool:
        """Return whether an entry matches, regardless of its time."""
        return (
            self.principal in (None, entry.principal)
            and self.capability in (None, entry.capability)
            and self.operation in (None, entry.operation)
            and self.outcome in (None, entry.outcome)
            and self.target in (None, entry.target)
            and self._matches_topic(entry.topics)
        )

    def _matches_topic(self, topics: Sequence[str]) -> bool:
        # A search names topics by globs, too: either may cover the other.
        topic = self.topic
        return (
            topic is None
            or not topics
            or any(topic_matches(topic, each) or topic_matches(each, topic) for each in topics)
        )


class ReadAudit:
    """A query of the audit log."""

    def __init__(self, log: EventLogReader) -> None:
        self._log = log

    def __call__(
        self,
        filter_: AuditFilter | None = None,
        *,
        limit: int = 100,
        cursor: str | None = None,
        reads: int | None = None,
    ) -> Page[AuditEntry]:
        """Return entries, newest first.

        A page that ends because of `reads` may have fewer entries than the limit, and a cursor all the same.

        Arguments:
            limit: maximum number of entries, 1 to 1,000.
            cursor: `next_cursor` of the previous page.
            reads: maximum number of entries that are compared with the filter; None is no limit.

        Raises: InvalidRequest for a limit out of bounds or an invalid cursor, Unavailable when the log can't
            be read, BrokenLog for a record that was altered so that it can't be read.
        """
        check_int("limit", limit, 1, MAX_PAGE)
        criteria = filter_ or AuditFilter()
        entries: list[AuditEntry] = []
        for count, (position, entry) in enumerate(self._backwards(criteria, read_position(cursor))):
            if count == reads:
                return Page(tuple(entries), str(position + 1))
            if not criteria.matches(entry):
                continue
            if len(entries) == limit:
                return Page(tuple(entries), str(position + 1))
            entries.append(entry)
        return Page(tuple(entries))

    def _backwards(self, criteria: AuditFilter, cursor: int | None) -> Iterator[tuple[int, AuditEntry]]:
        """Yield the entries of the filter's time before position `cursor`, newest first."""
        first, head = self._log.first_position(), self._log.head()
        if first is None or head is None:
            return
        last = head.position if criteria.until is None else self._log.position_before(criteria.until)
        if cursor is not None:
            last = min(last, cursor - 1)
        if criteria.since is not None:
            first = max(first, self._log.position_before(criteria.since) + 1)
        while last >= first:
            after = max(first - 1, last - RECORDS_PER_READ)
            for record in reversed(list(self._log.read(after, last - after))):
                entry = to_entry(record) if record.position <= last else None
                if entry is not None:
                    yield record.position, entry
            last = after


def removals(log: EventLogReader) -> list[EntriesRemoved]:
    """Return the removals by retention that the audit log records."""
    return [to_removal(record) for record in log.read_stream(REMOVALS)]


def verify_audit(log: EventLogReader) -> VerifyLog:
    """Return the verification of the audit log's hash chain."""
    return VerifyLog(log, removals)
