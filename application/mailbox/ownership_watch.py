"""Periodic check for a newer owner, which an idle owner would not notice otherwise."""

import asyncio

from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.telemetry import logger
from postroom.domain.errors import Fenced, PostroomError

CHECK_SECONDS = 2.0


async def watch_ownership(engine: MailboxEngine, every_seconds: float = CHECK_SECONDS) -> None:
    """Check the ownership of an open mailbox at intervals until it is lost.

    Of consecutive failures to read the log, only the first is logged.
    """
    mailbox, failing = engine.log.mailbox, False
    while True:
        await asyncio.sleep(every_seconds)
        try:
            await engine.check_ownership()
            failing = False
        except Fenced as error:
            logger().error("mailbox.ownership_lost", mailbox=mailbox, error=str(error))
            return
        except PostroomError as error:
            if not failing:
                logger().warning("mailbox.ownership_unknown", mailbox=mailbox, error=str(error))
            failing = True
