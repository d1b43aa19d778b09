"""Settings of the lease store on JetStream, and its connection to NATS in a thread of its own."""

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from nats.aio.client import Client

from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.settings import NatsSettings
from postroom.domain.arguments import check_int, check_type
from postroom.domain.errors import InvalidRequest, Unavailable

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
        self._opened: Future[tuple[asyncio.AbstractEventLoop, Client]] = Future()
        self._end: asyncio.Event | None = None
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
            raise Unavailable(f"The connection {self._name} to NATS is closed; open the store again.")
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result(seconds + _MARGIN_SECONDS)
        except CancelledError:
            raise Unavailable(f"The connection {self._name} to NATS was closed meanwhile.") from None
        except FutureTimeoutError:
            if future.done():
                raise  # the work's own
            future.cancel()
            raise Unavailable(
                f"NATS at {self._settings.shown_url} did not answer within {seconds:g} s; check that its "
                "servers run and that the stream has a leader."
            ) from None

    def close(self) -> None:
        """Close the connection, and end the thread; closing twice is fine."""
        self._closed.set()
        if self._end is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_CLOSE_SECONDS)

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
        async with connect(self._settings, self._name) as client:
            self._opened.set_result((asyncio.get_running_loop(), client))
            await self._end.wait()


DEFAULT_STREAM = "POSTROOM_LEASES"
MIN_EVENTS_PER_AGGREGATE = EVENTS_PER_AGGREGATE = 2
"""Events of an aggregate that the stream keeps: the last one, which is enough for a fold, and the one before
it, with which a write is compared whose outcome is unknown."""
TIMEOUT_MS = 5_000
MAX_REPLICAS = 5
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class LeaseStreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The stream of leases, and how its durability is known.

    Arguments:
        nats: address of the servers, and access to them.
        stream: name of the stream, which is created if it is missing.
        replicas: of the stream; None is 3 in a cluster, and 1 on a server that is alone.
        monitoring: HTTP addresses of the monitoring of all servers, by which it is verified that they sync
            every write before they acknowledge it.
        assume_sync_always: the operator's statement that they do, where their monitoring can't be reached.
        events_per_aggregate: how many events the stream keeps of each aggregate, if it is created.
        timeout_ms: after which a call fails.

    Raises: InvalidRequest for a value of another type or out of bounds.
    """

    nats: NatsSettings
    stream: str = DEFAULT_STREAM
    replicas: int | None = None
    monitoring: tuple[str, ...] = ()
    assume_sync_always: bool = False
    events_per_aggregate: int = EVENTS_PER_AGGREGATE
    timeout_ms: int = TIMEOUT_MS

    def __post_init__(self) -> None:
        check_type("nats", self.nats, NatsSettings)
        if _NAME.fullmatch(check_type("stream", self.stream, str)) is None:
            raise InvalidRequest(
                f"{self.stream!r} is not a name of a stream; use 1 to 64 letters, digits, '_' and '-'."
            )
        if self.replicas is not None:
            check_int("replicas", self.replicas, 1, MAX_REPLICAS)
        check_type("assume_sync_always", self.assume_sync_always, bool)
        check_int("events_per_aggregate", self.events_per_aggregate, MIN_EVENTS_PER_AGGREGATE)
        check_int("timeout_ms", self.timeout_ms, 1)
        for url in check_type("monitoring", self.monitoring, tuple):
            if not _is_http(check_type("monitoring", url, str)):
                raise InvalidRequest(
                    f"{url!r} is not the address of a NATS server's monitoring; write http://host:8222."
                )


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)
