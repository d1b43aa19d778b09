"""Wiring of the console: its data sources, and its mount in the HTTP server."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from postroom.adapters.compose import OwnedMailbox, shown_store
from postroom.adapters.compose.access import read_audit_log
from postroom.adapters.compose.export import StoreSearchQueries
from postroom.adapters.compose.store import MEMORY, open_store
from postroom.adapters.console.samples import Samples
from postroom.adapters.console.sessions import OneTimeCode
from postroom.adapters.console.settings import ConsoleData, ConsoleSettings, Decode, PartState
from postroom.adapters.local.mailbox import SharedMailbox
from postroom.application.extras import explain_missing_extra
from postroom.application.metrics import Measure
from postroom.application.ports.control_plane import LeaseAdmin
from postroom.application.service import Search, Service
from postroom.application.threads import background_task
from postroom.domain.errors import PostroomError

if TYPE_CHECKING:  # uvicorn is an extra
    from postroom.adapters.http_server.mount import Mount

__all__ = [
    "ConsoleSettings",
    "OneTimeCode",
    "OpenControlPlane",
    "PartState",
    "console_mount",
    "is_installed",
    "new_code",
]

PACKAGES = ("jinja2", "markupsafe", "python_multipart", "starlette")

T = TypeVar("T")

OpenControlPlane = Callable[[], AbstractAsyncContextManager[LeaseAdmin | None]]
"""Opens the control plane of a cluster for the duration of the context; yields None without a cluster."""


def is_installed() -> bool:
    """Return whether the packages of the console are installed."""
    return all(find_spec(each) is not None for each in PACKAGES)


def new_code(token: str | None = None) -> OneTimeCode:
    """Return the code of a link that starts one session.

    Arguments:
        token: capability token of the session; None for an unrestricted session.
    """
    return OneTimeCode(time.monotonic, token)


def console_mount(
    store: str,
    settings: ConsoleSettings | None = None,
    *,
    open_control_plane: OpenControlPlane | None = None,
    trusts_proxy: bool = False,
    code: OneTimeCode | None = None,
    is_alone: bool = False,
    parts: Callable[[], Sequence[PartState]] | None = None,
) -> "Mount":
    """Return the mount of the console of a served mailbox.

    Arguments:
        store: address of the mailbox's store.
        open_control_plane: opens the control plane of the cluster; None outside of a cluster.
        trusts_proxy: whether requests come from a proxy whose `X-Forwarded-Prefix` is trusted.
        code: starts the session of the local user; None if sessions start with capability tokens.
        is_alone: serve only the console.
        parts: see `ConsoleData`.

    Raises: InvalidRequest for invalid settings; MissingExtra.
    """
    if not is_installed():
        _import_app()  # raises MissingExtra
    from postroom.adapters.http_server.mount import Mount

    checked = (settings or ConsoleSettings()).validate()
    data = ConsoleData(
        decode=None if checked.namespaces is None else _decoder(checked.namespaces),
        mask=checked.mask(),
        serves_calls=not is_alone,
        parts=parts,
    )
    opener = _Opener(store, checked, data, open_control_plane, trusts_proxy, code)
    return Mount(checked.prefix, opener.open, is_alone)


class _Opener(NamedTuple):
    """Opens the console of a service; see `console_mount`."""

    store: str
    settings: ConsoleSettings
    data: ConsoleData
    open_control_plane: OpenControlPlane | None
    trusts_proxy: bool
    code: OneTimeCode | None

    @asynccontextmanager
    async def open(self, service: Service, is_secure: bool) -> AsyncIterator[Any]:
        """Open the console for the duration of the context; its pages are opened at the first request."""
        samples = Samples(service.mailbox, service.metrics.measure)
        async with AsyncExitStack() as opened, background_task(samples.run(service.stopping)):
            yield _LateApp(lambda: self._open_app(service, samples, opened, is_secure=is_secure))

    async def _open_app(
        self, service: Service, samples: Samples, opened: AsyncExitStack, *, is_secure: bool
    ) -> Any:
        make_console = await asyncio.to_thread(_import_app)
        cluster = None
        if self.open_control_plane is not None:
            cluster = await opened.enter_async_context(self.open_control_plane())
        mailbox = service.mailbox
        search = mailbox.search_unsettled if isinstance(mailbox, OwnedMailbox | SharedMailbox) else None
        opening = open_data(
            self.store, mailbox.name, measure=service.metrics.measure, search_unsettled=search
        )
        data = msgspec.structs.replace(
            await asyncio.to_thread(opened.enter_context, opening),
            leases=None if cluster is None else cluster.list_leases,
            control_plane=cluster,
            decode=self.data.decode,
            mask=self.data.mask,
            serves_calls=self.data.serves_calls,
            parts=self.data.parts,
        )
        app = make_console(
            service,
            data,
            self.settings,
            samples,
            is_secure=is_secure,
            trusts_proxy=self.trusts_proxy,
            code=self.code,
        )
        await opened.enter_async_context(background_task(app.state.console.sessions.run(service.stopping)))
        return app


class _LateApp:
    """An ASGI application that is opened at its first request, as most servers never serve the console."""

    def __init__(self, open_: Callable[[], Awaitable[Any]]) -> None:
        self._open = open_
        self._app: Any = None
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        if self._app is None:
            async with self._lock:
                if self._app is None:
                    self._app = await self._open()
        await self._app(scope, receive, send)


@contextmanager
def open_data(
    store: str,
    mailbox: str,
    *,
    measure: Measure | None = None,
    search_unsettled: Search | None = None,
) -> Iterator[ConsoleData]:
    """Open the console's data sources of a store for the duration of the context; see `ConsoleData`.

    Sources that do not exist, or can't be read, are None.

    Arguments:
        search_unsettled: searches the unsettled messages of the mailbox.
    """
    with ExitStack() as opened:
        shown = shown_store(store)
        if store == MEMORY:
            yield ConsoleData(store=shown, measure=measure)
            return
        place = open_store(store)

        def enter(open_each: Callable[[], AbstractContextManager[T]]) -> T | None:
            try:
                return opened.enter_context(open_each())
            except PostroomError:
                return None

        read_models = enter(lambda: _closing(place.read_models))
        log = enter(lambda: _closing(lambda: place.existing_log(mailbox)))
        audit = enter(lambda: read_audit_log(store))
        yield ConsoleData(
            store=shown,
            measure=measure,
            read_models=read_models,
            search_queries=None
            if read_models is None
            else StoreSearchQueries(store, read_models, mailbox, search_unsettled),
            log=log,
            audit=None if audit is None else audit.read,
            audit_log=None if audit is None else audit.log,
        )


@contextmanager
def _closing(open_each: Callable[[], T]) -> Iterator[T]:
    each: Any = open_each()
    try:
        yield each
    finally:
        each.close()


@explain_missing_extra("namespaces")
def _decoder(file: str) -> Decode:
    """Return the decoder for the schemas of a namespace file, or raise InvalidRequest."""
    from postroom.adapters.config.namespaces import load_namespaces
    from postroom.adapters.schemas.validator import SchemaDecoder

    return SchemaDecoder({each.name: each.payload_schemas for each in load_namespaces(file)}).decode


@explain_missing_extra("console")
def _import_app() -> Callable[..., Any]:
    import python_multipart  # noqa: F401 - Starlette needs it to parse forms

    from postroom.adapters.console.app import make_console

    return make_console
