"""Mailboxes in memory for the tests of applications, under a clock that the tests move."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from postroom.adapters.compose import OwnedMailbox, make_settings
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.threads import background_task
from postroom.domain.arguments import check_type
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.commands import MailboxMode, Sweep
from postroom.domain.names import DEFAULT_MAILBOX, check_mailbox
from postroom.domain.policy import MailboxLimits, TopicPolicy

_START = datetime(2030, 1, 1, tzinfo=UTC)
_SECOND_US = 1_000_000
_MAX_SECONDS = 100 * 366 * 86_400


class ManualClock:
    """A clock that stands still until a test moves it; it begins on 1 January 2030."""

    def __init__(self) -> None:
        self._elapsed_us = 0
        self._engines: list[MailboxEngine] = []

    def wall(self) -> int:
        """Return the time, µs since 1970 UTC."""
        return int(_START.timestamp()) * _SECOND_US + self._elapsed_us

    def uptime(self) -> int:
        """Return µs since the machine's start."""
        return 60 * _SECOND_US + self._elapsed_us

    def boot(self) -> str:
        """Return the id of the machine's start."""
        return "test"

    async def advance(self, seconds: float) -> None:
        """Move the clock, and return when its mailboxes have delivered, timed out and expired what was due.

        Raises: InvalidRequest for anything but a number up to 100 years, and for a negative one, as log time
            never goes back.
        """
        if type(seconds) is not int:
            check_type("seconds", seconds, float)
        if seconds < 0:
            raise InvalidRequest(f"A clock can't be moved back; seconds was {seconds}.")
        if not seconds <= _MAX_SECONDS:  # nan is not
            raise InvalidRequest(f"seconds must be at most {_MAX_SECONDS:,} (100 years); it was {seconds}.")
        self._elapsed_us += round(seconds * _SECOND_US)
        for engine in self._engines:
            while (await engine.submit([Sweep()]))[0]:
                pass


class MemoryMailbox(OwnedMailbox):
    """A mailbox in memory; see `Mailbox`."""

    def __init__(self, engine: MailboxEngine, clock: ManualClock) -> None:
        super().__init__(engine, clock)
        self.clock = clock


@asynccontextmanager
async def open_memory_mailbox(
    name: str = DEFAULT_MAILBOX,
    *,
    clock: ManualClock | None = None,
    mode: MailboxMode | None = None,
    limits: MailboxLimits | None = None,
    default_policy: TopicPolicy | None = None,
) -> AsyncIterator[MemoryMailbox]:
    """Open an empty mailbox whose timers run by a clock that the test moves.

    Delays, visibility timeouts, backoffs, expiry and retention follow `mailbox.clock`; `wait_ms` of a receive
    and the rate of a redrive job are real time.

    Arguments:
        clock: shared by several mailboxes; None creates one.
        mode, limits, default_policy: see `open_mailbox`.
    """
    clock = clock or ManualClock()
    engine = MailboxEngine(MemoryEventLog(check_mailbox(name)), clock)
    await engine.open("test", mode, make_settings(limits, default_policy))
    clock._engines.append(engine)
    mailbox = MemoryMailbox(engine, clock)
    try:
        async with background_task(mailbox.redrives.worker.run()):
            yield mailbox
    finally:
        clock._engines.remove(engine)
        await engine.close()
