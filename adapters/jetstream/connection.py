"""A connection to NATS in a thread of its own, for callers that block."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from postroom.adapters.nats.client import SupervisedClient
from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.settings import NatsSettings
from postroom.domain.errors import Unavailable

T = TypeVar("T")
_MARGIN_SECONDS = 1.0
"""Time that a call with a deadline of its own may take beyond it."""
_CLOSE_SECONDS = 10.0


class ConnectionThread:
    """A supervised connection (ADR 0031) that any thread may use.

    Arguments:
        settings: address of the servers, and access to them.
        name: of the client, as servers report it.

    Raises: Unavailable when no server answers or the connection is refused, InvalidRequest when a file of the
        settings can't be used.
    """

    def __init__(self, settings: NatsSettings, name: str) -> None:
        self._settings = settings
        self._name = name
        self._opened: Future[tuple[asyncio.AbstractEventLoop, SupervisedClient]] = Future()
        self._end: asyncio.Event | None = None
        self.reconnected = asyncio.Event()
        """Set whenever the connection was replaced; for coroutines in the thread."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._loop, self.client = self._opened.result()

    def call(self, work: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T:
        """Run a coroutine in the thread, and return its result.

        Arguments:
            seconds: after which the work should have ended by itself; it is cancelled a little later.

        Raises: Unavailable when the connection is closed or the work is late; else what the work raises.
        """
        if self._closed.is_set():
            raise self._is_closed()
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result(seconds + _MARGIN_SECONDS)
        except CancelledError:
            raise self._was_closed() from None
        except FutureTimeoutError:
            if future.done():
                raise  # the work's own
            future.cancel()
            raise self._is_late(seconds) from None

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine in the thread until the connection is closed."""
        asyncio.run_coroutine_threadsafe(work(), self._loop)

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T:
        """Do as `call`, from a coroutine of any event loop; cancelling it cancels the work."""
        if self._closed.is_set():
            raise self._is_closed()
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        limit = asyncio.timeout(seconds + _MARGIN_SECONDS)
        try:
            async with limit:
                return await asyncio.wrap_future(future)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._is_late(seconds) from None
        except asyncio.CancelledError:
            if self._closed.is_set() and not _is_cancelling():
                raise self._was_closed() from None
            raise

    def close(self) -> None:
        """Close the connection, and end the thread; closing twice is fine."""
        self._closed.set()
        if self._end is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_CLOSE_SECONDS)

    def _is_closed(self) -> Unavailable:
        return Unavailable(f"The connection {self._name} to NATS is closed; open the store again.")

    def _was_closed(self) -> Unavailable:
        return Unavailable(f"The connection {self._name} to NATS was closed meanwhile.")

    def _is_late(self, seconds: float) -> Unavailable:
        return Unavailable(
            f"NATS at {self._settings.shown_url} did not answer within {seconds:g} s; check that its servers "
            "run and that the stream has a leader."
        )

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(error)
        finally:
            self._closed.set()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        async with connect(self._settings, self._name, self.reconnected.set) as client:
            self._opened.set_result((asyncio.get_running_loop(), client))
            await self._end.wait()


async def with_deadline(work: Callable[[float], Coroutine[Any, Any, T]], seconds: float) -> T:
    """Do work, and tell it its deadline, a time of the event loop that runs it."""
    return await work(asyncio.get_running_loop().time() + seconds)


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
