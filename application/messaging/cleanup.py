"""Cleanup of inboxes and outboxes: deletes old rows in small batches."""

import asyncio
from collections.abc import Awaitable, Callable

from postroom.application.ports.clock import Clock
from postroom.application.telemetry import logger
from postroom.domain.errors import PostroomError

BATCH = 1_000
PAUSE_SECONDS = 0.05
"""Maximum pause between two batches, in which other work can use the database."""


Delete = Callable[[int, int], Awaitable[int | None]]
"""Delete rows settled before a time (µs UTC), up to a limit; None if another process holds the lock."""


class Cleanup:
    """Deletion of old settled rows; unsettled rows are never deleted.

    Concurrent cleanups: one takes the lock, the others return None.

    Arguments:
        table: name of the table, for log events.
        random: returns uniform random numbers in [0, 1).
        retention_ms: age at which settled rows are deleted.
        batch: number of rows deleted per transaction.
    """

    def __init__(
        self,
        table: str,
        delete: Delete,
        clock: Clock,
        random: Callable[[], float],
        *,
        retention_ms: int,
        batch: int = BATCH,
    ) -> None:
        self._table = table
        self._delete = delete
        self._clock = clock
        self._random = random
        self._retention_ms = retention_ms
        self._batch = batch

    async def clean(self) -> int | None:
        """Delete old rows and return their number; None while another cleanup runs.

        Raises: Unavailable when the database can't be used.
        """
        before = self._clock.wall() - self._retention_ms * 1_000
        deleted = 0
        while (count := await self._delete(before, self._batch)) is not None:
            deleted += count
            if count < self._batch:
                return deleted
            await asyncio.sleep(self._random() * PAUSE_SECONDS)
        return deleted or None

    async def run(self, every_ms: int) -> None:
        """Clean up at random intervals of `every_ms` on average; failures are logged."""
        while True:
            await asyncio.sleep((0.5 + self._random()) * every_ms / 1_000)
            try:
                deleted = await self.clean()
            except PostroomError as error:
                logger().warning(f"{self._table}.cleanup_failed", error=str(error))
            else:
                if deleted:
                    logger().info(f"{self._table}.cleaned", removed=deleted)
