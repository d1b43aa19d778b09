"""An owner of a mailbox: own it by a lease, notice a newer owner, and bound memory (svc-mailbox I-5, I-9)."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import ClassVar, NamedTuple

from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.segments import ends_with
from postroom.application.ports.event_log import VolatileLog
from postroom.application.ports.lease_store import Ownership
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import wait_at_most
from postroom.domain.errors import Fenced, MailboxOwned, PostroomError, Saturated, Unavailable
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.policy import SATURATED_RETRY_MS

DEFAULT_BYTES = 256 << 20
KEY_BYTES = 400
"""Estimated size of an idempotency key in the replay window."""
COMPACTION_RATIO = 0.75
"""Share of the bound above which settled messages are forgotten."""
INTERVAL_SECONDS = 0.1
MAX_INTERVAL_SECONDS = 300.0
"""Interval at which settled messages are forgotten even if there is room: the default `T_replay`."""
INTERVAL_RATIO = 4
"""A compaction that takes long is followed by a pause of this many times its duration."""
SNAPSHOT_TRIES = 5


class MemoryBound:
    """Bound of a mailbox in memory, at which sends are refused; other operations continue.

    Messages can be received and settled above it, which makes room again.
    """

    def __init__(self, log: VolatileLog) -> None:
        """Take the log; the bound is `max_store_bytes` of the mailbox, or `DEFAULT_BYTES`."""
        self._log = log
        self._appended = 0
        self._pending = 0

    @staticmethod
    def cache_bytes(limit: int | None) -> int:
        """Return how much of the engine's cache of sent messages fits within a bound, in bytes."""
        return (limit or DEFAULT_BYTES) // 32

    def admit(self, mailbox: Mailbox, size: int) -> None:
        """Check that there is room for a message; raise Saturated if not.

        Messages sent earlier in the same group count, although they are appended later.

        Arguments:
            size: of its envelope, bytes.
        """
        if self._appended != self._log.used_bytes:
            self._appended, self._pending = self._log.used_bytes, 0
        limit = _limit(mailbox)
        if self._used_bytes(mailbox) + self._pending + size > limit:
            raise Saturated(
                f"Mailbox {mailbox.name} holds its limit of {limit} bytes in memory; receive and ack "
                "messages, purge a topic, or raise limits.max_store_bytes.",
                SATURATED_RETRY_MS,
            )
        self._pending += size

    async def run(self, engine: MailboxEngine) -> None:
        """Forget settled messages periodically, and when the mailbox nears its limit, until cancelled."""
        now = asyncio.get_running_loop().time
        pause, position, compacted_at = INTERVAL_SECONDS, 0, now()
        while True:
            await asyncio.sleep(pause)
            began = now()
            try:
                mailbox = engine.mailbox
                is_due = began - compacted_at >= MAX_INTERVAL_SECONDS or (
                    self._used_bytes(mailbox) >= COMPACTION_RATIO * _limit(mailbox)
                )
                if is_due and mailbox.position > position:
                    position, compacted_at = mailbox.position, began
                    await self.compact(engine)
            except PostroomError as error:  # the engine loads its state again
                logger().retry("mailbox.compaction_failed", mailbox=self._log.mailbox, error=str(error))
            pause = max(INTERVAL_SECONDS, INTERVAL_RATIO * (now() - began))

    async def compact(self, engine: MailboxEngine) -> int:
        """Forget settled messages and the earlier deliveries of the others; return the number of events.

        The log is compacted only if it has the commit of the snapshot, and no subscription has yet to copy
        messages of it.
        """
        if engine.mailbox.copied_through < engine.mailbox.position:
            return 0
        for _ in range(SNAPSHOT_TRIES):
            # One that needs no earlier part, as those have the ids of messages that settled long ago.
            taken = await engine.take_snapshot(whole=True)
            if ends_with(self._log, taken.position, taken.chain):
                return await engine.writer.compact(self._log, taken.position, taken.unsettled)
        return 0

    def _used_bytes(self, mailbox: Mailbox) -> int:
        keys = sum(len(topic.window) for topic in mailbox.topics.values())
        return self._log.used_bytes + KEY_BYTES * keys


def _limit(mailbox: Mailbox) -> int:
    return mailbox.limits.max_store_bytes or DEFAULT_BYTES


RETRY_SECONDS = 1.0
"""Pause of a worker after a failure."""


class StepWorker(ABC):
    """Worker of an owner that runs in steps until it is cancelled; a failure of one step is logged.

    Arguments:
        failure: name of the log event of a failure.
    """

    failure: ClassVar[str]

    def __init__(self, engine: MailboxEngine) -> None:
        self._engine = engine
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Look for work now, as something has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Run the steps that are due, until cancelled."""
        while True:
            is_changed = self._changed.is_set()
            self._changed.clear()
            try:
                pause = await self._run_once(is_changed=is_changed)
            except Exception as error:
                pause = self._failed(error)
            if pause is None:
                await self._changed.wait()
            elif pause > 0:
                await wait_at_most(pause, self._changed.wait())
            else:
                await asyncio.sleep(0)

    @abstractmethod
    async def _run_once(self, *, is_changed: bool) -> float | None:
        """Run the steps that are due; return the seconds until the next step, or None without any.

        Arguments:
            is_changed: whether `wake` was called since the last call.
        """

    async def _attempt(self, step: Awaitable[float], **names: str) -> float:
        """Return the pause after a step; log its failure with `names`, so that others continue."""
        try:
            return await step
        except Exception as error:
            return self._failed(error, **names)

    def _failed(self, error: Exception, **names: str) -> float:
        """Log the failure that is being handled, and return the pause after it."""
        mailbox = self._engine.name
        if isinstance(error, PostroomError):
            logger().retry(self.failure, mailbox=mailbox, **names, error=str(error))
        else:
            logger().retry_defect(self.failure, mailbox=mailbox, **names, error=summarize(error))
        return RETRY_SECONDS


CHECK_SECONDS = 5.0


async def watch_ownership(engine: MailboxEngine, every_seconds: float = CHECK_SECONDS) -> None:
    """Check the ownership of an open mailbox at intervals until it is lost.

    Of consecutive failures to read the log, only the first is logged.
    """
    mailbox, failing = engine.log.mailbox, False
    while True:
        await asyncio.sleep(every_seconds)
        try:
            await engine.check_ownership()
            failing = False
        except Fenced as error:
            logger().error("mailbox.ownership_lost", mailbox=mailbox, error=str(error))
            return
        except PostroomError as error:
            if not failing:
                logger().warning("mailbox.ownership_unknown", mailbox=mailbox, error=str(error))
            failing = True


RETRY_MS = 1_000


class LeaseTerm(NamedTuple):
    """The term of a lease: its epoch, and whether it lasts."""

    epoch: int
    may_append: Callable[[], bool]


@asynccontextmanager
async def own_by_lease(
    ownership: Ownership, mailbox: str, owner: str, wait_ms: int, term: LeaseTerm
) -> AsyncIterator[None]:
    """Own a mailbox in its store while the context lasts; evict a former owner that does not release it.

    The lease says who owns the mailbox, so a process that still has the store's lock hangs or has no lease.
    The log refuses its appends as soon as this owner has taken the log over (ADR 0042).

    Arguments:
        wait_ms: time for the former owner to release it.

    Raises: Unavailable when the lease has ended, or the store can't be used.
    """
    async with AsyncExitStack() as owned:
        while True:
            incumbent = await ownership.incumbent(mailbox)  # before the wait: a later owner is not evicted
            try:
                await owned.enter_async_context(ownership.acquire(mailbox, owner, wait_ms))
                break
            except MailboxOwned as error:
                if not term.may_append():
                    raise Unavailable(
                        f"The lease of mailbox {mailbox} ended before its former owner was replaced; retry "
                        "shortly.",
                        RETRY_MS,
                    ) from error
                if incumbent is not None:
                    logger().warning("mailbox.owner_evicted", mailbox=mailbox, owner=error.owner)
                    await ownership.evict(mailbox, incumbent)
        yield
