"""Threads for handlers that are no coroutine functions."""

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from postroom.application.messages import ReceivedMessage
from postroom.application.telemetry import summarize

Call = Callable[[ReceivedMessage], Any]


class _Job(NamedTuple):
    context: Context
    call: Call
    message: ReceivedMessage
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[Any]"


class HandlerThread:
    """One thread that runs one handler at a time.

    A handler that exceeds its time limit can't be stopped, so the thread is a daemon: it neither delays the
    end of the process nor is given another message before the handler returns.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._done: asyncio.Future[Any] | None = None

    async def run(self, call: Call, message: ReceivedMessage) -> Any:
        """Call a handler in the thread and return its result; a cancellation leaves it running."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        self._jobs.put(_Job(copy_context(), call, message, loop, self._done))
        return await asyncio.shield(self._done)

    async def wait_until_idle(self) -> None:
        """Return when the handler that was called last has returned."""
        if self._done is not None and not self._done.done():
            await asyncio.wait([self._done])

    def close(self) -> None:
        """End the thread when its handler has returned."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                result, error = job.context.run(job.call, job.message), None
            except BaseException as raised:  # goes to the caller
                result, error = None, raised
            if not job.loop.is_closed():
                job.loop.call_soon_threadsafe(_finish, job.done, result, error)


def _finish(done: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        # Some mean another thing to the event loop than to the handler that raised them.
        is_control = isinstance(error, StopIteration | KeyboardInterrupt | GeneratorExit)
        done.set_exception(RuntimeError(summarize(error)) if is_control else error)
        done.exception()  # silences asyncio's 'exception was never retrieved'
