"""Threads, background tasks, forks and garbage collection of a process."""

import asyncio
import gc
import math
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable

P = ParamSpec("P")
T = TypeVar("T")


class DaemonExecutor(ThreadPoolExecutor):
    """Executor that works until the process ends.

    A `ThreadPoolExecutor` refuses work as soon as the main thread ends, although other threads and exit
    handlers may go on to use a mailbox.

    Arguments:
        max_workers: the most threads; each is started when it is needed.
        name: prefix of the threads' names.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        super().__init__(max_workers)
        self._name = name
        self._items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._workers: list[threading.Thread] = []

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in a thread; the future raises Unavailable if none can be started."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        try:
            self._start_worker()
        except RuntimeError as error:
            future.set_exception(Unavailable(f"No thread can be started: {error}."))
        else:
            self._items.put(work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Finish submitted calls, and end the threads."""
        for _ in self._workers:
            self._items.put(None)
        if wait:
            for worker in self._workers:
                worker.join()

    def _start_worker(self) -> None:
        if self._idle.acquire(blocking=False) or len(self._workers) >= self._max_workers:
            return
        worker = threading.Thread(target=self._run, name=f"{self._name}-{len(self._workers)}", daemon=True)
        try:
            worker.start()
        except RuntimeError:  # exit handlers can't start threads; those that run do the work
            if not self._workers:
                raise
        else:
            self._workers.append(worker)

    def _run(self) -> None:
        while (work := self._items.get()) is not None:
            work()
            del work  # and with it what it refers to, while the thread waits
            self._idle.release()


MAX_LOOP_THREADS = 32


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop: that of uvloop if it is installed, which takes less CPU (ADR 0135)."""
    try:
        from uvloop import new_event_loop as new_loop
    except ImportError:
        return asyncio.new_event_loop()
    return new_loop()


class BackgroundLoop:
    """Event loop in a thread that ends with the process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.loop = new_event_loop()
        self.loop.set_default_executor(DaemonExecutor(MAX_LOOP_THREADS, "postroom-io"))
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


QUERY_THREADS: Final = 4
query_pool: ContextVar[str] = ContextVar("query_pool", default="")
"""Name of the thread pool for the queries of the current task; a store that may hang has its own."""
_executors: dict[tuple[int, str], DaemonExecutor] = {}
"""The executors of this process, by its id and name: a forked process has none of its parent's threads."""


async def in_query_thread(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a call that blocks, made in one of a few threads of the process.

    Mailboxes, too, read their logs in the few threads of the event loop: however many searches callers start
    at a time, no mailbox waits for them.
    """
    work = partial(copy_context().run, call, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_executor(), work)


def _executor() -> DaemonExecutor:
    key = os.getpid(), query_pool.get()
    if key not in _executors:
        for each in [each for each in _executors if each[0] != key[0]]:
            del _executors[each]
        _executors[key] = DaemonExecutor(QUERY_THREADS, "postroom-query")
    return _executors[key]


_descriptors: dict[int, os.stat_result] = {}


def set_close_on_fork(descriptor: int, is_closed: bool) -> None:
    """Set whether forked processes lose a descriptor; unset it before it is closed.

    Unlike close-on-exec, this concerns processes that go on with the same program, such as workers of
    `multiprocessing` and of web servers.
    """
    if is_closed:
        _descriptors[descriptor] = os.fstat(descriptor)
    else:
        _descriptors.pop(descriptor, None)


def check_not_forked(process: int, mailbox: str) -> None:
    """Check that this is the process that opened a mailbox.

    Arguments:
        process: its id.

    Raises: InvalidRequest in a process that was forked from it.
    """
    if os.getpid() != process:
        raise InvalidRequest(
            f"Mailbox {mailbox} was opened before this process was forked, and does not work here; connect "
            "after the fork."
        )


def _close_in_child() -> None:
    """Put /dev/null in place of the descriptors: the objects that contain them still close the numbers."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor, status in _descriptors.items():
        try:
            if os.path.samestat(os.fstat(descriptor), status):  # a library may have closed it by itself
                os.dup2(null, descriptor, inheritable=False)
        except OSError:
            continue
    os.close(null)
    _descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def exempt_heap() -> Iterator[None]:
    """Exempt the objects that exist now from garbage collection while the context lasts.

    A full collection visits every object, with the interpreter stopped: the modules, which are never garbage,
    and the queues of a mailbox, which have no cycles (ADR 0067). Objects created later are collected as
    usual.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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


def has_result(future: "asyncio.Future[Any]") -> bool:
    """Return whether a future has a result: its caller may have been cancelled just afterwards."""
    return future.done() and not future.cancelled() and future.exception() is None


class Alarm(asyncio.Event):
    """Event that may also be set by a timer.

    Attributes:
        is_due: whether the timer set it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_due = False
        self._timer: asyncio.TimerHandle | None = None

    def set_within(self, seconds: float) -> None:
        """Set the event after this time, or earlier if a former call said so."""
        loop = asyncio.get_running_loop()
        at, timer = loop.time() + seconds, self._timer
        if timer is None or timer.when() > at:
            self.cancel()
            self._timer = loop.call_at(at, self._ring)

    def cancel(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer, self.is_due = None, True
        self.set()


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


QUIET_RATIO = 8


def poll_pause(quiet: float, least: float, most: float) -> float:
    """Return the pause before the next poll: an eighth of the quiet time, within bounds, all in seconds.

    Arguments:
        quiet: time since a poll last found something.
    """
    return min(max(least, quiet / QUIET_RATIO), most)


async def wait_at_most(seconds: float, awaitable: Awaitable[object]) -> None:
    """Wait for `awaitable`, but no longer than some seconds.

    Unlike `asyncio.wait_for` before Python 3.12, it never swallows a cancellation.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await awaitable


@contextmanager
def repeating(
    name: str, job: Callable[[], object], every_seconds: float, failed: str, **fields: str
) -> Iterator[None]:
    """Run a job periodically in a thread while the context lasts, at once for the first time.

    Arguments:
        name: of the thread.
        failed, fields: log event of a failure, after which the job is run again, and its fields.
    """
    stop = threading.Event()

    def run() -> None:
        while True:
            try:
                job()
            except PostroomError as error:
                logger().retry(failed, **fields, error=str(error))
            if stop.wait(every_seconds):
                return

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
