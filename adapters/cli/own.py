"""Processes that own mailboxes for others: of a namespace, one for each of its mailboxes (ADR 0137)."""

import asyncio
import os
import random
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

from typer import Option

from postroom.adapters.cli.running import BACKOFF, running
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import DONE, TRY_AGAIN, WrongUsage
from postroom.adapters.compose.store_namespace import create_namespace, own_for_others
from postroom.application.telemetry import logger
from postroom.application.text import pluralize
from postroom.application.threads import background_task, cancel_and_wait, new_event_loop, wait_at_most
from postroom.domain.names import is_mailbox
from postroom.domain.policy import SECOND_MS, backoff_ms

STOP_SECONDS = 10.0
"""Time after which the command kills an owner that it told to stop."""
STEADY_SECONDS = 10.0
"""The command restarts an owner that ran for this long without a backoff."""
OWNED = b"owned\n"
"""Line that the process of a member writes when it becomes the owner."""
SERVICE_MANAGER = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
"""Variables for the service manager, which the processes of members do not get."""


def own(
    session: Session,
    owners: Annotated[
        int | None,
        Option("--owners", metavar="COUNT", min=1, help="Mailboxes of a new namespace, each with a process."),
    ] = None,
    member: Annotated[
        str | None, Option("--member", hidden=True, help="Mailbox of the namespace that this process owns.")
    ] = None,
) -> int:
    """Own a mailbox for the processes that use it, or each mailbox of a namespace in a process of its own.

    A name without @ is a namespace: --mailbox orders --owners 4 creates it, and programs connect to orders.
    These processes replace one that already owns a mailbox, which then calls the new owner. The command
    restarts an owner that ends; meanwhile a process that uses its mailbox owns it.
    """
    name = member or session.mailbox
    if not is_mailbox(name):
        return _run(_own_namespace(session, name, owners))
    if owners is not None and member is None:
        namespace = name.partition("@")[0]
        raise WrongUsage(
            f"--owners is for a namespace, and {name} is one mailbox; name it with --mailbox {namespace}."
        )
    return _run(_own_mailbox(session, name, is_member=member is not None))


def _run(main: Coroutine[Any, Any, int]) -> int:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


async def _own_mailbox(session: Session, name: str, *, is_member: bool) -> int:
    """Own one mailbox until stopped; a member also stops when the process that started it ends."""
    stop = asyncio.Event()

    def report() -> None:
        if is_member:
            sys.stdout.buffer.write(OWNED)
            sys.stdout.buffer.flush()
        else:
            session.out.note(f"Owning {name} of {session.shown_store}.")

    owning = asyncio.create_task(
        own_for_others(
            session.writable_store(),
            name,
            session.owner_settings(),
            report,
            lambda owner: owner.startswith(f"postroom {session.command},"),
        )
    )
    stopped = asyncio.create_task(stop.wait())
    async with running(session, stop.set), background_task(_stop_with_parent(stop, is_member=is_member)):
        try:
            await asyncio.wait([owning, stopped], return_when=asyncio.FIRST_COMPLETED)
            if owning.done():
                await owning
        finally:
            await cancel_and_wait(owning, stopped)
    return DONE


async def _stop_with_parent(stop: asyncio.Event, *, is_member: bool) -> None:
    """Stop a member when its parent, or the kernel after a kill, closes its standard input."""
    if not is_member:
        return
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    stop.set()


async def _own_namespace(session: Session, namespace: str, owners: int | None) -> int:
    store, stop = session.writable_store(), asyncio.Event()
    names = await create_namespace(store, namespace, owners, session.owner_settings())
    members = [_Member(name) for name in names]
    async with running(session, stop.set):
        keeping = [asyncio.create_task(each.keep(stop)) for each in members]
        ready = asyncio.create_task(_wait_for_all(members))
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([*keeping, ready, stopped], return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                session.out.result(
                    {"namespace": namespace, "mailboxes": names},
                    f"Owning {pluralize(len(names), 'mailbox', 'mailboxes')} of namespace {namespace} in "
                    f"{session.shown_store}, each in a process of its own.",
                )
                session.out.flush()
                await asyncio.wait([*keeping, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.set()
            await cancel_and_wait(ready, stopped)
            codes = await asyncio.gather(*keeping)
    return max(codes)


async def _wait_for_all(members: "list[_Member]") -> None:
    await asyncio.gather(*(each.is_owned.wait() for each in members))


class _Member:
    """The process that owns one mailbox of a namespace, and its successors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_owned = asyncio.Event()

    async def keep(self, stop: asyncio.Event) -> int:
        """Run the process until stopped, restarting it unless it fails for good; return an exit code."""
        loop, failures = asyncio.get_running_loop(), 0
        while not stop.is_set():
            started = loop.time()
            process = await self._start()
            with _task(self._read(process)), _task(process.wait()) as ended, _task(stop.wait()) as stopped:
                await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set():
                    await _end(process)
                    return DONE
            code = process.returncode or DONE
            if code not in (DONE, TRY_AGAIN) and code > 0:
                return code  # the process has reported the reason
            failures = 0 if loop.time() - started > STEADY_SECONDS else failures + 1
            pause_ms = backoff_ms(BACKOFF, failures, random.random()) if failures else 0
            logger().warning("own.process_ended", mailbox=self._name, code=code, pause_ms=pause_ms)
            await wait_at_most(pause_ms / SECOND_MS, stop.wait())
        return DONE

    async def _start(self) -> Process:
        environment = {name: value for name, value in os.environ.items() if name not in SERVICE_MANAGER}
        command = [sys.executable, *sys.orig_argv[1:], "--member", self._name]
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment)

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None, "it is a pipe"
        while line := await process.stdout.readline():
            if line == OWNED:
                self.is_owned.set()


@contextmanager
def _task(work: Coroutine[Any, Any, Any]) -> Iterator["asyncio.Task[Any]"]:
    """Run a task that is cancelled at the end of the context."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()


async def _end(process: Process) -> None:
    """Tell a process to stop by closing its standard input, and kill it if it does not."""
    assert process.stdin is not None, "it is a pipe"
    process.stdin.close()
    await wait_at_most(STOP_SECONDS, process.wait())
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
