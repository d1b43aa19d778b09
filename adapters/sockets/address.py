"""Addresses that are served, their protection from other machines, and the users of Unix sockets."""

import asyncio
import os
import socket
import stat
import struct
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from postroom.adapters.sockets.connections import ConnectionLimits
from postroom.adapters.sockets.tls import ServerTls
from postroom.domain.arguments import check_path
from postroom.domain.errors import InvalidRequest, Unavailable

UNIX = "unix:"
BACKLOG = 4_096


class Address(NamedTuple):
    """An address to listen at.

    Arguments:
        target: what to bind: a path, or host and port.
        is_local: only processes of this machine reach it.
    """

    text: str
    family: socket.AddressFamily
    target: Any
    is_local: bool

    @property
    def is_unix(self) -> bool:
        """Return whether it is the address of a Unix socket."""
        return self.family == socket.AF_UNIX


def resolve(text: str, *, is_protected: bool = False) -> Address:
    """Return an address to listen at.

    Arguments:
        text: `host:port` or `unix:path`; port 0 chooses a free one.
        is_protected: the connections are encrypted, here or by a proxy; otherwise only loopback addresses and
            Unix sockets are served.

    Raises: InvalidRequest for any other address.
    """
    if text.startswith(UNIX):
        path = os.path.abspath(check_path("The path of the socket", text.removeprefix(UNIX)))
        return Address(f"{UNIX}{path}", socket.AF_UNIX, path, is_local=True)
    host, port = split_address(text)
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidRequest(f"The host of {text} is unknown: {error.strerror}.") from error
    is_local = all(ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in candidates)
    if not is_local and not is_protected:
        raise InvalidRequest(
            f"{text} is reached from other machines, which needs TLS; set tls_certificate and tls_key, or "
            "behind_proxy if a proxy in front speaks TLS, or use 127.0.0.1:PORT or unix:PATH."
        )
    return Address(text, candidates[0][0], candidates[0][4], is_local)


def listen(address: Address) -> socket.socket:
    """Return a listening socket.

    A Unix socket has the mode 0600; one that a dead server left is replaced.

    Raises: Unavailable when the address can't be bound.
    """
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        if address.is_unix:
            remove_stale(address)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address.target)
        if address.is_unix:
            os.chmod(address.target, 0o600)  # nobody can connect before listen()
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = "name another path" if address.is_unix else "choose another port"
        raise Unavailable(f"{address.text} can't be served: {error.strerror or error}; {hint}.") from error
    except BaseException:
        listener.close()
        raise
    return listener


def url(scheme: str, address: Address, port: int) -> str:
    """Return the URL of an address that is served, such as `http://127.0.0.1:8080` or `http+unix:/path`.

    Arguments:
        port: port that was bound.
    """
    if address.is_unix:
        return f"{scheme}+{address.text}"
    return f"{scheme}://{join_address(address.target[0], port)}"


def join_address(host: str, port: int) -> str:
    """Return `host:port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find_file(address: Address) -> os.stat_result | None:
    """Return the status of a Unix socket's file, or None if it does not exist or the address has none."""
    with suppress(OSError):
        return os.stat(address.target) if address.is_unix else None
    return None


def unlink(address: Address, file: os.stat_result | None) -> None:
    """Remove the file of a Unix socket that is closed, unless another server has replaced it.

    Arguments:
        file: what `find_file` returned after the address was bound.
    """
    current = find_file(address)
    if current is not None and file is not None and os.path.samestat(current, file):
        Path(address.target).unlink(missing_ok=True)


def is_loopback_name(host: str) -> bool:
    """Return whether the value of a `Host` header names this machine's loopback interface."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of `host:port`; raises InvalidRequest for anything else."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
        is_plain = parts.netloc == address and "@" not in address
    except ValueError:
        is_plain, host, port = False, None, None
    if not is_plain or not host or port is None:
        raise InvalidRequest(f"{address!r} is no address; use 127.0.0.1:PORT or unix:PATH.")
    return host, port


def remove_stale(address: Address) -> None:
    """Remove the socket that a dead server left at the path of an address.

    Raises: InvalidRequest when something else is there, Unavailable when a server answers.
    """
    path = address.target
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise InvalidRequest(f"{path} exists and is no socket; name another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
        else:
            raise Unavailable(f"Another process serves the socket {path}; stop it, or name another path.")


ANY_HOST = "*"


class SurfaceProtection(NamedTuple):
    """How a surface is protected; without any of it, only this machine is served.

    Arguments:
        tls: certificate of the server; Unix sockets need none.
        behind_proxy: a proxy in front speaks TLS, and nobody else reaches the address.
        allowed_hosts: names besides loopback names that the `Host` of a request may have; `*` is any.
        limits: limits of the connections of a cluster's process.
    """

    tls: ServerTls | None = None
    behind_proxy: bool = False
    allowed_hosts: tuple[str, ...] = ()
    limits: ConnectionLimits = ConnectionLimits()

    def resolve(self, text: str) -> Address:
        """Return an address to listen at; see `resolve`."""
        return resolve(text, is_protected=self.tls is not None or self.behind_proxy)

    def tls_at(self, address: Address) -> ServerTls | None:
        """Return the certificate with which an address is served."""
        return None if address.is_unix else self.tls


def check_access(address: Address, *, is_dev: bool) -> None:
    """Raise InvalidRequest when other machines could call a service that asks for no tokens."""
    if is_dev and not address.is_local:
        raise InvalidRequest(
            f"{address.text} is reached from other machines, and --dev asks for no tokens; use "
            "127.0.0.1:PORT or unix:PATH, or serve without --dev."
        )


_CREDENTIALS = struct.Struct("3i")


def is_own_or_root(connection: Any) -> bool:
    """Return whether the peer runs as this process's user or as root.

    Where the operating system does not report the peer's user, the permissions of the socket decide.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return user in (0, os.geteuid())


def check_socket_owner(path: str) -> None:
    """Check that a Unix socket belongs to this process's user or to root, before anything is sent to it.

    Raises: Unavailable if it belongs to another user, who could read the sent data.
    """
    with suppress(FileNotFoundError):  # connecting reports a missing file
        if os.geteuid() and os.stat(path).st_uid not in (0, os.geteuid()):
            raise Unavailable(f"The socket {path} belongs to another user; name that of your own server.")


def is_trusted(transport: asyncio.Transport) -> bool:
    """Return whether the peer of a Unix socket runs as this user or root; loopback has no credentials."""
    opened: Any = transport.get_extra_info("socket")
    if opened is None or opened.family != socket.AF_UNIX:
        return True
    with socket.socket(fileno=os.dup(opened.fileno())) as peer:  # uvloop's sockets have no getsockopt()
        return is_own_or_root(peer)
