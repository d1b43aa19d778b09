"""Addresses of owners of mailboxes: the local socket, or TLS with a certificate for each ownership."""

import asyncio
import os
import socket
import ssl
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from postroom.adapters.sockets.address import is_own_or_root, split_address
from postroom.adapters.sockets.connections import AlertingContext
from postroom.application.mailbox.groups import Answers
from postroom.application.messages import MessageDelivery
from postroom.application.ports.event_log import MailboxOwner
from postroom.application.ports.lease_store import OwnerAddress, OwnerDirectory, Ownership
from postroom.domain.errors import (
    InvalidRequest,
    Unavailable,
)
from postroom.domain.mailbox.commands import Command

NAME = "owner.postroom.invalid"
_ALWAYS = (datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC))
"""Validity: the certificate ends with its ownership, and clocks of hosts differ."""


def issue_certificate() -> tuple[ssl.SSLContext, str]:
    """Return the TLS context of a server with a key of its own, and its certificate in PEM."""
    from cryptography import x509  # slow to import, and only owners in databases need it
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_ALWAYS[0])
        .not_valid_after(_ALWAYS[1])
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, SHA256())
        .public_bytes(Encoding.PEM)
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    context = AlertingContext(ssl.PROTOCOL_TLS_SERVER)
    _harden(context)
    with TemporaryDirectory(prefix="postroom-") as folder:  # OpenSSL loads keys from files only
        path = Path(folder, "certificate.pem")
        path.touch(mode=0o600)
        path.write_bytes(secret + certificate)
        context.load_cert_chain(path)
    return context, certificate.decode()


def trust_certificate(certificate: str) -> ssl.SSLContext:
    """Return the TLS context of a client that accepts this certificate and no other.

    Raises: Unavailable when it is not a certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _harden(context)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError) as error:
        raise Unavailable("The owner's certificate in the database can't be read; retry shortly.") from error
    return context


def _harden(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET


_ADDRESS_BYTES = 107
MAX_PATH_BYTES = 100
"""Room in a socket's address, 107 bytes on Linux, for the path and the suffix of `bound_path`."""
_BY_FOLDER = "/proc/self/fd/{folder}/{name}"
MAX_NAME_BYTES = MAX_PATH_BYTES - len(_BY_FOLDER.format(folder=99_999, name=""))
"""Room in a socket's address for its name in the folder of a descriptor."""


def socket_path(store: str, mailbox: str, preferred: Path | None) -> Path:
    """Return the path of a mailbox's socket.

    Arguments:
        store: identity of the store.
        preferred: the path beside the store; None, or one with a name that is too long for a socket, is
            replaced by one in the runtime folder, named by a hash of store and mailbox.

    Raises: Unavailable when the runtime folder is not this user's alone, or its path is too long.
    """
    if preferred is not None and fits(preferred):
        return preferred
    name = sha256(f"{store}\0{mailbox}".encode("utf-8", "surrogateescape")).hexdigest()[:24]
    path = _runtime_folder() / f"{name}.socket"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise Unavailable(
            f"The path {path} is too long for a socket; set XDG_RUNTIME_DIR to a folder with a shorter path."
        )
    return path


def bound_path(path: Path, incumbent: str | None) -> Path:
    """Return the path at which an owner creates its socket, before it renames it to `path`.

    The kernel reports this path to every process that is connected to the socket, even if the owner hangs and
    the socket was replaced, so the path identifies the ownership.

    Arguments:
        incumbent: see `Ownership.incumbent`.
    """
    return path.with_name(f"{path.name}.{sha256((incumbent or '').encode()).hexdigest()[:6]}")


def fits(path: Path) -> bool:
    """Return whether a path is short enough for a socket; on Linux only its last name has to be."""
    has_short_name = len(os.fsencode(path.name)) <= MAX_NAME_BYTES and hasattr(os, "O_PATH")
    return has_short_name or len(os.fsencode(path)) <= MAX_PATH_BYTES


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Yield an address for a socket's path, which names the folder by a descriptor if the path is long.

    Other processes may know the folder by another path, so each finds its own address of the same socket.

    Raises: OSError when the folder can't be opened.
    """
    if len(os.fsencode(path)) <= _ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _BY_FOLDER.format(folder=folder, name=path.name)
    finally:
        os.close(folder)


def _runtime_folder() -> Path:
    """Return the folder for sockets of this user, created with mode 0700."""
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "postroom" if runtime else Path(tempfile.gettempdir()) / f"postroom-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise Unavailable(f"The runtime folder {folder} can't be used: {error.strerror}.") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o077:
        raise Unavailable(
            f"The runtime folder {folder} must be a folder of user {user} with mode 0700; set "
            "XDG_RUNTIME_DIR to such a folder."
        )
    return folder


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

        Raises: OSError when the connection ends meanwhile, Unavailable when the peer is not the owner.
        """

    def is_owner(self, connected: Any) -> bool:
        """Return whether the peer of a socket may be the owner."""

    async def incumbent(self) -> str | None:
        """Return the token of the ownership whose owner answers here; None if it has ended.

        A connection belongs to one owner for as long as it lasts, so a process that is connected to a hanging
        owner can distinguish that owner from its successor at any time (ADR 0104).

        Raises: Unavailable when the store can't be used.
        """

    async def is_host_up(self) -> bool:
        """Return whether the owner's host answers, in which case an owner that does not answer hangs."""


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
            self._bound_at = connected.getpeername()  # the kernel reports it even if the owner hangs
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
        """Compare the ownership with the ownership of the socket's creator; see `Endpoint.incumbent`."""
        incumbent = await self._ownership.incumbent(self._mailbox)
        # The owner may use another path of the folder.
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
        """Compare address and certificate, which are unique to each owner; see `Endpoint.incumbent`."""
        incumbent = await self._ownership.incumbent(self._mailbox)  # first, so that it is never newer
        return incumbent if await self._directory.find(self._mailbox) == self._owner else None

    async def is_host_up(self) -> bool:
        """Return whether a connection is accepted, which the kernel does even if the process hangs."""
        with suppress(Unavailable):
            connected = await self.dial()
            if connected is not None:
                connected.close()
            return True
        return False


def set_keepalive(connected: Any) -> None:
    """Make a connection end when the other host is gone."""
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


class Engine(MailboxOwner, Protocol):
    """The owner of a mailbox in this process."""

    def start(self, commands: Sequence[Command], answers: Answers) -> bool:
        """Queue commands without waiting for their answers; see `MailboxEngine.start`."""

    def is_deliverable(self, topics: Sequence[str]) -> bool:
        """Return whether a message of one of `topics` may be delivered now."""

    def release(self, deliveries: Sequence[MessageDelivery]) -> None:
        """Release deliveries whose receivers have given up."""

    async def wait_until_lost(self) -> None:
        """Return when another process has taken over the mailbox."""


class OpenMailbox(Protocol):
    """A mailbox that this process owns, with its queries as methods."""

    @property
    def engine(self) -> Engine:
        """Return its engine."""


class OwnerHere:
    """The owner is this process."""

    def __init__(self, mailbox: OpenMailbox) -> None:
        self._mailbox = mailbox
        self.engine = mailbox.engine
        self.submit = mailbox.engine.submit
        self.receive = mailbox.engine.receive
        self.find_message_id = mailbox.engine.find_message_id

    async def query(self, name: str, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """Return the result of a query of the mailbox, by its name."""
        return await getattr(self._mailbox, name)(*arguments, **options)


def socket_id(path: Path) -> tuple[int, int] | None:
    """Return the identity of the socket at a path, unique among its successors, or None."""
    try:
        status = path.stat()
    except OSError:  # opening the store reports why it can't be used
        return None
    return status.st_ino, status.st_ctime_ns
