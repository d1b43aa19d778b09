"""`postroom work` and `postroom schedule`: processes that handle messages and send periodic ones."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.logs import log_application
from postroom.adapters.cli.mailbox import Apply, use_applied
from postroom.adapters.cli.remote import use_mailbox
from postroom.adapters.cli.running import mailbox_settings, monitoring, opened, running
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings
from postroom.adapters.cli.values import (
    DONE,
    MetricsPort,
    Process,
    WrongUsage,
    end_soon,
    format_duration,
    parse_duration,
)
from postroom.application.metrics import mailbox_monitor
from postroom.application.text import pluralize
from postroom.application.threads import cancel_and_wait

T = TypeVar("T")


if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from postroom.application.metrics import Metric
    from postroom.application.operations.mailbox import Mailbox
    from postroom.application.schedule import Schedule
    from postroom.application.worker_reports import HandlerState
    from postroom.application.workers.worker import Worker


STUCK_SECONDS = 1.0
"""Time for tasks that handlers left behind."""


async def work(
    session: Session,
    app: Annotated[str, Argument(metavar="MODULE:NAME", help="A Worker, such as shop.tasks:worker.")],
    once: Annotated[bool, Option("--once", help="Handle the messages that are ready, then exit.")] = False,
    stop_within: Annotated[
        str,
        Option("--stop-within", metavar="DURATION", help="Time for running handlers after SIGTERM."),
    ] = "10s",
    metrics_port: MetricsPort = None,
    apply: Apply = False,
) -> None:
    """Handle messages with the functions of a Worker, until interrupted.

    On SIGTERM or Ctrl-C no more messages are received, and running handlers may finish.
    """
    worker = load_worker(session, app)
    await run_worker(
        session,
        worker,
        lambda: use_applied(session, apply=apply),
        once=once,
        stop_ms=parse_duration(stop_within),
        metrics_port=metrics_port,
    )


async def run_worker(
    session: Session,
    worker: "Worker",
    open_: "Callable[[], AbstractAsyncContextManager[Mailbox]]",
    *,
    once: bool,
    stop_ms: int,
    metrics_port: int | None,
) -> None:
    """Run a worker until interrupted, and print what it did.

    Arguments:
        open_: opens the mailbox; called again while it is unavailable, except with `once`.
        once, stop_ms: see `Worker.run`.
    """
    async with opened(open_, is_patient=not once) as mailbox:
        monitor = mailbox_monitor(mailbox, _collect(session, mailbox, worker.collect_metrics))
        reloads = [] if session.is_remote else [mailbox_settings(session, mailbox)]
        with monitoring(session, metrics_port, monitor):
            async with running(session, worker.stop, reloads):
                if not once:
                    session.out.note(f"Handling messages of {mailbox.name} in {session.shown_store}.")
                counts = await worker.run(mailbox, once=once, stop_ms=stop_ms)
    session.out.result(counts, f"{counts.handled:,} handled, {counts.failed:,} failed")
    end_soon(DONE)  # asyncio.run waits for the threads of `asyncio.to_thread`, too
    stuck = asyncio.all_tasks() - {asyncio.current_task()}
    if await cancel_and_wait(*stuck, seconds=STUCK_SECONDS):  # handlers that ignore their cancellation
        session.out.flush()
        os._exit(DONE)  # asyncio.run would wait for them


def load_worker(session: Session, app: str) -> "Worker":
    """Import a worker by `module:name`, and log the lines that its application writes."""
    from postroom.application.workers.worker import Worker

    module = app.partition(":")[0]
    log_application(module, session.settings.log_level)
    worker = load_object(app, Worker)
    log_application(module, session.settings.log_level)  # its import may have configured logging
    return worker


async def schedule(session: Session, metrics_port: MetricsPort = None) -> None:
    """Manage the schedules of a mailbox; without a command, send messages at the times of the settings file.

    The owner of a mailbox sends the messages of its schedules, without another process. This command sends
    the messages of [schedules.NAME] in the settings file until interrupted, each once, however many processes
    run it; it skips times at which no process runs.
    """
    schedules = read_schedules(session)
    if not schedules:
        raise WrongUsage(
            "No schedules are configured; add [schedules.NAME] with cron and topic to postroom.toml."
        )
    from postroom.adapters.compose.schedule import make_scheduler

    async with opened(lambda: session.use(create=True)) as mailbox:
        scheduler = make_scheduler(mailbox, schedules)
        monitor = mailbox_monitor(mailbox, _collect(session, mailbox, scheduler.collect_metrics))
        with monitoring(session, metrics_port, monitor):
            async with running(session, scheduler.stop, [mailbox_settings(session, mailbox)]):
                session.out.note(f"Sending {pluralize(len(schedules), 'schedule')} to {session.mailbox}.")
                await scheduler.run()
    session.out.result({"sent": scheduler.sent}, f"{pluralize(scheduler.sent, 'message')} sent")


def read_schedules(session: Session) -> "list[Schedule]":
    """Return the schedules of the settings file."""
    from postroom.adapters.compose.schedule import ScheduleSettings, make_schedules

    file = session.settings.file or "postroom.toml"
    schedules = {}
    for name, values in session.settings.sections.get("schedules", {}).items():
        try:
            schedules[name] = msgspec.convert(values, ScheduleSettings)
        except msgspec.ValidationError as error:
            raise InvalidSettings(f"[schedules.{name}] in {file}: {error}.") from None
    return make_schedules(schedules)


def _collect(
    session: Session, mailbox: "Mailbox", collect: "Callable[[], list[Metric]]"
) -> "Callable[[], Coroutine[Any, Any, list[Metric]]]":
    """Return a function that adds the metrics of outboxes, and of the mailbox if this process owns it."""
    measure_owned = getattr(mailbox, "measure_owned", None)
    if measure_owned is None:  # a server has metrics of its own

        async def collect_own() -> "list[Metric]":
            return collect()

        return collect_own
    outboxes = session.outbox_databases().counter()

    async def collect_all() -> "list[Metric]":
        return [*await measure_owned(), *await outboxes.measure(), *collect()]

    return collect_all


async def list_workers(session: Session) -> None:
    """List the running workers: version, handlers, how busy they are, and how long they have been silent."""
    async with use_mailbox(session) as postroom:  # only the owner knows the workers
        name, workers = postroom.name, await postroom.list_workers()
    if session.out.as_json:
        session.out.json({"mailbox": name, "workers": workers})
        return
    session.out.table(
        ("worker", "process", "version", "topic", "handler", "in use", "handled", "failed", "reported"),
        [
            (
                each.name,
                f"{each.host}:{each.process}",
                each.version or f"postroom {each.postroom_version}",
                *_handler_cells(handler),
                f"{format_duration(each.silent_ms)} ago{' (stale)' if each.is_stale else ''}",
            )
            for each in workers
            for handler in (*each.handlers,) or (None,)
        ],
    )


def _handler_cells(handler: "HandlerState | None") -> "tuple[str | int | None, ...]":
    if handler is None:
        return (None,) * 5
    in_use = f"{handler.in_use} of {handler.concurrency}"
    return handler.topic, handler.handler, in_use, handler.handled, handler.failed


def _place_of(error: BaseException) -> str:
    """Return file and line of the user's code that raised, if any, as the end of a sentence."""
    if isinstance(error, SyntaxError):  # its text already has both
        return ""
    others = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]), "<frozen")
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in places if not file.startswith(others)]
    return f" ({Path(own[-1][0]).name}, line {own[-1][1]})" if own else ""


def load_object(text: str, kind: type[T]) -> T:
    """Import an object by `module:name`; the working directory comes first, as with `python -m`.

    Raises: WrongUsage when it can't be imported or is of another type.
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise WrongUsage(
            f"{text!r} does not name an object of type {kind.__name__}; write MODULE:NAME, such as "
            "shop.tasks:worker."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    Process.has_user_code = True
    try:
        value = import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the module may raise anything; a Rust extension may panic
        from postroom.application.telemetry import summarize

        said = summarize(error).rstrip(".") + _place_of(error)
        places = vars(sys.modules[module]) if module in sys.modules else {}
        names = [f"{module}:{each}" for each, value in places.items() if isinstance(value, kind)]
        advice = f" It has {', '.join(names)}." if names else ""
        raise WrongUsage(f"{text} can't be imported: {said}.{advice}") from error
    if not isinstance(value, kind):
        raise WrongUsage(f"{text} is of type {type(value).__name__}, not {kind.__name__}.")
    return value
