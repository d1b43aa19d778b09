"""Jobs of executors that run in the event loop itself."""

import asyncio
from collections.abc import Callable
from typing import Any


class Job:
    """A call and the future that waits for its outcome.

    Arguments:
        done: answered by `finish`, unless it was cancelled.
        func: called by `run` with `args`.
    """

    def __init__(self, done: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._done = done
        self._func = func
        self._args = args
        self._result: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Call the function, and keep what it returns or raises."""
        try:
            self._result = self._func(*self._args)
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Answer with what the function returned or raised."""
        if self._done.cancelled():
            return
        if self._error is None:
            self._done.set_result(self._result)
        else:
            self._done.set_exception(self._error)
