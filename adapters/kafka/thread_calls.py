"""Calls that coroutines request from a thread."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from postroom.domain.errors import PostroomError

T = TypeVar("T")


class ThreadCalls:
    """A queue of calls that a thread makes, and whose results it passes to the event loop.

    Arguments:
        changed: notified when a call is added; its lock guards the queue.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._calls: list[tuple[Callable[[], object], asyncio.Future[object]]] = []
        self._failure: PostroomError | None = None

    def __len__(self) -> int:
        """Return the number of calls that wait."""
        return len(self._calls)

    async def request(self, call: Callable[[], T]) -> T:
        """Have the thread make a call, and return its result.

        Raises: the error of the call, or that of `end`.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._calls.append((call, future))  # type: ignore[arg-type]  # a result fits its future
            self._changed.notify_all()
        return await future

    def serve(self) -> None:
        """Make the calls that wait; called by the thread."""
        for call, future in self._take():
            try:
                _resolve(future, None, call())
            except PostroomError as error:
                _resolve(future, error)

    def end(self, failure: PostroomError) -> None:
        """Fail the calls that wait, and all later ones; called by the thread."""
        with self._changed:
            self._failure = failure
        for _, future in self._take():
            _resolve(future, failure)

    def _take(self) -> list[tuple[Callable[[], object], asyncio.Future[object]]]:
        with self._changed:
            calls, self._calls = self._calls, []
        return calls


def _resolve(future: asyncio.Future[object], error: PostroomError | None, result: object = None) -> None:
    def resolve() -> None:
        if future.done():  # its caller was cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    with suppress(RuntimeError):  # the loop was closed
        future.get_loop().call_soon_threadsafe(resolve)
