"""Work that goes on beside other work, and ends with it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

CANCEL_AGAIN_SECONDS = 0.5


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do `work` for as long as the context lasts; whatever it ends with is not looked at."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await end(task)


async def end(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and return when all have ended, whatever they ended with.

    They are cancelled again and again: before Python 3.12, `asyncio.wait_for` forgets that it was cancelled
    when what it waits for is done at the same moment.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_SECONDS)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen, so that nobody is told that it was not
