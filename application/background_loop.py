"""The event loop in a thread of its own, on which the mailboxes that `connect` opens live."""

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from postroom.application.daemon_executor import DaemonExecutor
from postroom.domain.errors import InvalidRequest, Unavailable

T = TypeVar("T")

MAX_THREADS = 32


class BackgroundLoop:
    """Event loop in a thread that ends with the process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(DaemonExecutor(MAX_THREADS, "postroom-io"))
        self._thread = threading.Thread(target=self.loop.run_forever, name="postroom", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Return whether the caller runs in its thread."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T], *, may_block: bool = False) -> T:
        """Return the result of a coroutine, which runs on the loop; an interrupt cancels it.

        Arguments:
            may_block: wait for it although the caller runs on another event loop.

        Raises: InvalidRequest where it would wait for itself or block an event loop, Unavailable when the
            process ends.
        """
        if sys.is_finalizing():  # only this thread still runs
            work.close()
            raise Unavailable("The process ends, so a SyncMailbox can't be used any more; close it before.")
        if os.getpid() != self.process or self.is_current:
            work.close()
            raise InvalidRequest(
                "A SyncMailbox works neither in a process forked after it was opened nor in the coroutines "
                "of its own event loop; connect after the fork, and await a Mailbox in coroutines."
            )
        if not may_block and _has_event_loop():
            work.close()
            raise InvalidRequest(
                "A SyncMailbox was used in a coroutine, where it blocks the event loop; use `async with "
                "connect(...)` and await its methods, or call the SyncMailbox in `asyncio.to_thread`."
            )
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_lock = threading.Lock()
_loops: list[BackgroundLoop] = []


def background_loop() -> BackgroundLoop:
    """Return the loop of this process; a forked process has one of its own."""
    with _lock:
        if not _loops or _loops[-1].process != os.getpid():
            _loops.append(BackgroundLoop())
        return _loops[-1]
