"""`postroom console`: show a mailbox, or several, to operators in a browser."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Annotated

from typer import Argument, Option

from postroom.adapters.cli.admin import open_control_plane
from postroom.adapters.cli.instances import instance_sources, read_instances
from postroom.adapters.cli.remote import VARIABLE, ClientSettings, find_token_text
from postroom.adapters.cli.running import running
from postroom.adapters.cli.serve import access_with, cache_ttl_ms, find_failed_work, local_access
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings
from postroom.adapters.cli.values import WrongUsage
from postroom.adapters.compose.access import Access
from postroom.adapters.compose.console import (
    ConsoleSettings,
    InstanceSource,
    console_mount,
    new_code,
    open_instances,
)
from postroom.adapters.compose.serve import HttpSettings, open_http_surface, serve_apps, serve_mailbox
from postroom.application.extras import explain_missing_extra
from postroom.application.service import Surface, SurfaceMetrics
from postroom.domain.policy import MAX_DURATION_MS

CONSOLE_HTTP = "127.0.0.1:0"


def console(
    session: Session,
    instances: Annotated[
        list[str] | None,
        Argument(
            metavar="[NAME=ADDRESS]...",
            help="Mailboxes, each with a name: a mailbox of the store, a store, or a settings file (.toml).",
        ),
    ] = None,
    http: Annotated[
        str, Option(metavar="ADDRESS", help="Address of this machine: host:port; a free port by default.")
    ] = CONSOLE_HTTP,
    read_only: Annotated[bool, Option("--read-only", help="Refuse all actions.")] = False,
) -> None:
    """Show the mailbox, or several, in a browser, until interrupted.

    Prints a link that works once, within ten minutes. Its session may do everything, or only what the token
    of --token-file or POSTROOM_TOKEN permits. If another process owns the mailbox, the console calls that
    one.
    """
    settings = session.settings.section("console", ConsoleSettings, {"read_only": read_only or None})
    settings = settings.validate()
    if not http or http.startswith("unix:"):
        raise InvalidSettings("--http must be a host:port of this machine that a browser can open.")
    token = find_token_text(session, session.settings.section("client", ClientSettings).token_file)
    named = read_instances(instances) if instances else settings.instances
    if named and token is not None:
        raise WrongUsage(
            f"A token is for one mailbox, and this console has several: leave out --token-file and "
            f"{VARIABLE} here, and set [client] token_file in the settings file of the token's instance."
        )
    with explain_missing_extra("console"):
        import uvloop
    if named:
        sources = instance_sources(
            session, named, open_own_access, find_failed_work, read_only=settings.read_only
        )
        uvloop.run(_serve_instances(session, http, settings, sources))
        return
    access = local_access(session) if token is None else access_with(session, token)
    uvloop.run(serve_console(session, http, settings, access))


@asynccontextmanager
async def open_own_access(session: Session) -> AsyncIterator[tuple[Access, str | None]]:
    """Let the user of this process do everything, or what the token of the instance's settings permits."""
    file = session.settings.section("client", ClientSettings).token_file
    token = None if file is None else find_token_text(session, file)
    async with local_access(session) if token is None else access_with(session, token) as opened:
        yield opened


async def _serve_instances(
    session: Session, http: str, settings: ConsoleSettings, sources: Sequence[InstanceSource]
) -> None:
    """Print the link of a console of several mailboxes, and serve it until interrupted."""
    stop, stopping, code, metrics = asyncio.Event(), asyncio.Event(), new_code(), SurfaceMetrics()
    app = open_instances(sources, settings, metrics, stopping, code)
    async with serve_apps(http, settings.prefix, app, metrics) as address:
        link = f"{address}{settings.prefix}/start?code={code.text}"
        names = [each.name for each in sources]
        async with running(session, stop.set):
            session.out.result(
                {"instances": names, "link": link}, f"The console of {', '.join(names)} is at {link}"
            )
            session.out.flush()
            await stop.wait()
        stopping.set()
    session.out.note("Stopping.")


async def serve_console(
    session: Session,
    http: str,
    settings: ConsoleSettings,
    opening: AbstractAsyncContextManager[tuple[Access, str]],
) -> None:
    """Print the link of the console, and serve it until interrupted.

    Arguments:
        opening: yields access control, and the token of the session that the link starts.
    """
    stop = asyncio.Event()
    async with (
        # A console must not replace an owner that is slow to answer, and sets no policies.
        session.use(owner_timeout_ms=MAX_DURATION_MS, gives_settings=False) as mailbox,
        opening as (access, token),
    ):
        code = new_code(token)
        mount = console_mount(
            session.store,
            settings,
            open_control_plane=partial(open_control_plane, session),
            code=code,
            is_alone=True,
            find_failed_work=partial(find_failed_work, session),
        )
        surfaces: list[Surface] = [open_http_surface(http, HttpSettings(), None, mount)]
        async with serve_mailbox(
            session.store,
            mailbox,
            surfaces,
            access=access,
            measure=mailbox.measure,
            cap_cache_ttl_ms=cache_ttl_ms(session),
        ) as (address,):
            link = f"{address}{settings.prefix}/start?code={code.text}"
            async with running(session, stop.set):
                session.out.result(
                    {"mailbox": mailbox.name, "link": link}, f"The console of {mailbox.name} is at {link}"
                )
                session.out.flush()
                await stop.wait()
        session.out.note("Stopping.")
