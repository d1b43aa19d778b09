"""The addresses at which the owner of a mailbox is called: the local socket, or TLS from another host."""

import asyncio
import os
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from postroom.adapters.local.certificate import NAME, trust_certificate
from postroom.adapters.local.paths import bound_path, socket_address
from postroom.adapters.sockets.address import split_address
from postroom.adapters.sockets.peers import is_own_or_root
from postroom.application.ports.lease_store import OwnerAddress, OwnerDirectory, Ownership
from postroom.domain.errors import InvalidRequest, Unavailable

DIAL_SECONDS = 5.0
HANDSHAKE_SECONDS = 3_600.0
"""No limit: whoever connects watches for silence, counted in intervals."""
LOST_PEER_MS = 30_000


class Endpoint(Protocol):
    """An address at which the owner of a mailbox may answer."""

    async def dial(self) -> socket.socket | None:
        """Return a connected socket; None if nobody listens.

        Raises: Unavailable when the address can't be reached.
        """

    async def open(self, protocol: asyncio.Protocol, connected: socket.socket) -> None:
        """Connect a protocol to the owner, and prove that this process may call it.

        Raises: OSError when the connection ends before, Unavailable when the owner is somebody else.
        """

    def is_owner(self, connected: Any) -> bool:
        """Return whether the peer of a socket may be the owner."""

    async def incumbent(self) -> str | None:
        """Return the token of the ownership whose owner answers here; None if it has ended.

        A connection is to one owner for as long as it lasts, so a process that is connected to an owner that
        hangs can tell it from its successor, whenever it asks (ADR 0104).

        Raises: Unavailable when the store can't be used.
        """

    async def is_host_up(self) -> bool:
        """Return whether the owner's host answers, so that an owner that does not is one that hangs."""


class LocalEndpoint(Endpoint):
    """The Unix socket of an owner on this host."""

    def __init__(self, path: Path, mailbox: str, ownership: Ownership) -> None:
        self._path = path
        self._mailbox = mailbox
        self._ownership = ownership
        self._bound_at = ""

    def __str__(self) -> str:
        return str(self._path)

    async def dial(self) -> socket.socket | None:
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.setblocking(False)
            with socket_address(self._path) as address:
                await asyncio.get_running_loop().sock_connect(connected, address)
            self._bound_at = connected.getpeername()  # the kernel knows it also of an owner that hangs
        except (FileNotFoundError, ConnectionError, BlockingIOError):
            connected.close()
            return None
        except OSError as error:
            connected.close()
            raise Unavailable(f"The socket {self._path} can't be used: {error}.") from error
        except BaseException:
            connected.close()
            raise
        return connected

    async def open(self, protocol: asyncio.Protocol, connected: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: protocol, sock=connected)

    def is_owner(self, connected: Any) -> bool:
        """Return whether it is a process of this user or of root; see `Endpoint.is_owner`."""
        return is_own_or_root(connected)

    async def incumbent(self) -> str | None:
        """Compare the ownership with the one that the socket was created for; see `Endpoint.incumbent`."""
        incumbent = await self._ownership.incumbent(self._mailbox)
        # The owner may know the folder by another path.
        if incumbent is None or os.path.basename(self._bound_at) != bound_path(self._path, incumbent).name:
            return None
        return incumbent

    async def is_host_up(self) -> bool:
        """Return True: it is this host."""
        return True


class RemoteEndpoint(Endpoint):
    """The address of an owner on another host, from the database (ADR 0064)."""

    def __init__(
        self, mailbox: str, owner: OwnerAddress, directory: OwnerDirectory, ownership: Ownership
    ) -> None:
        self._mailbox = mailbox
        self._owner = owner
        self._directory = directory
        self._ownership = ownership

    def __str__(self) -> str:
        return self._owner.address

    async def dial(self) -> socket.socket | None:
        loop = asyncio.get_running_loop()
        try:
            host, port = split_address(self._owner.address)
            async with asyncio.timeout(DIAL_SECONDS):
                candidates = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                return await _connect(candidates[0])
        except (OSError, InvalidRequest) as error:
            reason = getattr(error, "strerror", None) or str(error) or "no answer"
            raise Unavailable(
                f"Its address {self._owner.address} can't be reached from this host: {reason.rstrip('.')}"
            ) from error

    async def open(self, protocol: asyncio.Protocol, connected: socket.socket) -> None:
        """Compare the owner's certificate and show a ticket; see `Endpoint.open`."""
        loop = asyncio.get_running_loop()
        try:
            context = trust_certificate(self._owner.certificate)
            transport, _ = await loop.create_connection(
                lambda: protocol,
                sock=connected,
                ssl=context,
                server_hostname=NAME,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
            )
        except ssl.SSLError as error:
            connected.close()
            raise Unavailable(
                f"{self._owner.address} is not the owner whose certificate is in the database"
            ) from error
        except BaseException:
            connected.close()
            raise
        try:
            set_keepalive(transport.get_extra_info("socket"))
            transport.write(await self._directory.issue_ticket(self._mailbox))
        except BaseException:
            transport.abort()
            raise

    def is_owner(self, connected: Any) -> bool:
        """Return True: the certificate was compared; see `Endpoint.is_owner`."""
        return True

    async def incumbent(self) -> str | None:
        """Compare address and certificate, which an owner has alone; see `Endpoint.incumbent`."""
        incumbent = await self._ownership.incumbent(self._mailbox)  # before the address: never a later one
        return incumbent if await self._directory.find(self._mailbox) == self._owner else None

    async def is_host_up(self) -> bool:
        """Return whether a connection is accepted, which the kernel does for a process that hangs."""
        with suppress(Unavailable):
            connected = await self.dial()
            if connected is not None:
                connected.close()
            return True
        return False


def set_keepalive(connected: Any) -> None:
    """Have a connection end when the other host is gone."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", LOST_PEER_MS),
    ):
        if hasattr(socket, option):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


async def _connect(candidate: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, address = candidate
    connected = socket.socket(family, kind, protocol)
    try:
        connected.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connected, address)
    except BaseException:
        connected.close()
        raise
    return connected
