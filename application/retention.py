"""Retention, from time to time, for as long as a mailbox is open."""

import asyncio

from postroom.application.engine import MailboxEngine
from postroom.application.telemetry import logger
from postroom.domain.errors import PostroomError

RETENTION_SECONDS = 3_600.0


async def keep_enforcing_retention(engine: MailboxEngine, every_seconds: float = RETENTION_SECONDS) -> None:
    """Remove what is older than the history retention, again and again (RFC-037: a background job).

    A failure is noted and tried again the next time: nothing depends on the past going at once.
    """
    while True:
        await asyncio.sleep(every_seconds)
        try:
            await engine.enforce_retention()
        except PostroomError as error:
            logger().warning("mailbox.retention_failed", mailbox=engine.log.mailbox, error=str(error))
