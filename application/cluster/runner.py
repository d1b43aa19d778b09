"""A runner: it owns mailboxes by leases of the control plane, and serves them (RFC-049)."""

import asyncio
import random
from collections.abc import Sequence

from postroom.application.background import cancel_and_wait, wait_at_most
from postroom.application.cluster.lease_metrics import LeaseMetrics
from postroom.application.cluster.leased_mailbox import (
    CANCEL_SECONDS,
    CLOSE_SECONDS,
    RELEASE_SECONDS,
    REQUEST_SECONDS,
    LeasedMailbox,
    RunnerIdentity,
)
from postroom.application.metrics import Metric
from postroom.application.ports.clock import Clock
from postroom.application.ports.control_plane import LeaseAdmin
from postroom.application.ports.mailbox_host import MailboxHost
from postroom.application.telemetry import logger, summarize
from postroom.domain.errors import PostroomError

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.25, 5.0
"""Pauses between attempts to register; they double."""
STOP_SECONDS = CLOSE_SECONDS + CANCEL_SECONDS + RELEASE_SECONDS + 0.1
LEAVE_SECONDS = 0.4


class Runner:
    """Owner of the mailboxes whose leases the control plane grants to it.

    Arguments:
        mailboxes: those that it always tries to own; besides, it owns those that the control plane offers.
    """

    def __init__(
        self,
        identity: RunnerIdentity,
        mailboxes: Sequence[str],
        admin: LeaseAdmin,
        host: MailboxHost,
        clock: Clock,
    ) -> None:
        self._identity = identity
        self._configured = tuple(dict.fromkeys(mailboxes))
        self._admin = admin
        self._host = host
        self._clock = clock
        self._metrics = LeaseMetrics()
        self._stopping = asyncio.Event()
        self._leased: dict[str, LeasedMailbox] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_registered = False

    @property
    def held(self) -> list[str]:
        """Return the mailboxes whose leases it has, sorted."""
        return sorted(name for name, leased in self._leased.items() if leased.is_held)

    @property
    def served(self) -> list[str]:
        """Return the mailboxes that it serves, sorted."""
        return sorted(name for name, leased in self._leased.items() if leased.is_served)

    def stop(self) -> None:
        """Make `run` close all mailboxes, release their leases and return within 5 s."""
        self._stopping.set()

    async def run(self) -> None:
        """Own and serve mailboxes until stopped (RFC-049 Startup, Graceful Shutdown).

        When it is cancelled, leases are left to expire.
        """
        registering = asyncio.create_task(self._stay_registered())
        try:
            for mailbox in self._configured:
                self._start(mailbox)
            await self._stopping.wait()
            if self._tasks:
                await asyncio.wait(self._tasks.values(), timeout=STOP_SECONDS)
        finally:
            await cancel_and_wait(registering, *self._tasks.values(), seconds=CANCEL_SECONDS)
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._admin.leave(runner=self._identity.runner)
        except (PostroomError, TimeoutError) as error:
            logger().debug("runner.not_left", error=summarize(error))

    def collect(self) -> list[Metric]:
        """Return the metrics of the leases."""
        remaining = {
            name: seconds
            for name, leased in self._leased.items()
            if leased.is_held and (seconds := leased.remaining_seconds) is not None
        }
        return self._metrics.collect(remaining)

    def find_missing(self) -> list[str]:
        """Return its problems: an unavailable control plane, and mailboxes whose leases were not renewed."""
        missing = [] if self._is_registered else ["control_plane"]
        return missing + [f"lease:{name}" for name in self.held if name not in self.served]

    async def _stay_registered(self) -> None:
        """Register at the interval that the control plane asks for, and take its offers."""
        failures = 0
        while True:
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    registration = await self._admin.register_runner(*self._identity, self.held)
            except Exception as error:  # even a defect must not end the registration
                if not failures:
                    logger().warning("runner.not_registered", error=summarize(error))
                failures += 1
                self._is_registered = False
                ceiling = min(MAX_PAUSE_SECONDS, MIN_PAUSE_SECONDS * 2 ** min(failures, 10))
                pause = ceiling * random.uniform(0.5, 1)
            else:
                failures, self._is_registered = 0, True
                pause = registration.interval_ms / 1_000
                for mailbox in registration.offers:
                    self._start(mailbox, is_offered=True)
            await wait_at_most(pause, self._stopping.wait())
            if self._stopping.is_set():
                return

    def _start(self, mailbox: str, *, is_offered: bool = False) -> None:
        if mailbox in self._tasks or self._stopping.is_set():
            return
        leased = LeasedMailbox(
            mailbox,
            self._identity,
            self._admin,
            self._host,
            self._clock,
            self._metrics,
            self._stopping,
            is_offered=is_offered,
        )
        self._leased[mailbox] = leased
        task = self._tasks[mailbox] = asyncio.create_task(leased.run(), name=f"mailbox {mailbox}")
        task.add_done_callback(lambda _: self._end(mailbox))

    def _end(self, mailbox: str) -> None:
        task = self._tasks.pop(mailbox)
        del self._leased[mailbox]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger().error("runner.failed", mailbox=mailbox, error=summarize(error))
