"""The owner's side of connections from other hosts: TLS and a ticket before the local protocol (ADR 0064)."""

import asyncio
import socket
from typing import Any

from postroom.adapters.local.endpoints import issue_certificate, set_keepalive
from postroom.adapters.local.server import LocalServer
from postroom.adapters.sockets.address import join_address, listen, resolve, split_address
from postroom.adapters.sockets.connections import TlsListener, UnauthenticatedConnections
from postroom.application.ports.lease_store import OwnerAddress, OwnerDirectory
from postroom.application.telemetry import logger
from postroom.application.threads import background_task, set_close_on_fork
from postroom.domain.errors import InvalidRequest, PostroomError

TICKET_BYTES = 32
MAX_BYTES = 1 << 20
"""Maximum number of bytes that a peer may send with its ticket, before it is admitted."""
HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 64
MAX_STRANGERS = 64
"""Connections that are encrypted and have not shown a valid ticket yet."""
MAX_PER_ADDRESS = 16
"""Handshakes, and strangers, of one address."""
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
        server: answers those that were admitted.
        directory: tells others the address, and redeems their tickets.
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
        """Listen and tell the address until it is cancelled; what fails is logged and tried again."""
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
                    except PostroomError as error:  # such as a session that is lost, until there is another
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
        """Return whether a ticket is valid; log one that is not."""
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
        self._admission = None  # which is not cancelled from here on
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
    """Return the address to tell others: the interface's address in place of a wildcard."""
    port: int = listener.getsockname()[1]
    if address is None:
        return join_address(host, port)
    named, _ = split_address(address)
    return join_address(host if named in _ANY else named, port)
