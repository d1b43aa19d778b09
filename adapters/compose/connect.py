"""Mailboxes by their address: connect to their owner over a network, the local socket, or open them."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urlsplit

import uuid_utils

from postroom.adapters.compose import (
    OwnerSettings,
    make_search,
    make_settings,
    open_owner_store,
    own_mailbox,
    socket_path,
)
from postroom.adapters.compose.process import trace_if_used
from postroom.adapters.compose.store import SERVER_SCHEMES, is_remote, open_protection
from postroom.adapters.local.mailbox import SharedMailbox
from postroom.adapters.local.owner_thread import OwnerThread
from postroom.adapters.local.shared import OwnerConnection
from postroom.adapters.sqlite.database import Durability
from postroom.adapters.sync_mailbox import SyncMailbox
from postroom.adapters.system.clock import SystemClock
from postroom.application.erasure.erase_subject import ErasureSettings
from postroom.application.extras import explain_missing_extra
from postroom.application.operations.mailbox import Mailbox
from postroom.application.threads import background_loop
from postroom.domain.arguments import check_any_text, check_int, check_path, check_text, check_type
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.names import DEFAULT_MAILBOX, check_mailbox
from postroom.domain.policy import MAX_DURATION_MS, MailboxLimits, TopicPolicy

if TYPE_CHECKING:  # imported on use
    from postroom.adapters.compose.store_namespace import StoreNamespace

StoreMailbox: TypeAlias = "SharedMailbox | StoreNamespace"

__all__ = ["Connection", "SharedMailbox", "connect", "share_mailbox"]


MAX_URL_CHARS = 2_000
MAX_TOKEN_CHARS = 4_000
_TOKEN = re.compile(rf"[!-~]{{1,{MAX_TOKEN_CHARS}}}")


class ClientTls(NamedTuple):
    """Certificates, as paths of files in PEM, for `https://`, `grpcs://` and `postrooms://`.

    Arguments:
        ca: certificates of the authorities that may have signed the server's; None takes the system's.
        certificate, key: certificate and key of the client, for a server that asks for them.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def check(self) -> "ClientTls":
        """Return the certificates, or raise InvalidRequest."""
        for name, path in self._asdict().items():
            if path is not None:
                check_path(name, path)
        if (self.certificate is None) != (self.key is None):
            raise InvalidRequest("ClientTls needs both certificate and key, or neither.")
        return self


@asynccontextmanager
async def connect_remote(
    url: str,
    mailbox: str | None = None,
    *,
    timeout_ms: int,
    token: str | None = None,
    tls: ClientTls | None = None,
) -> AsyncIterator["Mailbox"]:
    """Use the mailbox that a server or a cluster serves, for as long as the context lasts.

    Arguments:
        url: `http://host:port` or `grpc://host:port`, with TLS `https://host:port` or `grpcs://host:port`, or
            for a Unix socket `http+unix:/path` or `grpc+unix:/path`; or of a cluster (see `connect_cluster`).
        mailbox: the mailbox that the server is expected to serve; None takes its only one.
        timeout_ms: time for each call, besides the wait for messages.
        token: sent with each call as `Authorization: Bearer`; it is in no log, error or `repr`.
        tls: certificates for `https://`, `grpcs://` and `postrooms://`.

    Raises: InvalidRequest for a malformed URL or token, and for a certificate that this client or the server
        does not accept; NotFound when the server serves another mailbox, MissingExtra when a package is not
        installed, Unavailable when the server can't be reached.
    """
    check_int("timeout_ms", timeout_ms, 1, MAX_DURATION_MS)
    scheme = check_text("The URL", url, 1, MAX_URL_CHARS).partition(":")[0].lower()
    if scheme not in SERVER_SCHEMES:
        raise _malformed_url(url)
    if token is not None:
        _check_token(token)
    has_tls = SERVER_SCHEMES[scheme]
    if tls is not None:
        check_type("tls", tls, ClientTls).check()
        if not has_tls:
            raise InvalidRequest(
                f"tls is for https://, grpcs:// and postrooms:// URLs, not for {scheme}; change one of them."
            )
    client = _CLIENTS[scheme](url, mailbox, timeout_ms, token, (tls or ClientTls()) if has_tls else None)
    trace_if_used()
    async with client as opened:
        if mailbox not in (None, opened.name):
            raise NotFound(f"The server at {url} serves the mailbox {opened.name}, not {mailbox}.")
        yield opened


_Client = AbstractAsyncContextManager[Mailbox]


def _http(url: str, _: str | None, timeout_ms: int, token: str | None, tls: ClientTls | None) -> _Client:
    address = _parse(url)
    with explain_missing_extra("http"):
        from postroom.adapters.http_client import connect_http
    return connect_http(address, timeout_ms=timeout_ms, token=token, tls=tls or ClientTls())


def _grpc(
    url: str, mailbox: str | None, timeout_ms: int, token: str | None, tls: ClientTls | None
) -> _Client:
    address = _parse(url)
    with explain_missing_extra("grpc"):
        from postroom.adapters.grpc.client import connect_grpc
    return connect_grpc(address, timeout_ms=timeout_ms, token=token, tls=tls, mailbox=mailbox)


def _cluster(
    url: str, mailbox: str | None, timeout_ms: int, token: str | None, tls: ClientTls | None
) -> _Client:
    with explain_missing_extra("grpc"):
        from postroom.adapters.compose.cluster_client import connect_cluster
    return connect_cluster(url, mailbox, timeout_ms=timeout_ms, token=token, tls=tls)


_CLIENTS: dict[str, Callable[[str, str | None, int, str | None, ClientTls | None], _Client]] = {
    "http": _http,
    "https": _http,
    "http+unix": _http,
    "grpc": _grpc,
    "grpcs": _grpc,
    "grpc+unix": _grpc,
    "postroom": _cluster,
    "postrooms": _cluster,
}


def _check_token(token: object) -> None:
    """Check a token without showing it."""
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise InvalidRequest(
            f"token must be text of 1 to {MAX_TOKEN_CHARS} visible ASCII characters without spaces; it is "
            "left out of this message."
        )


def _parse(url: str) -> str:
    """Return the address in a URL, as the client of its scheme takes it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _malformed_url(url) from None
    if parts.query or parts.fragment or parts.username is not None or parts.password is not None:
        raise _malformed_url(url)
    if parts.scheme.endswith("+unix"):
        if host or not parts.path.startswith("/"):
            raise _malformed_url(url)
        return f"unix:{parts.path}"
    if not host or parts.path not in ("", "/"):
        raise _malformed_url(url)
    shown = f"[{host}]" if ":" in host else host
    if parts.scheme in ("grpc", "grpcs"):
        if port is None:
            raise _malformed_url(url)
        return f"{shown}:{port}"
    return f"{parts.scheme}://{shown}" + ("" if port is None else f":{port}")


def _malformed_url(url: str) -> InvalidRequest:
    shown = url.rpartition("@")[2][:200]  # a password may precede the @
    return InvalidRequest(
        f"{shown!r} is not the URL of a server; expected http://HOST:PORT, grpc://HOST:PORT, https, grpcs, "
        "http+unix:/PATH, grpc+unix:/PATH or postroom://HOST:PORT/NAMESPACE."
    )


T = TypeVar("T")

TIMEOUT_MS = 30_000
OWNER_TIMEOUT_MS = 5_000
MIN_OWNER_TIMEOUT_MS = 100


class Connection:
    """A mailbox that is opened with `async with`, as a `Mailbox`, or with `with`, as a `SyncMailbox`.

    Each `with` opens another one, so threads and tasks may share a connection.
    """

    def __init__(self, open_: Callable[[], AbstractAsyncContextManager[Mailbox]]) -> None:
        self._open = open_
        self._opened: _OpenMailboxes[AbstractAsyncContextManager[Mailbox]] = _OpenMailboxes()
        self._opened_sync: _OpenMailboxes[SyncMailbox] = _OpenMailboxes()

    def sync(self) -> SyncMailbox:
        """Open the mailbox for code without an event loop, until its `close` is called."""
        return SyncMailbox(self._open())

    async def __aenter__(self) -> Mailbox:
        opening = self._open()
        mailbox = await opening.__aenter__()
        self._opened.add(asyncio.current_task(), opening)
        return mailbox

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._opened.remove(asyncio.current_task()).__aexit__(kind, error, trace)

    def __enter__(self) -> SyncMailbox:
        mailbox = self.sync()
        self._opened_sync.add(threading.get_ident(), mailbox)
        return mailbox

    def __exit__(self, *_: object) -> None:
        self._opened_sync.remove(threading.get_ident()).close()


class _OpenMailboxes(Generic[T]):
    """Resources that a connection has opened, by the task or thread that opened them."""

    def __init__(self) -> None:
        self._items: list[tuple[object, T]] = []
        self._lock = threading.Lock()

    def add(self, by: object, item: T) -> None:
        with self._lock:
            self._items.append((by, item))

    def remove(self, by: object) -> T:
        """Remove the last item that `by` opened, or else the last one: a fixture may exit in another task."""
        with self._lock:
            own = [number for number, (who, _) in enumerate(self._items) if who == by]
            return self._items.pop(own[-1] if own else -1)[1]


def connect(
    address: str,
    mailbox: str = DEFAULT_MAILBOX,
    *,
    timeout_ms: int = TIMEOUT_MS,
    token: str | None = None,
    tls: ClientTls | None = None,
    owner_timeout_ms: int = OWNER_TIMEOUT_MS,
    mode: MailboxMode | None = None,
    durability: Durability = "full",
    limits: MailboxLimits | None = None,
    default_policy: TopicPolicy | None = None,
    owner: str | None = None,
    archive: str | Path | None = None,
    accept_clock: bool = False,
    outboxes: Sequence[str] = (),
    amnesia: bool = False,
    listen: str | None = None,
    erasure: ErasureSettings | None = None,
) -> Connection:
    """Return a connection to a mailbox, opened by `async with`, or by `with` where nothing awaits.

    One process owns the mailbox. All other processes call it: on the same host through a local socket, from
    other hosts, which use the same database, over TLS. When the owner ends, another process takes over; calls
    wait meanwhile, and are repeated where that is safe.

    Arguments:
        address: path of a SQLite file, created if it is missing; `postgresql://...`, already migrated;
            `memory:`, for this process alone; or the URL of a server, such as `http://host:port` (see
            `connect_remote`), to which the arguments after `tls` do not apply.
        mailbox: `namespace@proxy`; created if it is missing. Or a namespace that `postroom own --owners`
            created in the store, whose mailboxes are used as one. A server has one mailbox: the default takes
            it whatever its name is, any other name must be its own.
        timeout_ms: time for each call, besides the wait for messages.
        token: sent to a server with each call as `Authorization: Bearer`; a store takes none.
        tls: certificates with which to connect to the `https://` or `grpcs://` URL of a server.
        owner_timeout_ms: time without an answer after which an owner is replaced, even if it still runs.
        mode, limits, default_policy: see `open_mailbox`; compared with the mailbox's settings when it is
            opened, whoever owns it.
        durability, owner, archive, accept_clock, amnesia, listen, erasure: how this process opens the mailbox
            if it becomes the owner; see `open_mailbox`.
        outboxes: see `open_mailbox`; if another process is the owner, it is asked to relay them, and retries
            those that can't be used.

    Raises, when it is opened: SettingsConflict; InvalidRequest for an argument that is malformed, of a wrong
        type or out of range; Unavailable when the mailbox can't be used in time; ImplausibleClock as
        `open_mailbox` does. Calls raise Unavailable, with a retry time, when no owner answers in time.
    """

    def open_() -> AbstractAsyncContextManager[Mailbox]:
        check_path("address", address)
        check_int("timeout_ms", timeout_ms, 1, MAX_DURATION_MS)
        if is_remote(address):
            expected = None if mailbox == DEFAULT_MAILBOX else check_mailbox(mailbox)
            return connect_remote(address, expected, timeout_ms=timeout_ms, token=token, tls=tls)
        if token is not None:
            raise InvalidRequest("A store takes no token; leave it out, or connect to the URL of a server.")
        if tls is not None:
            raise InvalidRequest("A store takes no tls; leave it out, or connect to the URL of a server.")
        changes = make_settings(limits, default_policy)
        settings = OwnerSettings(
            mode, durability, changes, owner, archive, accept_clock, outboxes, amnesia, listen, erasure
        )
        timeouts: dict[str, Any] = {"timeout_ms": timeout_ms, "owner_timeout_ms": owner_timeout_ms}
        if "@" in check_any_text("The mailbox name", mailbox):
            return share_mailbox(address, mailbox, settings=settings, **timeouts)
        from postroom.adapters.compose.store_namespace import share_namespace  # few stores have namespaces

        return share_namespace(address, mailbox, share_mailbox, settings=settings, **timeouts)

    return Connection(open_)


@asynccontextmanager
async def share_mailbox(
    store: str,
    mailbox: str = DEFAULT_MAILBOX,
    *,
    timeout_ms: int = TIMEOUT_MS,
    owner_timeout_ms: int = OWNER_TIMEOUT_MS,
    settings: OwnerSettings | None = None,
    in_thread: bool = True,
) -> AsyncIterator[SharedMailbox]:
    """Use a mailbox of a store while the context lasts: as its owner if nobody owns it; see `connect`.

    Arguments:
        settings: how this process opens the mailbox when it becomes the owner.
        in_thread: run the owner on the event loop of a thread of its own, so that code which blocks the
            caller's event loop delays no other process (ADR 0105). A server, whose event loop runs no code of
            users, owns the mailbox on it (ADR 0130).
    """
    check_mailbox(mailbox)
    check_int("timeout_ms", timeout_ms, 1, MAX_DURATION_MS)
    check_int("owner_timeout_ms", owner_timeout_ms, MIN_OWNER_TIMEOUT_MS, MAX_DURATION_MS)
    checked = (settings or OwnerSettings()).check()
    place = open_owner_store(store, checked)
    shared_owner = OwnerConnection(
        mailbox,
        socket_path(place, mailbox),
        place.ownership(),
        lambda required: own_mailbox(place, mailbox, checked._replace(settings=required), wait_ms=0),
        timeout_ms=timeout_ms,
        owner_timeout_ms=owner_timeout_ms,
        outboxes=checked.outboxes,
        settings=checked.settings,
    )
    owner: OwnerConnection | OwnerThread = shared_owner
    if in_thread and not (background := background_loop()).is_current:
        owner = OwnerThread(shared_owner, background.loop)
    trace_if_used()
    protection = None
    if checked.erasure is not None:
        protection = await asyncio.to_thread(open_protection, checked.erasure)
    try:
        await owner.open()
        shared = SharedMailbox(owner, SystemClock().wall, uuid_utils.uuid7, make_search(place, protection))
        if checked.mode is not None:
            await shared.check_mode(checked.mode)
        if protection is not None:
            subject_policies = (await shared.get_settings()).subject_policies
            protection.read_topics = lambda: subject_policies
        yield shared
    finally:
        await owner.close()
