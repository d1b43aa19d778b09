"""Long-running commands: signals, reloads of settings, the service manager, and metrics."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from postroom.adapters.cli.logs import configure_logs
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import Settings
from postroom.adapters.compose.process import ServiceManager
from postroom.application.metrics import Monitor
from postroom.application.operations.mailbox import Mailbox
from postroom.application.queries.preview_settings import check_losses
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import background_task, exempt_heap
from postroom.domain.errors import PostroomError, Unavailable, UnusableServer
from postroom.domain.policy import SECOND_MS, OutageBackoff, backoff_ms
from postroom.domain.settings import changed_settings

if TYPE_CHECKING:
    from postroom.adapters.compose.serve import ServerTls


@contextmanager
def monitoring(session: Session, port: int | None, monitor: Monitor) -> Iterator[None]:
    """Serve the metrics and the health of a command while the context lasts, if a port is given.

    Raises: MissingExtra without `prometheus_client`, Unavailable when the port can't be bound.
    """
    if port is None:
        yield
        return
    from postroom.adapters.compose.process import serve_monitor

    with serve_monitor(monitor, port) as url:
        session.out.note(f"Metrics at {url}/metrics.")
        yield


BACKOFF = OutageBackoff(250, 15_000)
"""Backoff while a server or store that a command uses is unavailable at its start."""
T = TypeVar("T")
MAILBOX_SETTINGS = ("policy", "limits", "topics")
LIVE = ("log_level",)
"""Settings that every long-running command applies at a reload."""


class Reload(NamedTuple):
    """Something that a command reloads at SIGHUP.

    Arguments:
        name: name of the object in the log, such as `TLS certificates`.
        apply: applies the new settings, and reads the files that they name again. Changes nothing and raises
            PostroomError when the settings are invalid.
        settings: names of the settings that it applies, or the sections, such as `topics`; changes of others
            take effect with the next start.
    """

    name: str
    apply: Callable[[Settings], Awaitable[None]]
    settings: tuple[str, ...] = ()


@asynccontextmanager
async def running(
    session: Session, stop: Callable[[], None], reloads: Sequence[Reload] = ()
) -> AsyncIterator[None]:
    """Handle signals, and tell the service manager, while the body of a long-running command runs.

    SIGINT and SIGTERM stop it; SIGHUP reloads settings, and stops it if its terminal was closed.

    Arguments:
        stop: called at each SIGINT and SIGTERM.
    """
    manager, reloader = ServiceManager(), Reloader(session, reloads)
    has_terminal = _has_terminal()

    def end() -> None:
        manager.stopping()
        stop()

    def hang_up() -> None:
        if has_terminal and not _has_terminal():
            end()
        else:
            reloader.request()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup(1) ignores it
        loop.add_signal_handler(signal.SIGHUP, hang_up)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # logs show what handlers print when they print it
    async with background_task(reloader.run(manager)), background_task(manager.watch()):
        try:
            with exempt_heap():
                manager.ready()
                yield
        finally:
            manager.stopping()


@asynccontextmanager
async def opened(
    open_: Callable[[], AbstractAsyncContextManager[T]], *, is_patient: bool = True
) -> AsyncIterator[T]:
    """Open the store and servers that a long-running command uses, and wait while one is unavailable.

    A command that waits is reported to the service manager as ready, as during a later outage.

    Arguments:
        open_: returns a new context for each attempt.
        is_patient: whether to wait; otherwise the first failure is raised.

    Raises: UnusableServer, and every other error that a later attempt would raise as well.
    """
    async with AsyncExitStack() as stack:
        async with AsyncExitStack() as waiting:
            failures = 0
            context: T | None = None
            while context is None:
                try:
                    context = await stack.enter_async_context(open_())
                except Unavailable as error:
                    if not is_patient or isinstance(error, UnusableServer):
                        raise
                    if not failures:
                        manager = ServiceManager()
                        await waiting.enter_async_context(background_task(manager.watch()))
                        manager.ready()
                    failures += 1
                    pause_ms = backoff_ms(BACKOFF, failures, random.random())
                    logger().retry("start.unavailable", error=str(error), pause_ms=pause_ms)
                    await asyncio.sleep(pause_ms / SECOND_MS)
        yield context


def tls_certificates(tls: "ServerTls") -> Reload:
    """Return the reload of a server's certificate, for new connections."""

    async def apply(settings: Settings) -> None:
        await asyncio.to_thread(tls.reload)

    return Reload("TLS certificates", apply)


def mailbox_settings(session: Session, mailbox: Mailbox) -> Reload:
    """Return the reload of the settings of the mailbox; settings removed from the file stay as they are.

    A reload that would lose something changes nothing, as nobody can be asked.
    """
    applied = session.settings.mailbox_settings()

    async def apply(settings: Settings) -> None:
        nonlocal applied
        current = settings.mailbox_settings()
        changes = changed_settings(applied, current)
        check_losses(await mailbox.preview_settings(changes), "A reload")
        await mailbox.set_settings(changes)
        applied = current

    return Reload("mailbox settings", apply, MAILBOX_SETTINGS)


class Reloader:
    """Reloads of a command's settings, one at a time."""

    def __init__(self, session: Session, reloads: Sequence[Reload] = ()) -> None:
        self._session = session
        self._reloads = reloads
        self._requested = asyncio.Event()

    def request(self) -> None:
        """Reload soon; requests during a reload cause one more."""
        self._requested.set()

    async def run(self, manager: ServiceManager) -> None:
        """Reload at every request, until cancelled."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            manager.reloading()
            try:
                await self.reload()
            except PostroomError as error:
                logger().error("settings.reload_failed", error=str(error))
            except Exception as error:  # a defect must not end the command
                logger().error("settings.reload_failed", error=summarize(error))
            manager.ready()

    async def reload(self) -> None:
        """Load the settings again, and apply the changes that a running command can apply.

        Raises: InvalidSettings, before anything is changed, when they are invalid.
        """
        session = self._session
        settings = session.load()
        if _is_complete(session):  # otherwise flags supply what the file lacks
            session.check(settings)
        configure_logs(settings.log_level, session.settings.log_format, is_reload=True)
        logger().forget()
        is_applied = True
        for each in self._reloads:
            try:
                await each.apply(settings)
            except PostroomError as error:
                is_applied = False
                logger().error("settings.reload_failed", what=each.name, error=str(error))
        live = {*LIVE, *(name for each in self._reloads for name in each.settings)}
        changes = _changes(session.loaded, settings)
        if later := [name for name in changes if not live & {name, name.partition(".")[0]}]:
            logger().warning("settings.restart_needed", settings=", ".join(later))
        if is_applied:
            logger().info("settings.reloaded", file=settings.file)


def _is_complete(session: Session) -> bool:
    """Return whether the settings of the start were valid by themselves."""
    try:
        session.check(session.loaded)
    except PostroomError:
        return False
    return True


def _changes(before: Settings, after: Settings) -> list[str]:
    """Return the names of the settings that differ, such as `serve.http`, sorted."""
    old, new = _flatten(before), _flatten(after)
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def _flatten(settings: Settings) -> dict[str, object]:
    values: dict[str, object] = {f"topics.{topic}": policy for topic, policy in settings.topics.items()}
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, msgspec.Struct):
            values |= {f"{name}.{key}": each for key, each in msgspec.structs.asdict(value).items()}
        elif name not in ("topics", "sections", "sources", "file"):
            values[name] = value
    for section, table in settings.sections.items():
        values |= {f"{section}.{key}": each for key, each in table.items()}
    return values


def _has_terminal() -> bool:
    """Return whether standard input is this process's terminal, and still open."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) >= 0
    except (OSError, ValueError, AttributeError):  # stdin may be closed, or None
        return False
