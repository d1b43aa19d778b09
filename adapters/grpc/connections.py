"""Channels of gRPC clients, and the limits of a server's connections by address and by time.

The library accepts connections itself and reports only the address of a call's peer. So the server looks
through the sockets of its process, and shuts down the connections of clients that have not shown a valid
token in time.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from operator import itemgetter
from stat import S_ISSOCK
from typing import Final, NamedTuple
from urllib.parse import unquote

import grpc

from postroom.adapters.sockets.address import is_loopback_name
from postroom.adapters.sockets.connections import ConnectionLimits, UnauthenticatedConnections
from postroom.adapters.sockets.tls import ClientFiles, make_client_context, read_pem, system_ca
from postroom.application.telemetry import logger
from postroom.application.threads import wait_at_most

LOOK_SECONDS: Final = 0.25
"""Interval between two looks at connections while there are some without a valid token."""
IDLE_SECONDS: Final = 10.0
"""Time after which connections are looked at although none was accepted."""
_DESCRIPTORS: Final = "/dev/fd"
"""The open files of the process, on Linux and macOS."""


class Peer(NamedTuple):
    """The address of a client."""

    host: str
    port: int


class GrpcConnections:
    """The connections of a gRPC server.

    Arguments:
        port: port of the server; None for a Unix socket, whose clients run as its own user.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        port: int | None = None,
        limits: ConnectionLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port = port
        self._limits = limits = limits or ConnectionLimits()
        self._authenticated: set[Peer] = set()
        self._files: dict[tuple[int, int], Peer | None] = {}
        """The sockets of the process by descriptor and inode, and the clients of the server at their ends."""
        self._descriptors: dict[Peer, int] = {}
        self._unauthenticated = UnauthenticatedConnections[Peer](
            self._shut_down, limits.max_unauthenticated, limits.max_unauthenticated_per_address, clock
        )

    def note(self, peer: str) -> None:
        """Note that a connection has shown a valid token.

        Arguments:
            peer: peer of the call, such as `ipv4:127.0.0.1:5001`; without an address if its connection ended.
        """
        if self._port is not None and (client := _read_peer(peer)) is not None:
            self._authenticated.add(client)

    def forget(self, peer: str) -> None:
        """Note that the last token of a connection was not valid."""
        if self._port is not None and (client := _read_peer(peer)) is not None:
            self._authenticated.discard(client)

    async def run(self) -> None:
        """Close connections until cancelled."""
        while self._port is not None:
            if not self._unauthenticated:
                await wait_at_most(IDLE_SECONDS, self._wait_for_client())
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self.look()
            except OSError as error:  # such as too many open files, which is temporary
                logger().warning("grpc.connections_unlimited", reason=error.strerror)

    def look(self) -> None:
        """Find new connections, and close those that are late or above the shares."""
        self._find_clients()
        clients = self._descriptors.keys()
        self._authenticated &= clients
        for peer in [*self._unauthenticated]:
            if peer not in clients or peer in self._authenticated:
                self._unauthenticated.discard(peer)
        for peer, _ in sorted(self._descriptors.items(), key=itemgetter(1)):
            if peer not in self._authenticated and peer not in self._unauthenticated:
                self._unauthenticated.add(peer, peer)
        self._unauthenticated.close_late(self._limits.unauthenticated_timeout_ms / 1_000)
        self._unauthenticated.trim()
        # The library refuses connections above the limit, so a quarter is kept for new clients.
        for _ in range(len(clients) - self._limits.max_connections * 3 // 4):
            self._unauthenticated.make_room()

    async def _wait_for_client(self) -> None:
        """Return when a client connects."""
        loop, is_here = asyncio.get_running_loop(), asyncio.Event()
        listeners = []
        try:
            for descriptor in _listeners(self._port):
                # The library watches its own descriptor, and may close it.
                listeners.append(os.dup(descriptor))
                loop.add_reader(listeners[-1], is_here.set)
            if listeners:
                await is_here.wait()
        finally:
            for listener in listeners:
                loop.remove_reader(listener)
                os.close(listener)

    def _find_clients(self) -> None:
        files: dict[tuple[int, int], Peer | None] = {}
        for name in os.listdir(_DESCRIPTORS):
            descriptor = int(name)
            with suppress(OSError):
                status = os.fstat(descriptor)
                if S_ISSOCK(status.st_mode):
                    file = descriptor, status.st_ino
                    if file not in self._files:
                        self._files[file] = self._client_of(descriptor)
                    files[file] = self._files[file]
        self._files = files
        self._descriptors = {peer: file[0] for file, peer in files.items() if peer is not None}

    def _client_of(self, descriptor: int) -> Peer | None:
        """Return the client at the other end of a socket; None for a socket of anything else."""
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
            if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.getsockname()[1] == self._port:
                return _peer(*opened.getpeername()[:2])
        return None

    def _shut_down(self, peer: Peer) -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(self._descriptors[peer])) as opened:
            # The library may have closed the descriptor since, and the process may use it for another file.
            if _peer(*opened.getpeername()[:2]) == peer:
                opened.shutdown(socket.SHUT_RDWR)
                logger().info("grpc.connection_closed", reason="no valid token")


def _listeners(port: int | None) -> Iterator[int]:
    """Yield the descriptors of the sockets that accept connections at a port."""
    for descriptor in map(int, os.listdir(_DESCRIPTORS)):
        with suppress(OSError):
            if not S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as opened:
                is_listener = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_listener and opened.getsockname()[1] == port:
                    yield descriptor


@lru_cache(4_096)
def _read_peer(text: str) -> Peer | None:
    """Return the client of a peer; None without an address, as of a connection that has ended."""
    host, _, port = unquote(text.partition(":")[2]).rpartition(":")
    return _peer(host.strip("[]"), int(port)) if port else None


def _peer(host: str, port: int) -> Peer:
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return Peer(str(mapped or address), port)


OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # a received message must not be lost because of its size
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),  # detects a paused or unreachable server within 15 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


def open_channel(address: str, tls: ClientFiles | None = None, *, is_shared: bool = True) -> grpc.aio.Channel:
    """Return a channel to a server, which connects with its first call.

    Proxies of the environment, such as `http_proxy`, are not used on the loopback interface.

    Arguments:
        address: `host:port` or `unix:/path`.
        tls: certificates; None connects without TLS.
        is_shared: whether the channels of this process to the same address share a connection.

    Raises: InvalidRequest for a file of `tls` that is missing, unreadable or malformed.
    """
    options = [
        *OPTIONS,
        ("grpc.use_local_subchannel_pool", int(not is_shared)),
        ("grpc.enable_http_proxy", int(not is_loopback_name(address))),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _credentials(tls), options=options)


def _credentials(tls: ClientFiles) -> grpc.ChannelCredentials:
    make_client_context(tls)  # raises clear errors
    ca = tls.ca or system_ca()
    return grpc.ssl_channel_credentials(
        None if ca is None else read_pem("ca", ca, "CERTIFICATE"),
        None if tls.key is None else read_pem("key", tls.key, "PRIVATE KEY"),
        None if tls.certificate is None else read_pem("certificate", tls.certificate, "CERTIFICATE"),
    )
