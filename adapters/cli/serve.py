"""`postroom serve`: serve a mailbox to other processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from typer import Option

from postroom.adapters.cli.admin import open_control_plane
from postroom.adapters.cli.filters import SectionFlags, takes_section
from postroom.adapters.cli.instances import instance_sources
from postroom.adapters.cli.mailbox import Apply, use_applied
from postroom.adapters.cli.restrictions import AccessSection
from postroom.adapters.cli.running import Reload, mailbox_settings, opened, running, tls_certificates
from postroom.adapters.cli.session import MEMORY, Session
from postroom.adapters.cli.settings import InvalidSettings, Settings
from postroom.adapters.cli.values import Dev
from postroom.adapters.compose import mcp
from postroom.adapters.compose.access import (
    Access,
    AuditSettings,
    CheckedAccess,
    check_keys,
    open_access,
    open_key_ring,
    open_local_access,
)
from postroom.adapters.compose.console import ConsoleSettings, InstanceSource, console_mount, is_installed
from postroom.adapters.compose.process import protect_memory
from postroom.adapters.compose.serve import (
    HttpSettings,
    ServerTls,
    SurfaceProtection,
    TlsFiles,
    open_grpc_surface,
    open_http_surface,
    open_sqs_surface,
    serve_mailbox,
    unrestricted,
)
from postroom.application.extras import explain_missing_extra
from postroom.application.service import Surface
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from postroom.application.access.authority import KeyRing
    from postroom.application.operations.mailbox import Mailbox
    from postroom.application.ports.failed_work import FailedWork


def enter_amnesia(session: Session, *addresses: str | None) -> Session:
    """Keep this process off every disk, and return the session with its store in memory.

    Arguments:
        addresses: addresses at which the process is to listen.

    Raises: InvalidSettings when the store or an address is a file.
    """
    if session.settings.store not in (None, MEMORY):
        raise InvalidSettings(
            f"In amnesia mode the store is in memory, not {session.shown_store}; leave --store and "
            "POSTROOM_STORE out."
        )
    for address in addresses:
        if address and address.startswith("unix:"):
            raise InvalidSettings(
                f"Amnesia mode can't listen at {address}: a Unix socket is a file; use 127.0.0.1:PORT."
            )
    for reason in protect_memory():
        logger().warning("amnesia.unprotected", reason=reason)
    return session.with_settings(msgspec.structs.replace(session.settings, store=MEMORY))


async def report_loss(mailbox: "Mailbox") -> None:
    """Log how many messages are lost when this process ends."""
    backlog = await mailbox.get_backlog()
    logger().warning(
        "amnesia.forgotten",
        mailbox=backlog.mailbox,
        unsettled=sum(each.ready + each.delayed + each.in_flight for each in backlog.shards),
        dead_letters=sum(each.dead for each in backlog.shards),
    )


DEFAULT_HTTP = "127.0.0.1:8080"


class ServeSettings(HttpSettings, frozen=True, kw_only=True):
    """Settings of `[serve]`: the addresses, and the limits of the HTTP server.

    Arguments:
        http: `host:port`, or `unix:path`; empty disables HTTP.
        grpc: the same for gRPC; None disables gRPC.
        sqs: the same for clients of Amazon SQS; None disables it.
        amnesia: write nothing to disk, and forget messages when they settle.
        tls_certificate, tls_key: PEM files; `host:port` addresses are then served with TLS.
        tls_client_ca: PEM file of authorities; clients must then have a certificate of one of them.
        behind_proxy: whether a proxy in front terminates TLS.
        allowed_hosts: host names of the server besides loopback names; `*` for any.
        console: whether to serve the console; None if its packages are installed.
        mcp: whether to serve the tools for agents; None if their package is installed.
    """

    http: str = DEFAULT_HTTP
    grpc: str | None = None
    sqs: str | None = None
    amnesia: bool = False
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    behind_proxy: bool = False
    allowed_hosts: tuple[str, ...] = ()
    console: bool | None = None
    mcp: bool | None = None

    def protection(self) -> SurfaceProtection:
        """Return the protection of the surfaces; raise InvalidRequest for an unusable certificate."""
        tls = None
        if self.tls_certificate is not None and self.tls_key is not None:
            tls = ServerTls(TlsFiles(self.tls_certificate, self.tls_key, self.tls_client_ca))
        elif self.tls_certificate or self.tls_key or self.tls_client_ca:
            raise InvalidSettings(
                "[serve]: TLS needs both tls_certificate and tls_key; set both, or neither."
            )
        return SurfaceProtection(tls, self.behind_proxy, self.allowed_hosts)


@takes_section(
    "serve",
    ServeSettings,
    http=Option(metavar="ADDRESS", help="HTTP address: host:port or unix:path."),
    grpc=Option(metavar="ADDRESS", help="gRPC address; none by default."),
    sqs=Option(metavar="ADDRESS", help="Address for clients of Amazon SQS; none by default."),
    max_connections=Option(metavar="N", min=1, help="Connections at a time."),
    amnesia=Option("--amnesia", help="Write nothing to disk; all messages are lost when the server stops."),
)
def serve(
    session: Session, options: SectionFlags[ServeSettings], dev: Dev = False, apply: Apply = False
) -> None:
    """Serve the mailbox over HTTP, gRPC and the protocol of Amazon SQS, until interrupted.

    Addresses beyond loopback need TLS, by tls_certificate and tls_key of [serve], or a proxy in front. The
    contract is at /openapi.json. Limits and timeouts are settings of [serve].
    """
    settings = options.read(session.settings)
    for name in HttpSettings.__struct_fields__:
        if type(value := getattr(settings, name)) is int and value < 1:
            raise InvalidSettings(f"[serve]: {name} must be at least 1; it was {value}.")
    if settings.amnesia:
        session = enter_amnesia(session, settings.http, settings.grpc, settings.sqs)
    opening: AbstractAsyncContextManager[Access] = (
        nullcontext(unrestricted) if dev else checked_access(session)
    )
    with explain_missing_extra("serve"):
        import uvloop
    protection = settings.protection()
    if not settings.http and not settings.grpc and not settings.sqs:
        raise InvalidSettings("[serve] has neither an http nor a grpc nor an sqs address; set one.")
    reloads = [tls_certificates(protection.tls)] if protection.tls is not None else []
    surfaces = _surfaces(session, settings, protection, dev=dev)
    uvloop.run(_serve(session, surfaces, opening, reloads, amnesia=settings.amnesia, apply=apply))


def _surfaces(
    session: Session, settings: ServeSettings, protection: SurfaceProtection, *, dev: bool
) -> list[Surface]:
    surfaces = []
    if settings.http:
        mounts = []
        console = session.settings.section("console", ConsoleSettings)
        if settings.console or (settings.console is None and is_installed()):
            control_plane = partial(open_control_plane, session)
            mounts.append(
                console_mount(
                    session.store,
                    console,
                    open_control_plane=control_plane,
                    trusts_proxy=settings.behind_proxy,
                    find_failed_work=partial(find_failed_work, session),
                    instances=_instances(session, console, dev=dev),
                )
            )
        agents = session.settings.section("mcp", mcp.McpSettings)
        keys = find_keys(session)
        mounts += mcp.mcp_mounts(session.store, agents, console, keys, is_served=settings.mcp)
        surfaces.append(open_http_surface(settings.http, settings, protection, *mounts))
    if settings.grpc:
        surfaces.append(open_grpc_surface(settings.grpc, protection, settings))
    if settings.sqs:
        surfaces.append(open_sqs_surface(settings.sqs, settings, protection))
    return surfaces


def find_keys(session: Session) -> "KeyRing | None":
    """Return the root keys of the store; None for a database whose key file is not named."""
    with suppress(InvalidRequest):
        return open_key_ring(session.store, session.settings.section("access", AccessSection).key_file)
    return None


def _instances(session: Session, console: ConsoleSettings, *, dev: bool) -> "list[InstanceSource]":
    """Return the other mailboxes that the console shows; each asks users for a token of its own."""
    if not console.instances:
        return []

    @asynccontextmanager
    async def open_each(each: Session) -> AsyncIterator[tuple[Access, str | None]]:
        async with nullcontext(unrestricted) if dev else checked_access(each) as access:
            yield access, None

    return instance_sources(
        session, console.instances, open_each, find_failed_work, read_only=console.read_only
    )


def find_failed_work(session: Session, mailbox: str) -> "list[FailedWork]":
    """Return the failures of the outboxes and the inbox of the settings, for the console of a mailbox."""
    from postroom.adapters.compose.failed_work import configured_failures, recorded_failures

    databases = session.outbox_databases()
    addresses = [databases.store, *databases.relayed, *databases.others]
    return [
        *configured_failures(session.settings.sections, session.settings.section),
        *recorded_failures(addresses, mailbox),
    ]


def checked_access(session: Session) -> AbstractAsyncContextManager[Access]:
    """Return access by capabilities; raise InvalidRequest without a key, before anything is opened."""
    section = session.settings.section("access", AccessSection)
    keys = open_key_ring(session.store, section.key_file)
    try:
        check_keys(keys.root_keys())
    except InvalidRequest as error:
        raise InvalidSettings(str(error)) from error
    audit = session.settings.section("audit", AuditSettings)
    return open_access(session.store, key_file=section.key_file, settings=section.control(), audit=audit)


def local_access(
    session: Session, *, admits_tokens: bool = False
) -> AbstractAsyncContextManager[tuple[Access, str]]:
    """Let the user of this process do everything, and audit it; yields the token of the session.

    Arguments:
        admits_tokens: whether to admit bearers of capabilities of the store, too.
    """
    audit = session.settings.section("audit", AuditSettings)
    if not admits_tokens:
        return open_local_access(session.store, session.mailbox, audit=audit)
    settings = session.settings.section("access", AccessSection).control()
    issued = find_keys(session)
    return open_local_access(session.store, session.mailbox, audit=audit, issued=issued, settings=settings)


@asynccontextmanager
async def access_with(session: Session, token: str) -> AsyncIterator[tuple[Access, str]]:
    """Let the bearer of a token do what it permits; yields the token of the session."""
    async with checked_access(session) as access:
        yield access, token


def cache_ttl_ms(session: Session) -> int:
    """Return how long the verification of a token is cached."""
    return session.settings.section("access", AccessSection).cap_cache_ttl_ms


def principal_quotas(access: CheckedAccess) -> Reload:
    """Return the reload of the quotas of principals."""

    async def apply(settings: Settings) -> None:
        access.set_quotas(settings.section("access", AccessSection).control())

    return Reload("quotas", apply, ("access.quotas",))


async def _serve(
    session: Session,
    surfaces: list[Surface],
    opening: AbstractAsyncContextManager[Access],
    reloads: list[Reload],
    *,
    amnesia: bool,
    apply: bool,
) -> None:
    stop = asyncio.Event()
    session.check_one_mailbox()
    async with (
        opened(lambda: use_applied(session, apply=apply, amnesia=amnesia, in_thread=False)) as mailbox,
        opening as access,
        serve_mailbox(
            session.store,
            mailbox,
            surfaces,
            access=access,
            measure=mailbox.measure,
            outboxes=None if amnesia else session.outbox_databases().counter(),
            cap_cache_ttl_ms=None if access is unrestricted else cache_ttl_ms(session),
        ) as addresses,
    ):
        mode, where = " in amnesia mode" if amnesia else "", ", ".join(addresses)
        if isinstance(access, CheckedAccess):
            reloads = [*reloads, principal_quotas(access)]
        async with running(session, stop.set, [mailbox_settings(session, mailbox), *reloads]):
            session.out.result(
                {"mailbox": mailbox.name, "addresses": addresses},
                f"Serving {mailbox.name} of {session.shown_store}{mode} at {where}.",
            )
            session.out.flush()
            await stop.wait()
        session.out.note("Stopping.")
        if amnesia:
            await report_loss(mailbox)
