"""`postroom console`: pages for operators in a browser."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Annotated

from typer import Option

from postroom.adapters.cli.lease import open_control_plane
from postroom.adapters.cli.remote import ClientSettings, find_token_text
from postroom.adapters.cli.running import running
from postroom.adapters.cli.serve import cache_ttl_ms, checked_access
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings
from postroom.adapters.compose.access import Access, AuditSettings, open_local_access
from postroom.adapters.compose.console import ConsoleSettings, console_mount, new_code
from postroom.adapters.compose.serve import (
    HttpSettings,
    open_http_surface,
    serve_mailbox,
)
from postroom.application.extras import explain_missing_extra
from postroom.application.service import Surface
from postroom.domain.policy import MAX_DURATION_MS

DEFAULT_HTTP = "127.0.0.1:0"


def console(
    session: Session,
    http: Annotated[
        str, Option(metavar="ADDRESS", help="Address of this machine: host:port; a free port by default.")
    ] = DEFAULT_HTTP,
    read_only: Annotated[bool, Option("--read-only", help="Refuse all actions.")] = False,
) -> None:
    """Show the mailbox in a browser, until interrupted.

    Prints a link that works once, within ten minutes. Its session may do everything, or what the token of
    --token-file or POSTROOM_TOKEN permits. If another process owns the mailbox, the console calls that one.
    """
    settings = session.settings.section("console", ConsoleSettings, {"read_only": read_only or None})
    settings = settings.validate()
    if not http or http.startswith("unix:"):
        raise InvalidSettings("--http must be a host:port of this machine that a browser can open.")
    token = find_token_text(session, session.settings.section("client", ClientSettings).token_file)
    access = local_access(session) if token is None else _access_with(session, token)
    with explain_missing_extra("console"):
        import uvloop
    uvloop.run(serve_console(session, http, settings, access))


def local_access(session: Session) -> AbstractAsyncContextManager[tuple[Access, str]]:
    """Let the user of this process do everything, and audit it; yields the token of the session."""
    audit = session.settings.section("audit", AuditSettings)
    return open_local_access(session.store, session.mailbox, audit=audit)


@asynccontextmanager
async def _access_with(session: Session, token: str) -> AsyncIterator[tuple[Access, str]]:
    async with checked_access(session) as access:
        yield access, token


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
