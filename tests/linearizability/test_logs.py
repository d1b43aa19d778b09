"""Owners that race for a mailbox's log: nothing of an older epoch follows what a later one wrote."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.ports.event_log import EventLog
from postroom.domain.commit import Commit
from postroom.domain.errors import DuplicateRecord, Fenced, PostroomError, WrongPosition
from tests.linearizability.checker import NotLinearizable, check_each
from tests.linearizability.history import Recorder, read_histories
from tests.linearizability.models import REFUSED, log_model
from tests.support.clocks import ManualClock
from tests.support.messages import MAILBOX, message

OpenLog = Callable[[], EventLog]

EPOCHS = 8
SENDS = 6


class UnfencedLog(MemoryEventLog):
    """A log that takes commits of any owner: the defect that fencing is there to prevent."""

    def append(self, commits: Sequence[Commit]) -> None:
        for commit in commits:
            end = self._commits[-1].last if self._commits else 0
            with suppress(DuplicateRecord):
                super().append([commit._replace(first=end + 1, last=end + commit.event_count)])


async def own(open_log: OpenLog, epoch: int, recorder: Recorder, seed: int) -> None:
    """Open a mailbox with an epoch, and send messages until another owner has it."""
    random = Random(f"{seed} {epoch}")
    await asyncio.sleep(random.random() * 0.02)
    log = open_log()
    engine = MailboxEngine(log, ManualClock())
    call = recorder.call(MAILBOX, "open", [epoch])
    try:
        await engine.open(f"owner {epoch}", epoch=epoch)
    except (Fenced, WrongPosition):
        recorder.answer(call, REFUSED)
        log.close()
        return
    recorder.answer(call, True)
    mailbox = OwnedMailbox(engine, ManualClock())
    try:
        for number in range(SENDS):
            await asyncio.sleep(random.random() * 0.01)
            call = recorder.call(MAILBOX, "append", [epoch])
            try:
                await mailbox.send_message(message(b"%d of %d" % (number, epoch)))
            except (Fenced, WrongPosition):
                recorder.answer(call, REFUSED)
                return
            recorder.answer(call, True)
    finally:
        with suppress(PostroomError):
            await engine.close()
        log.close()


def race(folder: Path, open_log: OpenLog, seed: int = 0) -> int:
    """Have owners race for a log, and check their history; return the number of operations."""

    async def run(recorders: list[Recorder]) -> None:
        await asyncio.gather(*(own(open_log, epoch, each, seed) for epoch, each in enumerate(recorders, 1)))

    folder.mkdir(exist_ok=True)
    with ExitStack() as opened:
        asyncio.run(
            run(
                [
                    opened.enter_context(Recorder(folder / f"{epoch}.journal", f"owner {epoch}"))
                    for epoch in range(1, EPOCHS + 1)
                ]
            )
        )
    return check_each(log_model, read_histories(folder.glob("*.journal")))


def test_a_log_in_memory_takes_nothing_of_an_older_epoch(tmp_path: Path) -> None:
    for seed in range(3):
        assert race(tmp_path / str(seed), partial(_same, MemoryEventLog(MAILBOX)), seed) > EPOCHS


def test_a_log_in_a_file_takes_nothing_of_an_older_epoch(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    SqliteEventLog(store, MAILBOX).close()
    assert race(tmp_path / "journals", lambda: SqliteEventLog(store, MAILBOX, durability="relaxed")) > EPOCHS


def test_a_log_without_fencing_is_found(tmp_path: Path) -> None:
    with pytest.raises(NotLinearizable, match="the log of"):
        race(tmp_path / "journals", partial(_same, UnfencedLog(MAILBOX)))


def _same(log: EventLog) -> EventLog:
    return log
