"""Resolving futures of the event loop from threads."""

import asyncio
from contextlib import suppress

from postroom.domain.errors import PostroomError


def resolve_in_loop(
    future: asyncio.Future[object], error: PostroomError | None, result: object = None
) -> None:
    """Resolve a future of an event loop from another thread."""

    def resolve() -> None:
        if future.done():  # its caller was cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    with suppress(RuntimeError):  # the loop was closed
        future.get_loop().call_soon_threadsafe(resolve)
