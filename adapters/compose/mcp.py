"""Wiring of the tools for agents: their data sources, their mount in the HTTP server, and standard input."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import msgspec

from postroom.adapters.compose.access import Access
from postroom.adapters.compose.console import payload_decoder
from postroom.adapters.compose.serve import make_service
from postroom.adapters.compose.store import MEMORY, open_store
from postroom.adapters.console.settings import ConsoleSettings
from postroom.adapters.local.mailbox import SharedMailbox
from postroom.adapters.mcp.http import McpApp
from postroom.adapters.mcp.settings import McpSettings, McpSources, Permission, ReportQuery
from postroom.adapters.system.clock import SystemClock
from postroom.application.access.authority import KeyRing
from postroom.application.extras import explain_missing_extra
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.query_answers import moment_us
from postroom.application.service import Service
from postroom.application.threads import background_task
from postroom.domain.capability.rights import Operations, Right
from postroom.domain.capability.token import Token, attenuate
from postroom.domain.errors import PostroomError
from postroom.domain.message import MS
from postroom.domain.policy import DAY_MS

if TYPE_CHECKING:  # extras
    from postroom.adapters.http_server.mount import Mount
    from postroom.adapters.mcp.server import AgentServer

__all__ = ["McpSettings", "check_installed", "is_installed", "limit_token", "mcp_mounts", "serve_stdio"]

PREFIX: Final = "/mcp"
REPORT_DAYS: Final = 7
"""Time that a report covers if its caller does not say since when."""
_RIGHTS: Final[dict[Permission, Right]] = {
    "redrive": Right.REDRIVE,
    "cancel": Right.ADMIN,
    "pause": Right.ADMIN,
}
"""Right that the operations of a permission need."""


def is_installed() -> bool:
    """Return whether the SDK is installed."""
    return find_spec("mcp") is not None


def check_installed() -> None:
    """Raise MissingExtra unless the SDK is installed."""
    if not is_installed():
        _make_server()  # raises MissingExtra


def limit_token(token: str, settings: McpSettings) -> str:
    """Return a token that permits reads, and the commands that the settings allow."""
    commands = {right for name, right in _RIGHTS.items() if name in (settings.allow or ())}
    rights = (Right.READ_HEADERS, Right.READ_PAYLOAD, *sorted(commands))
    return attenuate(Token.decode(token), Operations(rights)).encode()


def mcp_mounts(
    store: str,
    settings: McpSettings,
    console: ConsoleSettings,
    keys: KeyRing | None,
    *,
    is_served: bool | None,
) -> "list[Mount]":
    """Return the mount of the tools of a served mailbox, if they are served.

    Arguments:
        console: settings of the console, whose masks and schemas apply.
        keys: root keys of the store, if it may have any.
        is_served: None if the SDK is installed.
    """
    if not (is_installed() if is_served is None else is_served):
        return []
    from postroom.adapters.http_server.mount import Mount

    @asynccontextmanager
    async def open_app(service: Service, is_secure: bool) -> AsyncIterator[Any]:
        with ExitStack() as opened:

            def make_manager() -> Any:
                sources = opened.enter_context(open_sources(store, service.mailbox.name, console, keys))
                return _make_server(service, sources, settings).make_manager()

            app = McpApp(service, settings, partial(asyncio.to_thread, make_manager))
            async with background_task(app.run()):
                yield app

    return [Mount(PREFIX, open_app, is_for_programs=True)]


async def serve_stdio(
    store: str,
    mailbox: SharedMailbox,
    settings: McpSettings,
    console: ConsoleSettings,
    *,
    access: Access,
    token: str,
    cap_cache_ttl_ms: int,
    keys: KeyRing | None = None,
) -> None:
    """Serve the tools of a mailbox on standard input and output, until standard input is closed.

    Arguments:
        access: checks the token.
        token: capability of the process that started this one; each call is checked against it.
        keys: root keys of the store, if it may have any.
    """
    service = make_service(
        store, mailbox, access=access, measure=mailbox.measure, cap_cache_ttl_ms=cap_cache_ttl_ms
    )
    with open_sources(store, mailbox.name, console, keys) as sources:
        server = await asyncio.to_thread(
            _make_server, service, sources, settings, lambda: service.open_session(token)
        )
        await server.serve_stdio()


@explain_missing_extra("mcp")
def _make_server(*arguments: Any) -> "AgentServer":
    from postroom.adapters.mcp.server import AgentServer

    return AgentServer(*arguments)


@contextmanager
def open_sources(
    store: str, mailbox: str, console: ConsoleSettings, keys: KeyRing | None = None
) -> Iterator[McpSources]:
    """Open the data sources of the tools, besides the mailbox, for as long as the context lasts.

    Raises: InvalidRequest for the settings of the console.
    """
    checked = console.validate()
    decode = None
    if checked.namespaces is not None:
        decode = partial(payload_decoder(checked.namespaces), mailbox)
    sources = McpSources(mailbox=mailbox, mask=checked.mask(), decode=decode, keys=keys)
    if store == MEMORY:
        yield sources
        return
    with ExitStack() as opened:
        log: EventLogReader | None = None
        with suppress(PostroomError):
            log = opened.enter_context(closing(open_store(store).existing_log(mailbox)))
        yield msgspec.structs.replace(sources, log=log, report=partial(_report, store, mailbox))


def _report(store: str, mailbox: str, query: ReportQuery) -> Sequence[dict[str, Any]]:
    """Return the rows of a report, made in this process."""
    with explain_missing_extra("reports"):
        from postroom.adapters.compose.reports import make_report
        from postroom.projections.models.activity import PERIODS
        from postroom.projections.reports.report import REPORTS
        from postroom.projections.spark.options import LogSelection

    since, until = moment_us(query.since), moment_us(query.until)
    if since is None:
        since = (SystemClock().wall() if until is None else until) - REPORT_DAYS * DAY_MS * MS
    parameters = {"period": PERIODS[query.by]}
    if query.report == "sla":
        parameters["bound"] = query.within_ms * MS
    table = make_report(
        store,
        REPORTS[query.report],
        selection=LogSelection(mailbox, since, until),
        topic=query.topic,
        engine="local",
        parameters=parameters,
    )
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows
