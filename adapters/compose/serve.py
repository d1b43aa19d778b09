"""Wiring of the service: a mailbox, and the surfaces that other processes use."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from typing import TYPE_CHECKING, Any, Final

import msgspec

from postroom.adapters.compose.access import CheckedAccess
from postroom.adapters.compose.store import MEMORY, open_store
from postroom.adapters.http_server.settings import HttpSettings
from postroom.adapters.sockets.address import SurfaceProtection
from postroom.adapters.sockets.connections import ConnectionLimits
from postroom.adapters.sockets.tls import ServerTls, TlsFiles
from postroom.application.extras import explain_missing_extra
from postroom.application.mailbox.settle import DeliveryWindows
from postroom.application.metrics import Measure
from postroom.application.operations.mailbox import Mailbox
from postroom.application.outbox.events import OutboxCounter
from postroom.application.ports.dead_letters import DeadLetterGroupFilter, DeadLetterGroupPage
from postroom.application.service import (
    Groups,
    OpenSession,
    Search,
    Service,
    Surface,
    SurfaceMetrics,
    WriteHealth,
    unrestricted,
)
from postroom.application.threads import in_query_thread

if TYPE_CHECKING:  # uvicorn is an extra
    from postroom.adapters.http_server.mount import Mount

SQS_FRAME_BYTES: Final = 4 << 20
"""Largest request of SQS: 1 MiB of messages, as escaped JSON or percent-encoded."""

__all__ = [
    "ConnectionLimits",
    "HttpSettings",
    "ServerTls",
    "SurfaceProtection",
    "TlsFiles",
    "open_grpc_surface",
    "open_http_surface",
    "open_sqs_surface",
    "serve_apps",
    "serve_mailbox",
    "unrestricted",
]


@asynccontextmanager
async def serve_mailbox(
    store: str,
    mailbox: Mailbox,
    surfaces: Sequence[Surface],
    *,
    access: Callable[[Mailbox, Search], OpenSession],
    search: Search | None = None,
    measure: Measure | None = None,
    cap_cache_ttl_ms: int | None = None,
    outboxes: OutboxCounter | None = None,
) -> AsyncIterator[list[str]]:
    """Serve a mailbox through surfaces for as long as the context lasts.

    At the end, long polls and streams end, requests in progress finish, and all surfaces close at once.

    Arguments:
        store: the store of the mailbox.
        access: decides what the bearer of a token may do; `unrestricted` lets every caller do everything.
        search: searches messages in place of the mailbox.
        measure: returns the metrics of the mailbox; None measures nothing.
        cap_cache_ttl_ms: how long `access` caches the verification of a token, for the metrics.
        outboxes: see `Service`.

    Yields: the addresses of the surfaces.
    Raises: InvalidRequest for an address that is not served, Unavailable when one can't be bound.
    """
    service = make_service(
        store,
        mailbox,
        access=access,
        search=search,
        measure=measure,
        cap_cache_ttl_ms=cap_cache_ttl_ms,
        outboxes=outboxes,
    )
    opened = [surface(service) for surface in surfaces]
    async with AsyncExitStack() as closing:
        addresses = []
        for surface in opened:
            addresses.append(await surface.__aenter__())
            closing.push_async_exit(surface)
        try:
            yield addresses
        finally:
            service.stopping.set()
            closing.pop_all()
            await asyncio.gather(*(surface.__aexit__(None, None, None) for surface in opened))


def make_service(
    store: str,
    mailbox: Mailbox,
    *,
    access: Callable[[Mailbox, Search], OpenSession],
    search: Search | None = None,
    measure: Measure | None = None,
    cap_cache_ttl_ms: int | None = None,
    outboxes: OutboxCounter | None = None,
    stopping: asyncio.Event | None = None,
) -> Service:
    """Return the service of a mailbox for surfaces; for the arguments, see `serve_mailbox`.

    Arguments:
        stopping: set when the service begins to stop; None for an event of its own.
    """
    return Service(
        mailbox,
        access(mailbox, search or mailbox.search_messages),
        stopping or asyncio.Event(),
        DeliveryWindows(),
        SurfaceMetrics(measure, cap_cache_ttl_ms, None if outboxes is None else outboxes.measure),
        WriteHealth(),
        is_dev=access is unrestricted,
        dlq_profile="ephemeral" if store == MEMORY else "durable",
        groups=None if store == MEMORY else make_groups(store),
        outboxes=outboxes,
        find_token=access.find_token if isinstance(access, CheckedAccess) else None,
    )


def make_groups(store: str) -> Groups:
    """Return the query for groups of dead letters in a store's read models, which runs in a thread."""

    def group(filter_: DeadLetterGroupFilter) -> DeadLetterGroupPage:
        with explain_missing_extra(), closing(open_store(store).read_models()) as read_models:
            return read_models.dead_letter_groups(filter_)

    async def group_in_thread(filter_: DeadLetterGroupFilter) -> DeadLetterGroupPage:
        return await in_query_thread(group, filter_)

    return group_in_thread


@explain_missing_extra("serve")
def open_http_surface(
    address: str,
    settings: HttpSettings,
    protection: SurfaceProtection | None = None,
    *mounts: "Mount",
) -> Surface:
    """Return the HTTP surface; see `http_surface`."""
    from postroom.adapters.http_server.server import http_surface

    return http_surface(address, settings, protection, *mounts)


@explain_missing_extra("serve")
def serve_apps(
    address: str, prefix: str, open_app: AbstractAsyncContextManager[Any], metrics: SurfaceMetrics
) -> AbstractAsyncContextManager[str]:
    """Serve an application of several mailboxes over HTTP; see `serve_mounted`."""
    from postroom.adapters.http_server.server import serve_mounted

    return serve_mounted(address, HttpSettings(), prefix, open_app, metrics)


@explain_missing_extra("serve")
def open_sqs_surface(
    address: str, settings: HttpSettings, protection: SurfaceProtection | None = None
) -> Surface:
    """Return the surface that speaks the protocols of Amazon SQS, over HTTP; see `http_surface`."""
    from postroom.adapters.http_server.mount import Mount
    from postroom.adapters.http_server.server import http_surface
    from postroom.adapters.sqs.app import SqsApp

    @asynccontextmanager
    async def open_app(service: Service, is_secure: bool) -> AsyncIterator[SqsApp]:
        yield SqsApp(service, "https" if is_secure else "http")

    limits = msgspec.structs.replace(settings, frame_bytes=max(settings.frame_bytes, SQS_FRAME_BYTES))
    return http_surface(address, limits, protection, Mount("", open_app, is_alone=True))


@explain_missing_extra("grpc")
def open_grpc_surface(
    address: str, protection: SurfaceProtection | None = None, limits: ConnectionLimits | None = None
) -> Surface:
    """Return the gRPC surface; see `grpc_surface`."""
    from postroom.adapters.grpc.server import grpc_surface

    return grpc_surface(address, protection, limits)
