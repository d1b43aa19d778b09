"""Listener for TLS connections that limits the number of concurrent handshakes."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from postroom.adapters.sockets.connections import UnauthenticatedConnections
from postroom.application.telemetry import logger
from postroom.application.threads import cancel_and_wait

PAUSE_SECONDS = 0.2
SHUTDOWN_SECONDS = 1.0


class TlsListener:
    """Accepts connections and makes a protocol of each whose handshake succeeds.

    A server of asyncio has no bound: every silent peer would take a file and buffers until the time-out.

    Arguments:
        max_handshakes: handshakes at a time; above it, the oldest one of the address with the most ends, so
            that silent peers keep nobody else out.
        max_per_address: the same for one address; see `UnauthenticatedConnections`.
        timeout: of a handshake, in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        *,
        max_handshakes: int,
        max_per_address: int,
        timeout: float,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._make_protocol = make_protocol
        self._context = context
        self._max_handshakes = max_handshakes
        self._timeout = timeout
        self._waiting = UnauthenticatedConnections[asyncio.Task[None]](
            asyncio.Task.cancel, max_handshakes, max_per_address
        )
        self._handshakes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Accept connections until it is cancelled; then close the listener, and end the handshakes."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    peer, address = await loop.sock_accept(self._listener)
                except OSError as error:  # such as a lack of files, which ends
                    logger().warning("tls.accept_failed", reason=error.strerror)
                    await asyncio.sleep(PAUSE_SECONDS)
                    continue
                if len(self._waiting) >= self._max_handshakes:
                    self._waiting.make_room()
                task = asyncio.create_task(self._shake_hands(peer))
                self._handshakes.add(task)
                task.add_done_callback(self._end)
                await asyncio.sleep(0)  # a task that is cancelled before it begins would not close its socket
                self._waiting.add(task, address)
        finally:
            self._listener.close()
            await cancel_and_wait(*self._handshakes)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        self._waiting.discard(task)

    async def _shake_hands(self, peer: socket.socket) -> None:
        alerts: list[bytes] = []
        _alerts.set(alerts)
        with peer.dup() as copy:
            try:
                await asyncio.get_running_loop().connect_accepted_socket(
                    self._make_protocol,
                    peer,
                    ssl=self._context,
                    ssl_handshake_timeout=self._timeout,
                    ssl_shutdown_timeout=SHUTDOWN_SECONDS,
                )
            except OSError as error:
                with suppress(OSError):
                    peer.close()
                logger().info("tls.handshake_failed", reason=getattr(error, "reason", None) or str(error))
                await _send_last(copy, b"".join(alerts))


_alerts: ContextVar[list[bytes] | None] = ContextVar("alerts", default=None)


class _Connection(ssl.SSLObject):
    """TLS end of a connection that keeps the alert of a failed handshake."""

    outgoing: ssl.MemoryBIO
    alerts: list[bytes]

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            self.alerts.append(self.outgoing.read())
            raise


class AlertingContext(ssl.SSLContext):
    """TLS context whose failed handshakes leave their alerts to `TlsListener`.

    asyncio and uvloop drop the alert, so that clients can't tell a refused certificate from a server that
    restarts.
    """

    sslobject_class = _Connection

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *arguments: Any, **options: Any
    ) -> ssl.SSLObject:
        """Return the TLS end of a connection; see `ssl.SSLContext`."""
        connection: Any = super().wrap_bio(incoming, outgoing, *arguments, **options)
        connection.outgoing, connection.alerts = outgoing, [] if (alerts := _alerts.get()) is None else alerts
        return connection  # type: ignore[no-any-return]  # a `_Connection`


async def _send_last(peer: socket.socket, data: bytes) -> None:
    """Send bytes, and wait for the peer to close: what it still sends would reset the connection."""
    loop = asyncio.get_running_loop()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(SHUTDOWN_SECONDS):
            await loop.sock_sendall(peer, data)
            peer.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(peer, 65_536):
                pass
