"""Threads for queries of read models, and for other reads that may take seconds."""

import asyncio
import os
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Final, ParamSpec, TypeVar

from postroom.application.daemon_executor import DaemonExecutor

P = ParamSpec("P")
T = TypeVar("T")

THREADS: Final = 4
_executors: dict[int, DaemonExecutor] = {}
"""The executor of this process, by its id: a forked process has none of its parent's threads."""


async def in_query_thread(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a call that blocks, made in one of a few threads of the process.

    Mailboxes read their logs in the threads of the event loop, of which there are few, too: however many
    searches callers start at a time, no mailbox waits for them.
    """
    work = partial(copy_context().run, call, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_executor(), work)


def _executor() -> DaemonExecutor:
    process = os.getpid()
    if process not in _executors:
        _executors.clear()
        _executors[process] = DaemonExecutor(THREADS, "postroom-query")
    return _executors[process]
