"""A mailbox's messages as a worker handles them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from postroom import NewMessage, Worker
from postroom.adapters.compose import OwnedMailbox
from postroom.application.operations.mailbox import Mailbox
from tests.support.waiting import SECONDS


async def send(mailbox: OwnedMailbox, *payloads: bytes, topic: str = "orders") -> None:
    await mailbox.send_batch([NewMessage(topic=topic, payload=payload) for payload in payloads])


async def unsettled(mailbox: OwnedMailbox) -> dict[str, int]:
    """Return the numbers of messages that are not settled."""
    shards = (await mailbox.get_backlog()).shards
    names = ("ready", "in_flight", "delayed", "dead")
    counts = {name: sum(getattr(shard, name) for shard in shards) for name in names}
    return {name: count for name, count in counts.items() if count}


@asynccontextmanager
async def running(worker: Worker, mailbox: Mailbox, **options: Any) -> AsyncIterator["asyncio.Task[Any]"]:
    """Run a worker until the context ends, and see that it stops."""
    task = asyncio.create_task(worker.run(mailbox, **options))
    try:
        yield task
    finally:
        worker.stop()
        async with asyncio.timeout(SECONDS):
            await task
