"""Metrics and health of a long-running command over HTTP (svc-mailbox I-10)."""

import asyncio
import json
from collections.abc import Coroutine, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from selectors import EVENT_READ, DefaultSelector
from socket import SHUT_RDWR, socketpair
from sys import exception
from threading import Lock, Thread
from typing import Any, ClassVar, TypeVar

from postroom.adapters.prometheus.text import write_metrics
from postroom.application.metrics import Monitor
from postroom.application.telemetry import logger
from postroom.domain.errors import Unavailable

T = TypeVar("T")

ANSWER_SECONDS = 5.0
"""Time in which the event loop of the command must answer; Prometheus waits 10 s."""
MAX_CONNECTIONS = 32
EVENT_LOOP = "event_loop"
JSON = "application/json"


@contextmanager
def serve_monitor(
    monitor: Monitor, loop: asyncio.AbstractEventLoop, port: int, host: str = "127.0.0.1"
) -> Iterator[str]:
    """Serve `/metrics`, `/healthz` and `/readyz` while the context lasts, and yield the base URL.

    A thread serves them, so that a command whose event loop hangs is noticed.

    Arguments:
        loop: the event loop of the command, on which the monitor is called.
        port: 0 for any free port.

    Raises: Unavailable when the port can't be bound.
    """

    class Handler(_Handler):
        state = _State(monitor, loop)

    try:
        server = _Server((host, port), Handler)
    except OSError as error:
        raise Unavailable(
            f"Metrics can't be served at {host}:{port}: {error.strerror}; choose another --metrics-port."
        ) from error
    thread = Thread(target=server.run, name="postroom monitor", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.stop()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    """Server with a thread for each of its few connections; the oldest makes room for a new one."""

    daemon_threads = True
    timeout = 0  # `handle_request` does not wait: `run` does

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._lock = Lock()
        self._open: dict[Any, None] = {}
        super().__init__(address, handler)
        self._stopping, self._stopper = socketpair()

    def run(self) -> None:
        """Accept connections until stopped; `serve_forever` would look for that several times a second."""
        with self._stopping, DefaultSelector() as selector:
            selector.register(self, EVENT_READ)
            selector.register(self._stopping, EVENT_READ)
            while not any(key.fileobj is self._stopping for key, _ in selector.select()):
                self.handle_request()

    def stop(self) -> None:
        """Make `run` return; call it once."""
        self._stopper.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread; see `ThreadingMixIn`."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(SHUT_RDWR)  # its thread notices that and closes it
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; see `BaseServer`."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that is gone; log anything else."""
        if not isinstance(exception(), OSError):
            logger().exception("monitor.request_failed")


class _State:
    """The monitor, called from other threads."""

    def __init__(self, monitor: Monitor, loop: asyncio.AbstractEventLoop) -> None:
        self._monitor = monitor
        self._loop = loop

    def metrics(self, accept: str) -> tuple[int, bytes, str]:
        try:
            text, content_type = write_metrics(self._run(self._monitor.collect()), accept)
        except FutureTimeoutError:
            return 503, b"The event loop does not answer.\n", "text/plain"
        return 200, text, content_type

    def health(self) -> tuple[int, bytes, str]:
        try:
            self._run(asyncio.sleep(0))
        except FutureTimeoutError:
            return 503, json.dumps({"ok": False}).encode(), JSON
        return 200, json.dumps({"ok": True}).encode(), JSON

    def readiness(self) -> tuple[int, bytes, str]:
        try:
            missing = self._run(self._monitor.find_missing())
        except FutureTimeoutError:
            missing = [EVENT_LOOP]
        body = json.dumps({"degraded": bool(missing), "missing": missing}).encode()
        return (503 if missing else 200), body, JSON

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(ANSWER_SECONDS)
        except FutureTimeoutError:
            future.cancel()
            raise


class _Handler(BaseHTTPRequestHandler):
    """Handler of one request."""

    state: ClassVar[_State]
    timeout = ANSWER_SECONDS  # for a client that sends or reads nothing

    def do_GET(self) -> None:  # named by the standard library
        """Answer a request."""
        try:
            answer = self._find_answer(self.path.partition("?")[0])
        except Exception:
            logger().exception("monitor.request_failed")
            answer = 500, b"The request failed; the log of the process has the traceback.\n", "text/plain"
        self._answer(*answer)

    def _find_answer(self, path: str) -> tuple[int, bytes, str]:
        match path:
            case "/metrics":
                return self.state.metrics(self.headers.get("Accept", ""))
            case "/healthz":
                return self.state.health()
            case "/readyz":
                return self.state.readiness()
            case _:
                return 404, b"There are /metrics, /healthz and /readyz.\n", "text/plain"

    def log_message(self, format: str, *args: object) -> None:  # named by the standard library
        """Log nothing: Prometheus asks every few seconds."""

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
