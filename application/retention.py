"""Retention: what is too old goes, and the oldest of what is too much, for as long as a mailbox is open."""

import asyncio

from postroom.application.engine import MailboxEngine
from postroom.application.telemetry import logger
from postroom.domain.errors import PostroomError

RETENTION_SECONDS = 3_600.0
SIZE_SECONDS = 30.0
"""How often the size is looked at; a mailbox that takes in 20,000 messages a second grows 1 GB meanwhile."""
ROOM = 20
"""A mailbox that is too large is cut to a twentieth less than it may be, so that it isn't again at once."""
ROUNDS = 10
"""What records take is known only about, so how many must go is found out in rounds."""


async def keep_enforcing_retention(
    engine: MailboxEngine, every_seconds: float = RETENTION_SECONDS, size_every_seconds: float = SIZE_SECONDS
) -> None:
    """Remove what is too old or too much, again and again (RFC-037: a background job).

    A failure is noted and tried again the next time: nothing depends on the past going at once.
    """
    pause = min(every_seconds, size_every_seconds)
    elapsed = 0.0
    while True:
        await asyncio.sleep(pause)
        elapsed += pause
        try:
            if elapsed >= every_seconds:
                elapsed = 0.0
                await engine.enforce_retention()
            await enforce_size(engine)
        except PostroomError as error:
            logger().warning("mailbox.retention_failed", mailbox=engine.log.mailbox, error=str(error))


async def enforce_size(engine: MailboxEngine) -> int:
    """Remove the oldest records until the log is as small as `max_store_bytes` says, then shrink the store.

    What is unsettled is never removed, nor what came after it; when nothing else is left, that is said.

    Returns: how many records were removed.
    Raises: Unavailable when something failed; what was removed by then stays removed.
    """
    limit, log = engine.mailbox.limits.max_store_bytes, engine.log
    if limit is None:
        return 0
    removed = 0
    size = await asyncio.to_thread(log.size)
    for _ in range(ROUNDS):
        if size.records <= limit:
            break
        excess = size.records - limit + limit // ROOM
        gone = await engine.remove_through(await asyncio.to_thread(log.position_at_size, excess))
        if not gone:
            logger().warning(
                "mailbox.too_large", mailbox=log.mailbox, bytes=size.records, limit=limit, reason="unsettled"
            )
            break
        removed += gone
        size = await asyncio.to_thread(log.size)
    given = await engine.give_back(size.held - limit)
    if removed or given:
        logger().info(
            "mailbox.shrunk",
            mailbox=log.mailbox,
            records=removed,
            bytes=size.records,
            limit=limit,
            given_back=given,
        )
    return removed
