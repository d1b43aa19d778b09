"""Wiring of the clients of a cluster: one mailbox of it, or all mailboxes of a namespace."""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple
from urllib.parse import unquote

import uuid_utils

from postroom.adapters.grpc.client import GrpcTransport
from postroom.adapters.grpc.connections import open_channel
from postroom.adapters.grpc.routed_channel import OwnerRoutes, RoutedChannel
from postroom.adapters.sockets.tls import ClientFiles
from postroom.application.cluster.namespace_mailbox import NamespaceMailbox
from postroom.application.mailbox_client import MailboxClient
from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.names import check_mailbox, check_member

DEFAULT_PORT = 7400
MAX_PROXIES = 100
POLL_TIMEOUT_MS = 3_000
_PROXY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?\Z")


class ClusterUrl(NamedTuple):
    """Cluster, servers and mailbox of a URL.

    Arguments:
        proxies: addresses, `host:port`.
        mailbox: one mailbox; None for all of the namespace.
    """

    proxies: tuple[str, ...]
    namespace: str
    mailbox: str | None


@asynccontextmanager
async def connect_cluster(
    url: str,
    mailbox: str | None = None,
    *,
    timeout_ms: int,
    token: str | None = None,
    tls: ClientFiles | None = None,
) -> AsyncIterator[Mailbox]:
    """Use a mailbox of a cluster, or a namespace as one mailbox, for as long as the context lasts.

    A proxy returns the addresses of the owners of mailboxes; the client calls owners directly, or through a
    proxy while that fails. If a proxy does not answer, the client asks the next one.

    Arguments:
        url: `postroom://PROXY,.../NAMESPACE` for all mailboxes of a namespace, or
            `postroom://PROXY,.../NAMESPACE@ID` for one; `postrooms://` with TLS. A proxy is `host` or
            `host:port`; the default port is 7400.
        mailbox: the mailbox; None takes the one in the URL.
        timeout_ms: time for each call, besides the wait for messages.
        token: sent with each call as `authorization: Bearer`.
        tls: certificates; None connects without TLS.

    Raises: InvalidRequest for a malformed URL; NotFound when the URL names another mailbox than `mailbox`, or
        one that the cluster never had; Unavailable when no proxy can be reached, or a mailbox has no owner
        for the time of a call.
    """
    parsed = parse_cluster_url(url)
    name = parsed.mailbox or mailbox
    if name is not None and (mailbox not in (None, name) or name.partition("@")[0] != parsed.namespace):
        raise NotFound(f"{url} names the mailbox {parsed.mailbox or parsed.namespace}, not {mailbox}.")
    async with AsyncExitStack() as opened:
        routes = OwnerRoutes(parsed.proxies, parsed.namespace, lambda address: open_channel(address, tls))
        opened.push_async_callback(routes.close)
        directory = _Directory(routes, parsed.namespace, timeout_ms, token)
        if name is not None:
            client = MailboxClient.open(directory.transport(name), timeout_ms, uuid_utils.uuid7)
            yield await opened.enter_async_context(client)
            return
        opened.callback(directory.close)
        namespace = NamespaceMailbox(directory, timeout_ms, uuid_utils.uuid7)
        opened.push_async_callback(namespace.close)
        await namespace.open()
        yield namespace


class _Directory:
    """`NamespaceDirectory` over the routes of a cluster."""

    def __init__(self, routes: OwnerRoutes, namespace: str, timeout_ms: int, token: str | None) -> None:
        self._routes = routes
        self._namespace = namespace
        self._timeout_ms = timeout_ms
        self._token = token
        self._clients: dict[tuple[str, int], MailboxClient] = {}

    @property
    def namespace(self) -> str:
        """Return the name of the namespace."""
        return self._namespace

    async def list_members(self) -> Sequence[str]:
        """Return the names of the mailboxes that have an owner now."""
        return await self._routes.resolve()

    def mailbox(self, name: str) -> MailboxClient:
        """Return a mailbox."""
        return self._client(name, self._timeout_ms)

    def poller(self, name: str) -> MailboxClient:
        """Return a mailbox whose calls fail after seconds."""
        return self._client(name, min(POLL_TIMEOUT_MS, self._timeout_ms))

    def transport(self, name: str) -> GrpcTransport:
        """Return the calls of a mailbox."""
        where = f"the owner of {name}, or a proxy at {self._routes.where},"
        return GrpcTransport(RoutedChannel(self._routes, name), where, self._token, name)

    def close(self) -> None:
        """Refuse all later calls."""
        for client in self._clients.values():
            client.close()

    def _client(self, name: str, timeout_ms: int) -> MailboxClient:
        if (name, timeout_ms) not in self._clients:
            self._clients[name, timeout_ms] = MailboxClient(
                self.transport(name), name, timeout_ms, uuid_utils.uuid7
            )
        return self._clients[name, timeout_ms]


def parse_cluster_url(url: str) -> ClusterUrl:
    """Parse the URL of a cluster, or raise InvalidRequest."""
    rest = url.partition("://")[2]
    hosts, slash, path = rest.partition("/")
    proxies = tuple(_parse_proxy(each) for each in hosts.split(",")) if "@" not in hosts else (None,)
    name = unquote(path.rstrip("/"), errors="replace")
    if not slash or None in proxies or len(proxies) > MAX_PROXIES or not {"?", "#"}.isdisjoint(path):
        shown = url.rpartition("@")[2][:200] if "@" in hosts else url[:200]  # a password may precede the @
        raise InvalidRequest(
            f"{shown!r} is not the URL of a cluster; expected postroom://HOST:PORT,.../NAMESPACE, or "
            "NAMESPACE@ID for one mailbox."
        )
    addresses = tuple(dict.fromkeys(proxy for proxy in proxies if proxy is not None))
    if "@" in name:
        return ClusterUrl(addresses, check_mailbox(name).partition("@")[0], name)
    return ClusterUrl(addresses, check_member("The namespace", name), None)


def _parse_proxy(text: str) -> str | None:
    """Return an address as `host:port`; None if it is malformed."""
    match = _PROXY.match(text)
    port = DEFAULT_PORT if match is None or match[2] is None else int(match[2])
    return None if match is None or not 0 < port < 1 << 16 else f"{match[1]}:{port}"
