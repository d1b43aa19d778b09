"""The owner's side of the local protocol: answers the other processes that use its mailbox.

Processes of this host connect to a Unix socket; processes of other hosts use TLS and a ticket (ADR 0064).
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from postroom.adapters.local import protocol
from postroom.adapters.local.endpoints import (
    Engine,
    bound_path,
    issue_certificate,
    set_keepalive,
    socket_address,
)
from postroom.adapters.local.protocol import Hello
from postroom.adapters.local.server_connection import Outboxes, ServedConnection, ServedMailbox
from postroom.adapters.sockets.address import join_address, listen, resolve, split_address
from postroom.adapters.sockets.connections import TlsListener, UnauthenticatedConnections
from postroom.application.ports.lease_store import OwnerAddress, OwnerDirectory
from postroom.application.telemetry import logger
from postroom.application.threads import background_task, cancel_and_wait, set_close_on_fork
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable

BACKLOG = 512
WATCH_SECONDS = 5.0
"""Interval in which the owner looks whether its socket is still there."""
FLUSH_SECONDS = 1.0
"""Time that clients have to take the last answers."""


class LocalServer:
    """Server of one mailbox at a Unix socket, for processes of the same user or of root.

    Arguments:
        incumbent: token of the ownership of this process; see `bound_path`.

    It listens from the moment this process owns the mailbox, so that others can tell an owner that is loading
    its log from one that hangs; requests wait until `serve` is called.
    """

    def __init__(self, path: Path, mailbox: str, incumbent: str | None) -> None:
        self._path = path
        self._bound_path = bound_path(path, incumbent)
        self.hello = Hello(protocol.VERSION, mailbox)
        self.is_closing = False
        self.connections: set[ServedConnection] = set()
        self._served: asyncio.Future[tuple[ServedMailbox, Outboxes]] = (
            asyncio.get_running_loop().create_future()
        )
        self._server: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None
        self._inode = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen; replace the socket of an owner that is gone.

        Raises: Unavailable when the socket can't be created.
        """
        await self._listen()
        self._watching = asyncio.create_task(self._watch(), name=f"watch of {self._path}")

    async def _listen(self) -> None:
        temporary = self._bound_path
        try:
            temporary.unlink(missing_ok=True)
            # In two steps: the first is not interrupted, so that a cancellation leaks no socket.
            with socket_address(temporary) as address:
                self._server = await asyncio.get_running_loop().create_unix_server(
                    lambda: ServedConnection(self), address, backlog=BACKLOG, start_serving=False
                )
            await self._server.start_serving()
            for listening_socket in self._server.sockets:
                set_close_on_fork(listening_socket.fileno(), True)
            temporary.chmod(0o600)
            self._inode = temporary.stat().st_ino
            temporary.rename(self._path)
        except asyncio.CancelledError:
            temporary.unlink(missing_ok=True)
            raise
        except OSError as error:
            raise Unavailable(
                f"The socket {self._path} can't be created: {error}. Check the folder's permissions."
            ) from error

    async def _watch(self) -> None:
        """Listen again if the socket was deleted, for example by a job that cleans folders."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._server is None or self._path.exists():
                continue
            logger().retry("mailbox.socket_deleted", mailbox=self.hello.mailbox, path=str(self._path))
            self._stop_listening(self._server)
            with suppress(Unavailable):  # tried again
                await self._listen()

    def serve(self, mailbox: ServedMailbox, outboxes: Outboxes) -> None:
        """Answer requests, also those that have waited."""
        self._served.set_result((mailbox, outboxes))

    async def mailbox(self) -> ServedMailbox:
        """Return the mailbox once it is open."""
        return (await asyncio.shield(self._served))[0]

    @property
    def engine(self) -> Engine | None:
        """Return the owner if the mailbox is open."""
        is_open = self._served.done() and not self._served.cancelled()
        return self._served.result()[0].engine if is_open else None

    async def outboxes(self) -> Outboxes:
        """Return the relays of outboxes once the mailbox is open."""
        return (await asyncio.shield(self._served))[1]

    def make_connection(self) -> asyncio.Protocol:
        """Return the protocol of a connection from another host, whose peer was checked."""
        return ServedConnection(self, is_peer_checked=True)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that outlives a connection."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop_reading(self) -> None:
        """Accept no more connections and requests; those in progress are still answered."""
        self.is_closing = True
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            with suppress(OSError):
                if self._path.stat().st_ino == self._inode:  # leave the next owner's socket
                    self._path.unlink()
            self._stop_listening(self._server)
        for connection in self.connections:
            connection.stop_reading()

    def _stop_listening(self, server: asyncio.Server) -> None:
        for listening_socket in server.sockets:
            set_close_on_fork(listening_socket.fileno(), False)
        server.close()

    def disconnect(self) -> None:
        """Close all connections without answers; clients then look for the new owner."""
        self.is_closing = True
        for connection in list(self.connections):
            connection.abort()

    async def close(self) -> None:
        """Send pending answers, and close all connections."""
        self.stop_reading()
        self._served.cancel()
        closing = [asyncio.ensure_future(each.close()) for each in list(self.connections)]
        if closing:
            await asyncio.wait(closing, timeout=FLUSH_SECONDS)
        self.disconnect()
        await cancel_and_wait(*self._tasks)


@asynccontextmanager
async def listening(path: Path, mailbox: str, incumbent: str | None) -> AsyncIterator[LocalServer]:
    """Listen at a Unix socket while the context lasts; see `LocalServer`."""
    server = LocalServer(path, mailbox, incumbent)
    try:
        await server.start()
        yield server
    finally:
        await server.close()


TICKET_BYTES = 32
MAX_BYTES = 1 << 20
"""Maximum number of bytes that a peer may send with its ticket, before it is admitted."""
HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 64
MAX_STRANGERS = 64
"""Maximum number of encrypted connections that have not shown a valid ticket yet."""
MAX_PER_ADDRESS = 16
"""Maximum number of handshakes, and of strangers, of one address."""
ANNOUNCE_SECONDS = 5.0
OFF = "off"
_ANY = ("0.0.0.0", "::")


def check_listen(text: str) -> str:
    """Return an address to listen at, `HOST:PORT` or `off`; raises InvalidRequest for anything else."""
    if text != OFF:
        try:
            split_address(text)
        except InvalidRequest as error:
            raise InvalidRequest(
                f"listen is {text!r}, which is no address; use HOST:PORT, or off to answer this host only."
            ) from error
    return text


class RemoteServer:
    """Server of one mailbox for processes of other hosts.

    Arguments:
        server: answers peers that were admitted.
        directory: announces the address to other hosts, and redeems their tickets.
        address: `host:port` to listen at; None takes the interface of the connection to the database, and any
            free port.
    """

    def __init__(
        self, server: LocalServer, mailbox: str, directory: OwnerDirectory, address: str | None
    ) -> None:
        self._server = server
        self._mailbox = mailbox
        self._directory = directory
        self._address = address
        self._failure = ""
        self._strangers = UnauthenticatedConnections[_Stranger](
            _Stranger.abort, MAX_STRANGERS, MAX_PER_ADDRESS
        )

    async def run(self) -> None:
        """Listen and announce the address until cancelled; log failures and try again."""
        while True:
            try:
                await self._serve()
            except PostroomError as error:
                self._note(error)
            except Exception:
                logger().retry_defect("mailbox.other_hosts_unanswered", mailbox=self._mailbox)
            await asyncio.sleep(ANNOUNCE_SECONDS)

    async def _serve(self) -> None:
        context, certificate = await asyncio.to_thread(issue_certificate)
        host = await self._directory.local_host(self._mailbox)
        listener = listen(resolve(self._address or join_address(host, 0), is_protected=True))
        descriptor = listener.fileno()
        set_close_on_fork(descriptor, True)
        address = OwnerAddress(_shown(self._address, host, listener), certificate)
        tls = TlsListener(
            listener,
            lambda: _Stranger(self),
            context,
            max_handshakes=MAX_HANDSHAKES,
            max_per_address=MAX_PER_ADDRESS,
            timeout=HANDSHAKE_SECONDS,
        )
        try:
            async with background_task(tls.run()):
                while True:
                    try:
                        await self._directory.announce(self._mailbox, address)
                    except PostroomError as error:  # such as a lost session, until there is a new one
                        self._note(error)
                    await asyncio.sleep(ANNOUNCE_SECONDS)
        finally:
            set_close_on_fork(descriptor, False)
            for stranger in list(self._strangers):
                stranger.abort()

    def _note(self, error: PostroomError) -> None:
        """Log a failure, unless the previous attempt failed in the same way."""
        if str(error) != self._failure:
            self._failure = str(error)
            logger().warning("mailbox.other_hosts_unanswered", mailbox=self._mailbox, error=self._failure)

    # -- for strangers ---

    def add(self, stranger: "_Stranger", peer: Any) -> None:
        """Note a stranger; another one goes when there are too many."""
        if len(self._strangers) >= MAX_STRANGERS:
            self._strangers.make_room()
        self._strangers.add(stranger, peer)

    def remove(self, stranger: "_Stranger") -> None:
        """Note that a stranger was admitted or is gone."""
        self._strangers.discard(stranger)

    def make_connection(self) -> asyncio.Protocol:
        """Return the protocol of a peer that was admitted."""
        return self._server.make_connection()

    async def redeem(self, ticket: bytes) -> bool:
        """Return whether a ticket is valid; log an invalid one."""
        try:
            is_valid = await self._directory.redeem_ticket(self._mailbox, ticket)
        except PostroomError as error:
            logger().retry("mailbox.ticket_unchecked", mailbox=self._mailbox, error=str(error))
            return False
        if not is_valid:
            logger().retry("mailbox.ticket_refused", mailbox=self._mailbox)
        return is_valid


class _Stranger(asyncio.Protocol):
    """An encrypted connection whose peer has yet to show a ticket."""

    def __init__(self, server: RemoteServer) -> None:
        self._server = server
        self._received = bytearray()
        self._transport: Any = None
        self._descriptor = -1
        self._timer: asyncio.TimerHandle | None = None
        self._admission: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._descriptor = transport.get_extra_info("socket").fileno()
        set_close_on_fork(self._descriptor, True)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, transport.abort)
        self._server.add(self, transport.get_extra_info("peername"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) > MAX_BYTES:
            self._transport.abort()
        elif self._admission is None and len(self._received) >= TICKET_BYTES:
            self._admission = asyncio.create_task(self._admit())

    def connection_lost(self, error: Exception | None) -> None:
        set_close_on_fork(self._descriptor, False)
        if self._timer is not None:
            self._timer.cancel()
        if self._admission is not None:
            self._admission.cancel()
        self._server.remove(self)

    def abort(self) -> None:
        self._server.remove(self)
        self._transport.abort()

    async def _admit(self) -> None:
        if not await self._server.redeem(bytes(self._received[:TICKET_BYTES])):
            self._transport.abort()
            return
        self._admission = None  # so that it is not cancelled from here on
        if self._timer is not None:
            self._timer.cancel()
        self._server.remove(self)
        if self._transport.is_closing():
            return
        set_keepalive(self._transport.get_extra_info("socket"))
        connection = self._server.make_connection()
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        if len(self._received) > TICKET_BYTES:
            connection.data_received(bytes(self._received[TICKET_BYTES:]))


def _shown(address: str | None, host: str, listener: socket.socket) -> str:
    """Return the address to announce: the interface's address in place of a wildcard."""
    port: int = listener.getsockname()[1]
    if address is None:
        return join_address(host, port)
    named, _ = split_address(address)
    return join_address(host if named in _ANY else named, port)
