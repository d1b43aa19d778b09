"""`postroom mcp`: the tools for agents, on standard input and output."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Annotated

from typer import Option

from postroom.adapters.cli.remote import ClientSettings, find_token_text
from postroom.adapters.cli.running import running
from postroom.adapters.cli.serve import access_with, cache_ttl_ms, find_keys, local_access
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage
from postroom.adapters.compose.access import Access
from postroom.adapters.compose.console import ConsoleSettings
from postroom.adapters.compose.mcp import McpSettings, check_installed, limit_token, serve_stdio
from postroom.application.threads import cancel_and_wait
from postroom.domain.policy import MAX_DURATION_MS


def mcp(
    session: Session,
    allow: Annotated[
        str | None,
        Option(
            "--allow",
            metavar="COMMANDS",
            help="Commands of the agent: redrive,cancel,pause; else none.",
        ),
    ] = None,
) -> None:
    """Serve the mailbox to an agent by the Model Context Protocol, on standard input and output.

    The agent reads; it redrives, cancels or pauses only what --allow permits, after a preview. It may do what
    the token of --token-file or POSTROOM_TOKEN permits. If another process owns the mailbox, that one is
    called. Over HTTP, serve has the same tools at /mcp.
    """
    names = None if allow is None else tuple(each.strip() for each in allow.split(",") if each.strip())
    settings = session.settings.section("mcp", McpSettings, {"allow": names})
    console = session.settings.section("console", ConsoleSettings)
    file = session.settings.section("client", ClientSettings).token_file
    if file == "-":
        raise WrongUsage(
            "The agent uses standard input; name a file with --token-file, or set POSTROOM_TOKEN."
        )
    token = find_token_text(session, file)
    check_installed()
    opening = local_access(session) if token is None else access_with(session, token)
    asyncio.run(_serve(session, settings, console, opening, is_local=token is None))


async def _serve(
    session: Session,
    settings: McpSettings,
    console: ConsoleSettings,
    opening: AbstractAsyncContextManager[tuple[Access, str]],
    *,
    is_local: bool,
) -> None:
    """Serve until the agent closes standard input, or a signal comes.

    Arguments:
        opening: yields access control, and the token of the agent.
        is_local: the token belongs to this process's user, who may do everything; the agent gets a narrower
            one.
    """
    stop = asyncio.Event()
    async with (
        # An agent must not replace an owner that is slow to answer, and sets no policies.
        session.use(owner_timeout_ms=MAX_DURATION_MS, gives_settings=False) as mailbox,
        opening as (access, token),
        running(session, stop.set),
    ):
        serving = asyncio.create_task(
            serve_stdio(
                session.store,
                mailbox,
                settings,
                console,
                access=access,
                token=limit_token(token, settings) if is_local else token,
                cap_cache_ttl_ms=cache_ttl_ms(session),
                keys=find_keys(session),
            )
        )
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving
        finally:
            await cancel_and_wait(serving, stopped)
