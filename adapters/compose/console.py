"""Wiring of the console: its mount in the HTTP server, and consoles of several mailboxes."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from postroom.adapters.compose.console_instances import (
    InstanceSource,
    open_instances,
    open_sources,
)
from postroom.adapters.compose.console_opening import (
    FindFailedWork,
    Frame,
    OpenControlPlane,
    Opener,
    import_app,
    payload_decoder,
)
from postroom.adapters.console.samples import Samples
from postroom.adapters.console.sessions import OneTimeCode
from postroom.adapters.console.settings import ConsoleSettings, PartState, check_instance
from postroom.application.service import Service
from postroom.application.threads import background_task

if TYPE_CHECKING:  # uvicorn and Starlette are extras
    from postroom.adapters.console.instances import Instance
    from postroom.adapters.http_server.mount import Mount

__all__ = [
    "ConsoleSettings",
    "InstanceSource",
    "OneTimeCode",
    "OpenControlPlane",
    "PartState",
    "check_instance",
    "console_mount",
    "is_installed",
    "new_code",
    "open_instances",
    "payload_decoder",
]

PACKAGES = ("jinja2", "markupsafe", "python_multipart", "starlette")


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
    find_failed_work: FindFailedWork | None = None,
    instances: Sequence[InstanceSource] = (),
) -> "Mount":
    """Return the mount of the console of a served mailbox.

    Arguments:
        store: address of the mailbox's store.
        open_control_plane: opens the control plane of the cluster; None outside of a cluster.
        trusts_proxy: whether requests come from a proxy whose `X-Forwarded-Prefix` is trusted.
        code: starts the session of the local user; None if sessions start with capability tokens.
        is_alone: serve only the console.
        parts: see `ConsoleData`.
        find_failed_work: returns the failed work that the settings of the process name, except for the
            ingestions of `[console] namespaces`.
        instances: other mailboxes that the console shows, each with its own sessions.

    Raises: InvalidRequest for invalid settings; MissingExtra.
    """
    if not is_installed():
        import_app()  # raises MissingExtra
    from postroom.adapters.http_server.mount import Mount

    checked = (settings or ConsoleSettings()).validate()
    decode = None if checked.namespaces is None else payload_decoder(checked.namespaces)
    opener = Opener(store, checked, open_control_plane, find_failed_work, decode, parts, not is_alone)
    frame = Frame(checked, trusts_proxy, code)
    return Mount(checked.prefix, _MountOpener(opener, frame, instances).open, is_alone)


class _MountOpener(NamedTuple):
    """Opens the console of the process's own mailbox, and of the other instances."""

    opener: Opener
    frame: Frame
    sources: Sequence[InstanceSource]

    @asynccontextmanager
    async def open(self, service: Service, is_secure: bool) -> AsyncIterator[Any]:
        """Open the console for the duration of the context; its pages are opened at the first request."""
        samples = Samples(service.mailbox, service.metrics.measure)
        frame = self.frame._replace(is_secure=is_secure)
        async with AsyncExitStack() as opened, background_task(samples.run(service.stopping)):
            others: Sequence[Instance] = ()
            if self.sources:
                others = await opened.enter_async_context(
                    open_sources(self.sources, service.mailbox.name, service.stopping, frame)
                )
            yield _LateApp(partial(self._open_app, service, samples, opened, others, frame))

    async def _open_app(
        self,
        service: Service,
        samples: Samples,
        opened: AsyncExitStack,
        others: "Sequence[Instance]",
        frame: Frame,
    ) -> Any:
        app = await self.opener.open(service, samples, opened, frame)
        from postroom.adapters.console.instances import Instance, join

        siblings = others[0].siblings if others else {}
        own = Instance(service.mailbox.name, "", app.state.console.sessions, siblings)
        own.open(app, None if frame.code is None else frame.code.token)
        return join([own, *others], frame.settings, service.metrics, **frame.options)


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
