"""TLS connections, of which a bounded number may be in their handshake."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from postroom.application.background import cancel_and_wait
from postroom.application.telemetry import logger

PAUSE_SECONDS = 0.2
SHUTDOWN_SECONDS = 1.0


class TlsListener:
    """Accepts connections and makes a protocol of each whose handshake succeeds.

    A server of asyncio has no bound: every silent peer would take a file and buffers until the time-out.

    Arguments:
        max_handshakes: connections above it are closed at once.
        timeout: of a handshake, in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        *,
        max_handshakes: int,
        timeout: float,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._make_protocol = make_protocol
        self._context = context
        self._max_handshakes = max_handshakes
        self._timeout = timeout
        self._handshakes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Accept connections until it is cancelled; then close the listener, and end the handshakes."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    peer, _ = await loop.sock_accept(self._listener)
                except OSError as error:  # such as a lack of files, which ends
                    logger().warning("tls.accept_failed", reason=error.strerror)
                    await asyncio.sleep(PAUSE_SECONDS)
                    continue
                if len(self._handshakes) >= self._max_handshakes:
                    peer.close()
                    continue
                task = asyncio.create_task(self._shake_hands(peer))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)
        finally:
            self._listener.close()
            await cancel_and_wait(*self._handshakes)

    async def _shake_hands(self, peer: socket.socket) -> None:
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
