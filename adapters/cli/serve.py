"""`postroom serve`: serve a mailbox to other processes."""

import asyncio
import signal
from typing import Annotated

from typer import Option

from postroom.adapters.cli.amnesia import enter_amnesia, report_loss
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings
from postroom.adapters.compose.serve import (
    HttpSettings,
    open_grpc_surface,
    open_http_surface,
    serve_mailbox,
    unrestricted,
)
from postroom.application.extras import explain_missing_extra
from postroom.application.service import Surface

DEFAULT_HTTP = "127.0.0.1:8080"
NO_KEY = (
    "There is no key to sign capabilities with, so callers can't be told apart; make one with "
    "`postroom token rotate`, or let every process of this machine do everything with --dev."
)


class ServeSettings(HttpSettings, frozen=True, kw_only=True):
    """Settings of `[serve]`: the addresses, and the limits of the HTTP server.

    Arguments:
        http: loopback `host:port`, or `unix:path`; empty for none.
        grpc: the same for gRPC; None for none.
        amnesia: write nothing to a disk, and forget messages when they settle.
    """

    http: str = DEFAULT_HTTP
    grpc: str | None = None
    amnesia: bool = False


def serve(
    session: Session,
    http: Annotated[
        str | None,
        Option(metavar="ADDRESS", help=f"HTTP address: host:port or unix:path; default {DEFAULT_HTTP}."),
    ] = None,
    grpc: Annotated[str | None, Option(metavar="ADDRESS", help="gRPC address; none by default.")] = None,
    max_connections: Annotated[
        int | None, Option(metavar="N", min=1, help="Connections at a time; default 1,024.")
    ] = None,
    dev: Annotated[
        bool, Option("--dev", help="Let every process of this machine do everything, without tokens.")
    ] = False,
    amnesia: Annotated[
        bool,
        Option("--amnesia", help="Write nothing to a disk; what is in memory is lost at the end."),
    ] = False,
) -> None:
    """Serve the mailbox over HTTP and gRPC to processes of this machine, until interrupted.

    Only loopback addresses and Unix sockets are served. The contract is at /openapi.json. Further limits and
    timeouts are settings of [serve].
    """
    flags = {"http": http, "grpc": grpc, "max_connections": max_connections, "amnesia": amnesia or None}
    settings = session.settings.section("serve", ServeSettings, flags)
    for name in HttpSettings.__struct_fields__:
        if name.endswith(("_ms", "_bytes", "_connections")) and getattr(settings, name) < 1:
            raise InvalidSettings(f"[serve]: {name} must be at least 1; it was {getattr(settings, name)}.")
    if not dev:
        raise InvalidSettings(NO_KEY)
    if settings.amnesia:
        session = enter_amnesia(session, settings.http, settings.grpc)
    with explain_missing_extra("serve"):
        import uvloop
    surfaces = [open_http_surface(settings.http, settings)] if settings.http else []
    if settings.grpc:
        surfaces.append(open_grpc_surface(settings.grpc))
    if not surfaces:
        raise InvalidSettings("[serve] has neither an http nor a grpc address; set one.")
    uvloop.run(_serve(session, surfaces, amnesia=settings.amnesia))


async def _serve(session: Session, surfaces: list[Surface], *, amnesia: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with session.use(create=True, amnesia=amnesia) as mailbox:
        async with serve_mailbox(
            session.store,
            mailbox,
            surfaces,
            access=unrestricted,
            default_policy=session.settings.policy,
            search=mailbox.search_unsettled if amnesia else None,
            measure=mailbox.measure,
        ) as addresses:
            if session.out.as_json:
                session.out.json({"mailbox": mailbox.name, "addresses": addresses})
            else:
                mode, where = " in amnesia mode" if amnesia else "", ", ".join(addresses)
                session.out.line(f"Serving {mailbox.name} of {session.shown_store}{mode} at {where}.")
            session.out.flush()
            await stop.wait()
            session.out.note("Stopping.")
        if amnesia:
            await report_loss(mailbox)
