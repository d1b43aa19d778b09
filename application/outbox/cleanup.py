"""Cleanup: what was published long ago leaves the outbox, a little at a time."""

import asyncio
from collections.abc import Callable

from postroom.application.ports.clock import Clock
from postroom.application.ports.outbox_repository import OutboxRepository
from postroom.application.telemetry import logger
from postroom.domain.errors import Unavailable
from postroom.domain.outbox import MS
from postroom.domain.policy import DAY_MS

RETENTION_MS = 7 * DAY_MS
BATCH = 1_000
PAUSE_SECONDS = 0.05
"""Between two batches at most, so that a cleanup never keeps the database from its work."""


class OutboxCleanup:
    """Remove published events once they are old; what is unpublished stays, however old.

    Of any number of cleanups at the same time one works, and the others leave it to that one.

    Arguments:
        random: draws numbers in [0, 1).
        retention_ms: how long a published event is kept.
        batch: events removed in one transaction.
    """

    def __init__(
        self,
        repository: OutboxRepository,
        clock: Clock,
        random: Callable[[], float],
        *,
        retention_ms: int = RETENTION_MS,
        batch: int = BATCH,
    ) -> None:
        self._repository = repository
        self._clock = clock
        self._random = random
        self._retention_ms = retention_ms
        self._batch = batch

    async def clean(self) -> int | None:
        """Remove what is old by now and return how much that was; None when another cleanup is at it.

        Raises: Unavailable when the database can't be used.
        """
        before = self._clock.wall() - self._retention_ms * MS
        removed = 0
        while (count := await self._repository.delete_published(before, self._batch)) is not None:
            removed += count
            if count < self._batch:
                return removed
            await asyncio.sleep(self._random() * PAUSE_SECONDS)
        return removed or None

    async def keep_cleaning(self, every_ms: int) -> None:
        """Clean about every `every_ms`, not at the moment others do; a failure waits for the next time."""
        while True:
            await asyncio.sleep((0.5 + self._random()) * every_ms / 1_000)
            try:
                removed = await self.clean()
            except Unavailable as error:
                logger().warning("outbox.cleanup_failed", error=str(error))
            else:
                if removed:
                    logger().info("outbox.cleaned", removed=removed)
            await self._repository.close()
