"""Background tasks that end with their context, and waits that end in time."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager, suppress
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


async def cancel_and_wait(*tasks: "asyncio.Task[Any]", seconds: float = math.inf) -> set["asyncio.Task[Any]"]:
    """Cancel tasks and return when all have ended; their results and exceptions are ignored.

    The cancellation is repeated: before Python 3.12, `asyncio.wait_for` swallows it if the future completes
    at the same time.

    Arguments:
        seconds: how long tasks that ignore their cancellation are waited for.

    Returns: the tasks that have not ended.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    pending = set(tasks)
    while pending and (left := until - loop.time()) > 0:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=min(left, CANCEL_AGAIN_SECONDS))
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # silences asyncio's 'exception was never retrieved'
    return pending


async def wait_uncancelled(awaitable: Awaitable[object]) -> None:
    """Wait for what ends soon, however often the caller is cancelled; the cancellation is raised after it."""
    waiting = asyncio.ensure_future(awaitable)
    is_cancelled = False
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
    await waiting


async def wait_at_most(seconds: float, awaitable: Awaitable[object]) -> None:
    """Wait for `awaitable`, but no longer than some seconds.

    Unlike `asyncio.wait_for` before Python 3.12, it never swallows a cancellation.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await awaitable
