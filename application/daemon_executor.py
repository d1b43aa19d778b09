"""Threads for blocking work that run until the process ends."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from postroom.domain.errors import Unavailable

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
        """Finish what was submitted, and end the threads."""
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
