"""Walks of operations: which files and functions of the product a call passes, and where it climbs.

An operation passes a function when it is called at least once between a call and its result, in any thread of
this process: the caller's side, servers and proxies included. Comprehensions and lambdas are part of the
function around them. Each operation is called some times, and only what every call passes counts: the first
call loads what is loaded lazily, and timers of other tasks may end during a call.

A climb is a pair of functions, of which the one in a lower layer calls the one in a higher layer; layers
are, from below, domain, application, projections and adapters. The caller is the nearest function of the
product on the stack, as libraries call back: a port that an adapter implements, or a handler given to a lower
layer, is a climb. A thread that runs a function for another thread begins a new stack.
"""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import NamedTuple

import postroom
from postroom.adapters.cli.main import invoke
from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.connect import ClientTls
from postroom.adapters.grpc.client import connect_grpc
from postroom.adapters.http_client import connect_http
from tests.support.local_cluster import LocalCluster
from tests.support.messages import message
from tests.support.servers.console import served_console
from tests.support.surfaces import served

ROOT = str(Path(postroom.__file__).parent) + "/"
LAYERS = ("domain", "application", "projections", "adapters")
POLLED = ("application/outbox/message_relay.py", "adapters/sqlite/message_outbox.py")
POLLING = ("poll_pause",)
"""Files and functions of the polling of an open mailbox, which runs with or without calls."""
MAILBOX = "box@test"
CALLS = 15


class Walk(NamedTuple):
    """Numbers of places that an operation passes."""

    files: int
    functions: int
    climbs: int


LIMITS = {
    "send": Walk(25, 105, 3),
    "receive": Walk(23, 102, 2),
    "nack": Walk(20, 103, 2),
    "HTTP receive": Walk(38, 184, 3),
    "gRPC ack over a proxy": Walk(36, 157, 4),
    "console search": Walk(39, 195, 4),
    "CLI send": Walk(77, 431, 19),
}
"""Maxima of each operation. A change that passes fewer places lowers them; none raises them."""

Operations = AsyncIterator[tuple[str, Callable[[], Awaitable[object]]]]


class Passed(NamedTuple):
    """Functions that an operation passes, and its climbs."""

    functions: set[CodeType]
    climbs: set[tuple[CodeType, CodeType]]

    @property
    def walk(self) -> Walk:
        """Count them."""
        files = {function.co_filename for function in self.functions}
        return Walk(len(files), len(self.functions), len(self.climbs))

    @property
    def places(self) -> list[str]:
        """Return the functions, by file."""
        return sorted(
            f"{each.co_filename.removeprefix(ROOT)}:{each.co_firstlineno} {each.co_qualname}"
            for each in self.functions
        )


class Tracer:
    """Profile function that notes functions of the product while it records."""

    def __init__(self) -> None:
        self.is_recording = False
        self.functions: set[CodeType] = set()
        self.climbs: set[tuple[CodeType, CodeType]] = set()
        self._layers: dict[CodeType, int] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if not self.is_recording or event != "call":
            return
        called = frame.f_code
        layer = self._layer(called)
        if layer < 0 or called.co_name.startswith("<"):
            return
        self.functions.add(called)
        caller = frame.f_back
        while caller is not None and self._layer(caller.f_code) < 0:
            caller = caller.f_back
        if caller is not None and self._layer(caller.f_code) < layer:
            self.climbs.add((caller.f_code, called))

    def _layer(self, code: CodeType) -> int:
        """Return the index of a function's layer; -1 for one that does not count."""
        layer = self._layers.get(code)
        if layer is None:
            file = code.co_filename.removeprefix(ROOT)
            name = file.partition("/")[0]
            is_polled = file in POLLED or code.co_name in POLLING
            is_counted = code.co_filename.startswith(ROOT) and name in LAYERS and not is_polled
            layer = self._layers[code] = LAYERS.index(name) if is_counted else -1
        return layer

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Call the tracer in this thread and in those that are started meanwhile."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def begin(self) -> None:
        """Record from now on."""
        self.functions, self.climbs = set(), set()
        self.is_recording = True

    def end(self, passed: Passed | None) -> Passed:
        """Stop recording, and return what was passed, and also before if `passed` is given."""
        self.is_recording = False
        if passed is None:
            return Passed(self.functions, self.climbs)
        return Passed(passed.functions & self.functions, passed.climbs & self.climbs)


def measure(*, library_only: bool = False) -> dict[str, Passed]:
    """Walk all operations, or those of the library, which need no server."""
    tracer = Tracer()
    result: dict[str, Passed] = {}
    with TemporaryDirectory() as folder, tracer.installed():
        surfaces = [_library] if library_only else [_library, _http, _proxy, _console]
        asyncio.run(_measure(tracer, surfaces, Path(folder), result))
        for _ in range(0 if library_only else CALLS):
            with redirect_stdout(StringIO()):
                tracer.begin()
                code = invoke(_send_command(Path(folder)))
                assert code == 0
                result["CLI send"] = tracer.end(result.get("CLI send"))
    return result


async def _measure(
    tracer: Tracer, surfaces: Sequence[Callable[[Path], Operations]], folder: Path, result: dict[str, Passed]
) -> None:
    for operations in surfaces:
        async for name, call in operations(folder):
            tracer.begin()
            try:
                await call()
            finally:
                result[name] = tracer.end(result.get(name))


async def _library(folder: Path) -> Operations:
    async with open_mailbox(str(folder / "library.db"), MAILBOX) as mailbox:
        for _ in range(CALLS):
            yield "send", lambda: mailbox.send_message(message())
            yield "receive", lambda: mailbox.receive_messages("orders", max_messages=1)
            await mailbox.send_message(message())
            (received,) = await mailbox.receive_messages("orders", max_messages=1)
            receipts = [received.receipt]
            yield "nack", lambda: mailbox.nack_messages(receipts, reason="boom")  # noqa: B023


async def _http(folder: Path) -> Operations:
    async with AsyncExitStack() as opened:
        mailbox = await opened.enter_async_context(open_mailbox(str(folder / "http.db"), MAILBOX))
        url = await opened.enter_async_context(served(mailbox, "http"))
        client = await opened.enter_async_context(connect_http(url, timeout_ms=60_000, tls=ClientTls()))
        for _ in range(CALLS):
            await mailbox.send_message(message())
            yield "HTTP receive", lambda: client.receive_messages("orders", max_messages=1)


async def _proxy(folder: Path) -> Operations:
    async with AsyncExitStack() as opened:
        cluster = await opened.enter_async_context(LocalCluster())
        await cluster.move(MAILBOX, await cluster.add_owner())
        client = await opened.enter_async_context(
            connect_grpc(cluster.proxy, timeout_ms=60_000, mailbox=MAILBOX)
        )
        for _ in range(CALLS):
            await client.send_message(message())
            (received,) = await client.receive_messages("orders", max_messages=1)
            receipts = [received.receipt]
            yield "gRPC ack over a proxy", lambda: client.ack_messages(receipts)  # noqa: B023


async def _console(folder: Path) -> Operations:
    from tests.projections.histories import build_without_spark  # slow to import

    store = str(folder / "console.db")
    async with open_mailbox(store, MAILBOX) as mailbox:
        await mailbox.send_message(message())
        await asyncio.to_thread(build_without_spark, Path(store))
        async with served_console(mailbox, store=store) as browser:
            for _ in range(CALLS):
                yield "console search", lambda: browser.get("/search")


def excesses(measured: dict[str, Passed]) -> list[str]:
    """Say which operations pass more places than their limits."""
    return [
        f"{name} passes {number} {what}; the limit is {limit}."
        for name, passed in measured.items()
        for what, number, limit in zip(Walk._fields, passed.walk, LIMITS[name], strict=True)
        if number > limit
    ]


def _send_command(folder: Path) -> list[str]:
    return ["send", "orders", "hi", "--store", str(folder / "cli.db"), "--mailbox", MAILBOX]
