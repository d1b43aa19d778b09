"""Limits of a server's connections and TLS handshakes, above all of peers without a valid token."""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, Final, Generic, TypeVar

import msgspec

from postroom.application.telemetry import logger
from postroom.application.threads import cancel_and_wait

T = TypeVar("T", bound=Hashable)

GRACE_SECONDS: Final = 1.0
"""Time that a connection above a share has to show a token: clients that start together exceed it briefly."""
_NETWORK_BITS: Final = 64
_LOOPBACK: Final = "loopback"


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the connections of a server.

    Arguments:
        max_connections: connections at a time.
        max_unauthenticated: of these, connections without a valid token; the oldest makes room for a new one.
        max_unauthenticated_per_address: the same for one IPv4 address or IPv6 network of 64 bits; this
            machine is one address.
        unauthenticated_timeout_ms: time between two requests of a connection without a valid token.
    """

    max_connections: int = 1_024
    max_unauthenticated: int = 128
    max_unauthenticated_per_address: int = 32
    unauthenticated_timeout_ms: int = 5_000


class UnauthenticatedConnections(Generic[T]):
    """The connections of a server whose peers have not shown a valid token, in the order of their beginning.

    Connections above a share are closed once they have had a second to show a token: first the oldest one of
    the address that has the most, so that no client keeps others out.

    Arguments:
        close: closes a connection; it may call `discard`.
        maximum, per_address: the shares.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        close: Callable[[T], object],
        maximum: int,
        per_address: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._close = close
        self._maximum = maximum
        self._per_address = per_address
        self._clock = clock
        self._addresses: dict[T, str] = {}
        self._begun: dict[str, dict[T, float]] = {}
        """When connections began, oldest first, by address."""

    def __len__(self) -> int:
        """Return the number of connections."""
        return len(self._addresses)

    def __contains__(self, connection: object) -> bool:
        """Return whether a connection is one of them."""
        return connection in self._addresses

    def __iter__(self) -> Iterator[T]:
        """Yield the connections."""
        return iter(self._addresses)

    def add(self, connection: T, peer: Any) -> None:
        """Add a connection, and close those above the shares.

        Arguments:
            peer: address of its peer, as sockets report it.
        """
        address = address_of(peer)
        self._addresses[connection] = address
        self._begun.setdefault(address, {})[connection] = self._clock()
        self.trim()

    def discard(self, connection: T) -> None:
        """Forget a connection that has shown a token or has ended, if it is one of them."""
        address = self._addresses.pop(connection, None)
        if address is not None:
            del self._begun[address][connection]
            if not self._begun[address]:
                del self._begun[address]

    def trim(self) -> None:
        """Close the connections above the shares that have had their second."""
        latest = self._clock() - GRACE_SECONDS
        while self._begun:
            largest = self._largest()
            oldest, begun = next(iter(largest.items()))
            is_above = len(largest) > self._per_address or len(self) > self._maximum
            if not is_above or begun > latest:
                return
            self._end(oldest)

    def close_late(self, seconds: float) -> None:
        """Close the connections that began more than `seconds` ago."""
        latest = self._clock() - seconds
        begun = [each for connections in self._begun.values() for each in connections.items()]
        for connection in [each for each, moment in begun if moment < latest]:
            self._end(connection)

    def make_room(self) -> bool:
        """Close a connection, whatever its age; return whether there was one."""
        if not self._begun:
            return False
        self._end(next(iter(self._largest())))
        return True

    def _largest(self) -> dict[T, float]:
        """Return the connections of the address that has the most."""
        return max(self._begun.values(), key=lambda each: len(each))

    def _end(self, connection: T) -> None:
        self.discard(connection)
        self._close(connection)


def address_of(peer: Any) -> str:
    """Return what counts as one address: an IPv4 address, an IPv6 network of 64 bits, or this machine.

    Arguments:
        peer: address as sockets report it; a path, or empty, for Unix sockets.
    """
    if not isinstance(peer, tuple):
        return _LOOPBACK
    address: IPv4Address | IPv6Address = ip_address(str(peer[0]).partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:  # loopback has 2**24 addresses
        return _LOOPBACK
    if isinstance(address, IPv6Address):
        return str(ip_network((int(address), _NETWORK_BITS), strict=False))
    return str(address)


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
                except OSError as error:  # such as too many open files, which is temporary
                    logger().retry("tls.accept_failed", reason=error.strerror)
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

    asyncio and uvloop drop the alert, so clients could not tell a refused certificate from a restart of the
    server.
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
    """Send bytes, and wait for the peer to close: unread data from it would reset the connection."""
    loop = asyncio.get_running_loop()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(SHUTDOWN_SECONDS):
            await loop.sock_sendall(peer, data)
            peer.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(peer, 65_536):
                pass


MAX_BYTES = 64 << 10
END_SECONDS = 1.0


def end_writing(transport: asyncio.Transport) -> None:
    """Tell the client that nothing more follows; it may still send."""
    if transport.can_write_eof():  # TLS has no such half-close
        with suppress(OSError):  # the client has reset the connection since the last write
            transport.write_eof()


class WriteBuffer:
    """Transport that sends the head and the body of an answer by one system call.

    uvicorn writes them one after the other, and a write to a socket costs more than all its other work for an
    answer. From `MAX_BYTES` on, nothing is held back, so that the server notices a client that does not read.

    Arguments:
        seconds: time for the client to read the rest when the connection is closed.

    Attributes:
        lingers: whether the client is still sending a request, so that `close` does what `end` does.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._transport = transport
        self._loop = loop
        self._seconds = seconds
        self._aborting: asyncio.TimerHandle | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._has_ended = False
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send bytes at the end of this turn of the loop at the latest."""
        if self._has_ended:
            return
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)
        self._size += len(data)
        if self._size >= MAX_BYTES:
            self._flush()

    def write_now(self, data: bytes) -> None:
        """Send the last bytes of an answer at once, without waiting for others."""
        (self if self._pieces or self.is_closing() else self._transport).write(data)

    def close(self) -> None:
        """Send the written data, and close; a client that does not read it can't keep the connection open."""
        if self.lingers:
            self.end()
            return
        self._flush()
        self._transport.close()
        if self._aborting is None:
            self._aborting = self._loop.call_later(self._seconds, self._transport.abort)

    def end(self) -> None:
        """Send the written data, and close when the client has closed, or after 1 s.

        Ignore further data from the client. Bytes that reach a closed socket reset the connection, and then
        the client might not see the answer (RFC 9112, 9.6).
        """
        if self.is_closing():
            return
        self._flush()
        self._has_ended = True
        end_writing(self._transport)
        self._transport.resume_reading()
        if self._aborting is None:
            self._aborting = self._loop.call_later(END_SECONDS, self._transport.abort)

    def lost(self) -> None:
        """Forget the connection, which is closed."""
        if self._aborting is not None:
            self._aborting.cancel()

    def is_closing(self) -> bool:
        """Return whether nothing more is to be read or written."""
        return self._has_ended or self._transport.is_closing()

    def abort(self) -> None:
        """Close without sending."""
        self._pieces.clear()
        self._transport.abort()

    def _flush(self) -> None:
        if self._pieces:
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            self._size = 0
            if not self._transport.is_closing():  # the client may have gone since
                self._transport.write(data)
