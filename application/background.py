"""Background tasks that end with their context."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

CANCEL_AGAIN_SECONDS = 0.5


@asynccontextmanager
async def background_task(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` in a task for the duration of the context; its result and exceptions are ignored."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await cancel_and_wait(task)


async def cancel_and_wait(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and return when all have ended; their results and exceptions are ignored.

    The cancellation is repeated: before Python 3.12, `asyncio.wait_for` swallows it if the future completes
    at the same time.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_SECONDS)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # silences asyncio's 'exception was never retrieved'
