"""Backups and restores that are interrupted at one step after another, each in a process of its own.

    python -m tests.integration.backup_crash_worker kill|full backup|restore STORE BACKUP

`kill` kills the process before its nth step, `full` lets no file grow beyond n pages. One word a line tells
what the interruption left behind; the last one, `done`, is of the run that was not interrupted.
"""

import asyncio
import os
import resource
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from postroom.adapters.compose.backup import back_up, verify_backup
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.compose.restore import restore
from postroom.domain.errors import NotFound, PostroomError
from tests.support.stores import MAILBOX

PAGES = 5
SAVED = "saved.db"
"""Copy of the store, for the next attempt."""
FAILED = 3


def kill_before_step(number: int) -> None:
    """Kill this process before the nth call that changes files."""
    steps = iter(range(number))

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return run

    for owner, name in (
        (os, "fsync"),
        (os, "rename"),
        (os, "unlink"),
        (os, "mkdir"),
        (shutil, "copyfileobj"),
        (shutil, "rmtree"),
        (sqlite3, "connect"),
    ):
        setattr(owner, name, counting(getattr(owner, name)))


def limit_files(number: int) -> None:
    """Refuse files of more than n times a few pages, as a full disk does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = number * PAGES * 4_096
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def run_back_up(store: str, backup: str) -> None:
    back_up(store, Path(backup))


def run_restore(store: str, backup: str) -> None:
    asyncio.run(restore(Path(backup), store, replace=True, discard_newer=2))


def after_backup(_store: str, backup: str) -> str:
    try:
        verify_backup(Path(backup))
    except NotFound:
        return "absent"
    shutil.rmtree(backup)
    return "whole"


def after_restore(store: str, backup: str) -> str:
    (head,) = verify_backup(Path(backup))[0].mailboxes
    with read_mailbox(store, MAILBOX) as reader:
        verification = reader.verify_log(expected_last=head.position, expected_chain=head.chain)
        is_old = verification.last == head.position + 2
    if is_old:
        return "old"
    shutil.copy(SAVED, store)
    return "new"


ACTIONS = {"backup": (run_back_up, after_backup), "restore": (run_restore, after_restore)}
INTERRUPTIONS = {"kill": kill_before_step, "full": limit_files}


def attempt(interruption: str, action: str, number: int, *arguments: str) -> bool:
    """Run an action in a child process; return whether it was completed."""
    child = os.fork()
    if child == 0:
        INTERRUPTIONS[interruption](number)
        try:
            ACTIONS[action][0](*arguments)
        except PostroomError as error:
            sys.stderr.write(f"{error}\n")
            os._exit(FAILED)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, FAILED, -signal.SIGKILL):
        raise SystemExit(f"{action} ended with {code} at step {number}")
    return code == 0


def main(interruption: str, action: str, *arguments: str) -> None:
    shutil.copy(arguments[0], SAVED)
    for number in range(100):
        if attempt(interruption, action, number, *arguments):
            print("done")
            return
        print(check(ACTIONS[action][1], *arguments), flush=True)


def check(after: Callable[..., str], *arguments: str) -> str:
    """Return what `after` says, in a child process: SQLite's files must not be open at the next fork."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(sending, after(*arguments).encode())
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as outcome:
        text = outcome.read()
    os.waitpid(child, 0)
    return text or "failed"


if __name__ == "__main__":
    main(*sys.argv[1:])
