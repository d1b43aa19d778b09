"""Retention: stores old and excess commits in the archive, and removes them from the log."""

import asyncio
from itertools import islice

from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.segments import build_segments, last_commit_through
from postroom.application.mailbox.stored_snapshots import usable_snapshots
from postroom.application.ports.event_log import LogArchive
from postroom.application.telemetry import logger
from postroom.domain.arguments import check_int
from postroom.domain.errors import PostroomError, Unavailable
from postroom.domain.mailbox.commands import Truncate
from postroom.domain.message import MS
from postroom.domain.names import message_id

AGE_SECONDS = 3_600.0
SIZE_SECONDS = 30.0
"""Interval of size checks; at 20,000 messages a second, a mailbox grows by 1 GB in it."""
HEADROOM = 20
"""A log above its limit is cut to 1/20 below it, so that it does not exceed it again at once."""
ROUNDS = 10
"""Sizes of commits are estimates, so what to remove is approached in rounds."""

SNAPSHOT_TRIES = 5


class Retention:
    """Removal of settled commits from the log of an open mailbox; an archive stores them first."""

    def __init__(self, engine: MailboxEngine, archive: LogArchive | None = None) -> None:
        self._engine = engine
        self._log = engine.log
        self._archive = archive
        self._lock = asyncio.Lock()

    async def run(self, every_seconds: float | None = None, size_every_seconds: float | None = None) -> None:
        """Enforce age and size periodically until cancelled (RFC-037: a background job).

        A failure is logged, and the next interval tries again.

        Arguments:
            every_seconds, size_every_seconds: intervals; by default `AGE_SECONDS` and `SIZE_SECONDS`.
        """
        every_seconds = AGE_SECONDS if every_seconds is None else every_seconds
        interval = min(every_seconds, SIZE_SECONDS if size_every_seconds is None else size_every_seconds)
        elapsed = 0.0
        while True:
            await asyncio.sleep(interval)
            elapsed += interval
            try:
                if elapsed >= every_seconds:
                    elapsed = 0.0
                    await self.enforce_age()
                await self.enforce_size()
            except PostroomError as error:
                logger().retry("mailbox.retention_failed", mailbox=self._log.mailbox, error=str(error))

    async def enforce_age(self) -> int:
        """Remove settled commits that are older than the history retention.

        Does nothing during the expiry pause after a restart of log time (ADR 0029).

        Returns: how many events were removed.
        Raises: Unavailable when something failed; nothing is removed that is not archived.
        """
        engine = self._engine
        now, mailbox = engine.now(), engine.mailbox
        if now < mailbox.expiry_resumes_at:
            return 0
        return await self.remove_before(now - mailbox.limits.history_retention_ms * MS)

    async def remove_before(self, at: int) -> int:
        """Remove settled commits written before log time `at` (µs); see `enforce_age`."""
        self._engine.check_process()
        return await self._remove_through(await asyncio.to_thread(self._log.position_before, at))

    async def enforce_size(self) -> int:
        """Remove the oldest settled commits until the log is within `max_store_bytes`, and shrink the store.

        Returns: how many events were removed.
        Raises: Unavailable when something failed; commits removed before stay removed.
        """
        limit, log = self._engine.mailbox.limits.max_store_bytes, self._log
        if limit is None:
            return 0
        removed = 0
        size = await asyncio.to_thread(log.size)
        for _ in range(ROUNDS):
            if size.commits <= limit:
                break
            excess = size.commits - limit + limit // HEADROOM
            count = await self._remove_through(await asyncio.to_thread(log.position_at_size, excess))
            if not count:
                logger().retry(
                    "mailbox.too_large",
                    mailbox=log.mailbox,
                    bytes=size.commits,
                    limit=limit,
                    reason="unsettled",
                )
                break
            removed += count
            size = await asyncio.to_thread(log.size)
        reclaimed = await self._engine.writer.reclaim_space(size.disk - limit)
        if removed or reclaimed:
            logger().info(
                "mailbox.shrunk",
                mailbox=log.mailbox,
                records=removed,
                bytes=size.commits,
                limit=limit,
                reclaimed=reclaimed,
            )
        return removed

    async def _remove_through(self, through: int) -> int:
        """Remove the commits up to a position or the oldest unsettled message; return the number of events.

        The commits are archived first (ADR 0032); then `LogTruncated` is appended, and a snapshot is saved.
        """
        async with self._lock:
            return await self._truncate(self._settled_through(through))

    def _settled_through(self, through: int) -> int:
        """Return the last position before the oldest unsettled message, but at most `through`."""
        mailbox = self._engine.mailbox
        oldest = next(iter(mailbox.messages.values()), None)  # they are in the order of their positions
        if (copied := mailbox.copied_through) < through:
            logger().retry(
                "mailbox.retention_blocked",
                mailbox=self._log.mailbox,
                subscriptions=[each.name for each in mailbox.subscriptions.values() if not each.is_live],
                position=copied,
                records=through - copied,
            )
            through = copied
        if oldest is None or oldest.position > through:
            return through
        logger().retry(
            "mailbox.retention_blocked",
            mailbox=self._log.mailbox,
            topic=oldest.topic,
            message_id=message_id(oldest.stream),
            status=oldest.status.name.lower(),
            position=oldest.position,
            records=through - oldest.position + 1,
        )
        return oldest.position - 1

    async def _truncate(self, through: int) -> int:
        mailbox = self._engine.mailbox
        last = await asyncio.to_thread(last_commit_through, self._log, through)
        through = 0 if last is None else last.last
        if self._archive is not None:
            through_archived = max(through, mailbox.truncated_through)
            building = build_segments(self._log, self._archive, through_archived)
            while await asyncio.to_thread(next, building, None) is not None:
                pass
        if last is not None and through > mailbox.truncated_through:
            await self._engine.submit([Truncate(through, last.chain)])
        through = self._engine.mailbox.truncated_through
        first = await asyncio.to_thread(self._log.first_position)
        if first is None or first > through:
            return 0
        # After `LogTruncated`, so that the snapshot's own commit is not removed.
        await self._save_snapshot()
        removed = await self._engine.writer.truncate(through)
        if removed:
            logger().info(
                "mailbox.log_truncated", mailbox=self._log.mailbox, through=through, records=removed
            )
        return removed

    async def _save_snapshot(self) -> None:
        """Save a snapshot at a durable commit, as the commits before it will be removed.

        It is read again, since a former owner that was paused, or an operator, may have removed parts that it
        needs.
        """
        for attempt in range(SNAPSHOT_TRIES):
            taken = await self._engine.take_snapshot(whole=attempt > 0)
            if await asyncio.to_thread(self._is_usable, taken.position):
                return
        raise Unavailable(
            f"Mailbox {self._log.mailbox} is too busy to truncate its log now; retention will try again."
        )

    def _is_usable(self, position: int) -> bool:
        return any(snapshot.position >= position for snapshot in islice(usable_snapshots(self._log), 1))


class DeleteOldEvents:
    """Handler that removes settled commits before the history retention ends (RFC-037)."""

    def __init__(self, retention: Retention) -> None:
        self._retention = retention

    async def __call__(self, older_than: int) -> int:
        """Remove the commits written before `older_than`, up to the oldest unsettled message.

        Arguments:
            older_than: log time, µs since 1970 UTC.

        Returns: how many events were removed.
        Raises: InvalidRequest, Unavailable when something failed; nothing is removed that is not archived.
        """
        return await self._retention.remove_before(check_int("older_than", older_than, 0))
