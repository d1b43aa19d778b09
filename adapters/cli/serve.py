"""`postroom serve`: serve a mailbox to other processes."""

import asyncio
import signal
from typing import Annotated

from typer import Option

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
    """

    http: str = DEFAULT_HTTP
    grpc: str | None = None


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
) -> None:
    """Serve the mailbox over HTTP and gRPC to processes of this machine, until interrupted.

    Only loopback addresses and Unix sockets are served. The contract is at /openapi.json. Further limits and
    timeouts are settings of [serve].
    """
    flags = {"http": http, "grpc": grpc, "max_connections": max_connections}
    settings = session.settings.section("serve", ServeSettings, flags)
    for name in HttpSettings.__struct_fields__:
        if name.endswith(("_ms", "_bytes", "_connections")) and getattr(settings, name) < 1:
            raise InvalidSettings(f"[serve]: {name} must be at least 1; it was {getattr(settings, name)}.")
    if not dev:
        raise InvalidSettings(NO_KEY)
    with explain_missing_extra("serve"):
        import uvloop
    surfaces = [open_http_surface(settings.http, settings)] if settings.http else []
    if settings.grpc:
        surfaces.append(open_grpc_surface(settings.grpc))
    if not surfaces:
        raise InvalidSettings("[serve] has neither an http nor a grpc address; set one.")
    uvloop.run(_serve(session, surfaces))


async def _serve(session: Session, surfaces: list[Surface]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with (
        session.use(create=True) as mailbox,
        serve_mailbox(
            session.store,
            mailbox,
            surfaces,
            access=unrestricted,
            default_policy=session.settings.policy,
            measure=mailbox.measure,
        ) as addresses,
    ):
        if session.out.as_json:
            session.out.json({"mailbox": mailbox.name, "addresses": addresses})
        else:
            session.out.line(f"Serving {mailbox.name} of {session.shown_store} at {', '.join(addresses)}.")
        session.out.flush()
        await stop.wait()
        session.out.note("Stopping.")
