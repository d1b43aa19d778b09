"""Cleanup: what was processed long ago leaves the inbox, a little at a time."""

import asyncio
from collections.abc import Callable

from postroom.application.ports.clock import Clock
from postroom.application.ports.inbox_repository import InboxRepository
from postroom.application.telemetry import logger
from postroom.domain.errors import PostroomError
from postroom.domain.policy import DAY_MS

RETENTION_MS = 14 * DAY_MS
BATCH = 1_000
PAUSE_SECONDS = 0.05
"""Between two batches at most, so that a cleanup never keeps the database from its work."""


class InboxCleanup:
    """Forget processed messages once they are old; what is unprocessed or a dead letter stays, however old.

    A message that comes again after it was forgotten is taken for a new one: keep them for longer than their
    streams do. Of any number of cleanups at the same time one works, and the others leave it to that one.

    Arguments:
        random: draws numbers in [0, 1).
        retention_ms: how long a processed message is known.
        batch: messages removed in one transaction.
    """

    def __init__(
        self,
        inbox: InboxRepository,
        clock: Clock,
        random: Callable[[], float],
        *,
        retention_ms: int = RETENTION_MS,
        batch: int = BATCH,
    ) -> None:
        self._inbox = inbox
        self._clock = clock
        self._random = random
        self._retention_ms = retention_ms
        self._batch = batch

    async def clean(self) -> int | None:
        """Remove what is old by now and return how much that was; None when another cleanup is at it.

        Raises: Unavailable when the database can't be used.
        """
        before = self._clock.wall() - self._retention_ms * 1_000
        async with self._inbox.alone("cleanup") as alone:
            if not alone:
                return None
            removed = 0
            while count := await self._inbox.remove_processed(before, self._batch):
                removed += count
                if count < self._batch:
                    break
                await asyncio.sleep(self._random() * PAUSE_SECONDS)
            return removed

    async def keep_cleaning(self, every_ms: int) -> None:
        """Clean about every `every_ms`, not at the moment others do; a failure waits for the next time."""
        while True:
            await asyncio.sleep((0.5 + self._random()) * every_ms / 1_000)
            try:
                removed = await self.clean()
            except PostroomError as error:
                logger().warning("inbox.cleanup_failed", error=str(error))
            else:
                if removed:
                    logger().info("inbox.cleaned", removed=removed)
