"""`postroom up` and `init`: everything of a mailbox in one process, and the files of a new project."""

import asyncio
import os
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from logging import ERROR
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from postroom.adapters.cli.console import open_own_access
from postroom.adapters.cli.instances import instance_sources
from postroom.adapters.cli.mailbox import Apply, use_applied
from postroom.adapters.cli.running import BACKOFF, mailbox_settings, monitoring, opened, running
from postroom.adapters.cli.serve import (
    DEFAULT_HTTP,
    ServeSettings,
    cache_ttl_ms,
    find_failed_work,
    find_keys,
    local_access,
)
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings
from postroom.adapters.cli.values import DONE, MetricsPort, WrongUsage, parse_duration
from postroom.adapters.cli.views import ViewsThread
from postroom.adapters.cli.work import load_worker, read_schedules
from postroom.adapters.compose.console import ConsoleSettings, PartState, console_mount, new_code
from postroom.adapters.compose.mcp import McpSettings, mcp_mounts
from postroom.adapters.compose.serve import HttpSettings, open_http_surface, serve_mailbox
from postroom.application.extras import MissingExtra, explain_missing_extra
from postroom.application.messages import rfc3339
from postroom.application.metrics import Metric, Monitor, is_answering, label
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import background_task, cancel_and_wait
from postroom.domain.policy import SECOND_MS, backoff_ms

if TYPE_CHECKING:
    from postroom.application.workers.worker import Worker

STEADY_SECONDS = 60.0
"""A part that ran for this long before it failed restarts after the shortest pause."""
WORKER_THREAD = "postroom-worker-"
WATCH_MS = 200
"""Time after which a watch of files that has ended is noticed."""
STOP_SECONDS = 5.0
"""Time for parts to end, in addition to the time for running handlers."""


class Part:
    """Part of the process that starts again, with a backoff, when it fails.

    Arguments:
        name: shown to people, such as `worker shop.tasks:worker`.
        run: runs it until it is stopped.
        stop: makes `run` return.
    """

    def __init__(self, name: str, run: Callable[[], Awaitable[object]], stop: Callable[[], None]) -> None:
        self.state = PartState(name, is_running=False)
        self._run = run
        self._stop_run = stop
        self._stop = asyncio.Event()

    async def supervise(self) -> None:
        """Run the part until it is stopped.

        Raises: MissingExtra when a package is not installed, which no other start would change.
        """
        in_a_row = 0
        while not self._stop.is_set():
            start, self.state = time.monotonic(), self.state._replace(is_running=True)
            reason = "It ended."
            try:
                with explain_missing_extra():
                    await self._run()
            except MissingExtra:
                raise
            except Exception as error:  # user code may raise anything
                reason = summarize(error)
            self.state = self.state._replace(is_running=False)
            if self._stop.is_set():
                return
            self.state = self.state._replace(
                failures=self.state.failures + 1,
                error=reason,
                failed_at=rfc3339(time.time_ns() // 1_000) or "",
            )
            in_a_row = 1 if time.monotonic() - start > STEADY_SECONDS else in_a_row + 1
            pause_ms = backoff_ms(BACKOFF, in_a_row, random.random())
            logger().retry("part.failed", ERROR, part=self.state.name, error=reason, pause_ms=pause_ms)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_ms / SECOND_MS)

    def stop(self) -> None:
        """Make `supervise` return when the part has ended."""
        self._stop.set()
        self._stop_run()


def part_metrics(parts: Sequence[PartState]) -> list[Metric]:
    """Return the metrics of the parts of a process."""
    return [
        Metric(
            "postroom_part_running",
            "gauge",
            "Whether a part of `postroom up` runs; 0 while it waits to start again.",
            [({"part": each.name}, int(each.is_running)) for each in parts],
        ),
        Metric(
            "postroom_part_failures",
            "counter",
            "Failures of a part of `postroom up`.",
            [({"part": each.name}, each.failures) for each in parts],
        ),
    ]


class WorkerThread:
    """A worker on an event loop in a thread of its own, so that its handlers delay neither owner nor console.

    Arguments:
        stop_ms: time for running handlers after `stop`.
    """

    def __init__(self, session: Session, worker: "Worker", stop_ms: int) -> None:
        self._session = session
        self._worker = worker
        self._stop_ms = stop_ms
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopped = False

    async def run(self) -> None:
        """Run the worker until it is stopped, or fails."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        failure: BaseException | None = None

        def run() -> None:
            nonlocal failure
            try:
                asyncio.run(self._handle())
            except BaseException as error:  # `run` raises it
                failure = error
            finally:
                self._loop = None
                with suppress(RuntimeError):  # closed, if the process did not wait for handlers
                    loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=run, name=f"{WORKER_THREAD}{self._worker.name}", daemon=True).start()
        await ended.wait()
        if isinstance(failure, Exception):
            raise failure
        if failure is not None:
            raise RuntimeError(summarize(failure)) from failure

    def stop(self) -> None:
        """Receive no more messages, and end when the handlers have returned; call it from any thread."""
        self._is_stopped = True
        if (loop := self._loop) is not None:
            with suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(self._worker.stop)

    async def _handle(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with self._session.use(gives_settings=False) as mailbox:
            if not self._is_stopped:
                await self._worker.run(mailbox, stop_ms=self._stop_ms)


class CodeWatch:
    """Watch of the Python files of the working directory, from its creation on."""

    def __init__(self) -> None:
        with explain_missing_extra("up"):
            from watchfiles import PythonFilter, watch
        self._stop = threading.Event()
        self._changes = watch(
            ".",
            watch_filter=PythonFilter(),
            stop_event=self._stop,
            rust_timeout=WATCH_MS,
            yield_on_timeout=True,
        )
        next(self._changes)  # the watch is set up before the first result, which may be empty

    def wait(self) -> bool:
        """Return True when a file changes, or False after `stop`."""
        return any(self._changes)

    def stop(self) -> None:
        """End the watch; call it from any thread."""
        self._stop.set()


def up(
    session: Session,
    apps: Annotated[
        list[str] | None, Argument(metavar="[MODULE:NAME]...", help="Workers, such as shop.tasks:worker.")
    ] = None,
    http: Annotated[
        str, Option(metavar="ADDRESS", help="Address of the console and the HTTP API: host:port.")
    ] = DEFAULT_HTTP,
    views: Annotated[
        bool, Option("--views", help="Also keep the read models of search and activity up to date.")
    ] = False,
    reload: Annotated[
        bool, Option("--reload", help="Start again when a Python file of the working directory changes.")
    ] = False,
    stop_within: Annotated[
        str, Option("--stop-within", metavar="DURATION", help="Time for running handlers after SIGTERM.")
    ] = "10s",
    metrics_port: MetricsPort = None,
    apply: Apply = False,
) -> None:
    """Run everything of a mailbox in one process, from owner and workers to console, until interrupted.

    Prints what runs, and a link to the console that works once, within ten minutes. A part that fails starts
    again with a backoff. Each worker has a thread of its own; --http should be an address of this machine.
    """
    run_parts(
        session,
        lambda: {app: load_worker(session, app) for app in apps or ()},
        http=http,
        views=views,
        reload=reload,
        stop_ms=parse_duration(stop_within),
        metrics_port=metrics_port,
        apply=apply,
    )


def run_parts(
    session: Session,
    load_workers: "Callable[[], dict[str, Worker]]",
    *,
    http: str,
    views: bool,
    reload: bool,
    stop_ms: int,
    metrics_port: int | None,
    apply: bool,
) -> None:
    """Run the parts of `up` until interrupted.

    Arguments:
        load_workers: returns the workers by the name of each; raises WrongUsage if its code can't be used.
    """
    session.check_one_mailbox()
    if not http or http.startswith("unix:"):
        raise InvalidSettings("--http must be a host:port of this machine that a browser can open.")
    with explain_missing_extra("up"):
        import uvloop
    watch = CodeWatch() if reload else None
    try:
        workers = load_workers()
        _check_workers(workers)
    except WrongUsage as error:
        if watch is None:
            raise
        session.out.error({"code": error.code, "message": f"{error} Waiting for a change of the code."})
        is_changed = watch.wait()
    else:
        is_changed = uvloop.run(
            _up(session, http, stop_ms, workers, metrics_port, watch, apply=apply, views=views)
        )
    session.out.flush()
    if is_changed:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if any(each.name.startswith(WORKER_THREAD) for each in threading.enumerate()):
        os._exit(DONE)  # handlers that ignore their cancellation


def _check_workers(workers: "dict[str, Worker]") -> None:
    """Raise WrongUsage for workers that can't run."""
    names: dict[int, str] = {}
    for app, worker in workers.items():
        if not worker.topics:
            raise WrongUsage(f"{app} has no handlers; register one with `consumer`.")
        if (other := names.setdefault(id(worker), app)) != app:
            raise WrongUsage(f"{app} and {other} are the same worker; name it once.")


async def _up(
    session: Session,
    http: str,
    stop_ms: int,
    workers: "dict[str, Worker]",
    metrics_port: int | None,
    watch: CodeWatch | None,
    *,
    apply: bool,
    views: bool,
) -> bool:
    """Run the parts until interrupted; return whether code changed."""
    stop, changed = asyncio.Event(), asyncio.Event()
    console = session.settings.section("console", ConsoleSettings).validate()
    relay = None
    if session.settings.sections.get("outbox") and not session.settings.sections.get("capture"):
        from postroom.adapters.cli.outbox import ConfiguredRelay

        relay = ConfiguredRelay(session)
    parts: list[Part] = []

    def states() -> list[PartState]:
        return [each.state for each in parts]

    outboxes = session.outbox_databases().counter()

    async def measure() -> list[Metric]:
        of_workers = {app: worker.collect_metrics() for app, worker in workers.items()}
        of_relay = () if relay is None else await relay.measure()
        return [*await mailbox.measure(), *label("worker", of_workers), *of_relay, *part_metrics(states())]

    async def find_missing() -> list[str]:
        missing = [each.name for each in states() if not each.is_running]
        missing += [] if relay is None else await relay.find_missing()
        return missing if await is_answering(mailbox) else ["mailbox", *missing]

    async def watch_code(watch: CodeWatch) -> None:
        if await asyncio.to_thread(watch.wait):
            changed.set()
            stop.set()

    async with (
        opened(lambda: use_applied(session, apply=apply)) as mailbox,
        local_access(session, admits_tokens=True) as (access, token),
    ):
        for app, worker in workers.items():
            thread = WorkerThread(session, worker, stop_ms)
            parts.append(Part(f"worker {app}", thread.run, thread.stop))
        if schedules := read_schedules(session):
            from postroom.adapters.compose.schedule import make_scheduler

            scheduler = make_scheduler(mailbox, schedules)
            parts.append(Part("schedules", scheduler.run, scheduler.stop))
        if relay is not None:
            parts.append(Part("relay", relay.run, relay.stop))
        if views:
            follower = ViewsThread(session)
            parts.append(Part("views", follower.run, follower.stop))
        code = new_code(token)
        find = partial(find_failed_work, session)
        sources = instance_sources(
            session, console.instances, open_own_access, find_failed_work, read_only=console.read_only
        )
        mount = console_mount(
            session.store, console, code=code, parts=states, find_failed_work=find, instances=sources
        )
        agents = mcp_mounts(
            session.store,
            session.settings.section("mcp", McpSettings),
            console,
            find_keys(session),
            is_served=session.settings.section("serve", ServeSettings).mcp,
        )
        surface = open_http_surface(http, HttpSettings(), None, mount, *agents)
        serving = serve_mailbox(
            session.store,
            mailbox,
            [surface],
            access=access,
            measure=measure,
            outboxes=outboxes,
            cap_cache_ttl_ms=cache_ttl_ms(session),
        )
        async with serving as (address,):
            with monitoring(session, metrics_port, Monitor(measure, find_missing)):
                tasks = [asyncio.create_task(each.supervise()) for each in parts]
                for task in tasks:
                    task.add_done_callback(lambda _: stop.set())  # before that, only a missing extra
                names = [*(each.name for each in states()), "console"]
                link = f"{address}{console.prefix}/start?code={code.text}"
                async with AsyncExitStack() as watching:
                    if watch is not None:
                        watching.callback(watch.stop)
                        await watching.enter_async_context(background_task(watch_code(watch)))
                    async with running(session, stop.set, [mailbox_settings(session, mailbox)]):
                        session.out.result(
                            {"mailbox": mailbox.name, "parts": names, "link": link},
                            f"{mailbox.name} of {session.shown_store} runs: {', '.join(names)}.",
                        )
                        session.out.note(f"Console: {link}")
                        session.out.flush()
                        await stop.wait()
                session.out.note("Code changed; starting again." if changed.is_set() else "Stopping.")
                for each in parts:
                    each.stop()
                if tasks:
                    await asyncio.wait(tasks, timeout=stop_ms / SECOND_MS + STOP_SECONDS)
                await cancel_and_wait(*tasks, seconds=STOP_SECONDS)
                for task in tasks:
                    if task.done() and not task.cancelled():
                        task.result()
    return changed.is_set()
