"""A mailbox of a runner: its lease is acquired and renewed, and it is open while the lease lasts."""

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from postroom.application.cluster.control_plane_metrics import LeaseMetrics
from postroom.application.ports.control_plane import (
    Heartbeat,
    HostedMailbox,
    LeaseAdmin,
    LeaseGrant,
    LeaseRequest,
    MailboxHost,
    MailboxReport,
)
from postroom.application.ports.event_log import Clock
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import cancel_and_wait, wait_at_most
from postroom.domain.errors import LeaseHeld, LeaseLost, NotFound, PostroomError, Unavailable
from postroom.domain.lease.lease import LeasePolicy
from postroom.domain.lease.observation import HeldLease

T = TypeVar("T")

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 2.0
"""Pauses between attempts to acquire a lease; they double."""
EXPIRY_MARGIN_SECONDS = 0.02, 0.1
"""Bounds of the random pause between the expiry of another runner's lease and the attempt to acquire it."""
REQUEST_SECONDS = 5.0
"""Longest time for a request to the control plane, which may ask several admins."""
REQUEST_FRACTION = 1 / 3
"""Longest time for a heartbeat, as a part of the TTL."""
MAX_SLEEP_SECONDS = 1.0
"""Longest sleep between looks at the clock, which goes on while the machine is suspended; sleeps do not."""
CLOSE_SECONDS = 2.5
"""Time for a mailbox to finish its requests when the runner stops."""
CANCEL_SECONDS = 0.3
RELEASE_SECONDS = 1.2
"""Time to release its lease after that: all within 5 s (RFC-049 Graceful Shutdown)."""


class RunnerIdentity(NamedTuple):
    """A runner as the control plane knows it.

    Arguments:
        address: at which it serves gRPC: `host:port`.
    """

    runner: str
    proxy: str
    address: str


class LeasedMailbox:
    """Loop that owns a mailbox whenever its lease is granted (RFC-049 Pattern Runner Lease Protocol).

    Arguments:
        is_offered: the control plane offered the mailbox: it is opened only if its log exists in the store of
            this runner, and left to others once its lease was refused or lost.
        stopping: set when the runner stops.
    """

    def __init__(
        self,
        mailbox: str,
        identity: RunnerIdentity,
        admin: LeaseAdmin,
        host: MailboxHost,
        clock: Clock,
        metrics: LeaseMetrics,
        stopping: asyncio.Event,
        *,
        is_offered: bool = False,
    ) -> None:
        self.mailbox = mailbox
        self._identity = identity
        self._admin = admin
        self._host = host
        self._clock = clock
        self._metrics = metrics
        self._stopping = stopping
        self._is_offered = is_offered
        self._lease: HeldLease | None = None
        self._hosted: HostedMailbox | None = None
        self._ending = asyncio.Event()
        self._acquisition: str | None = None
        self._problem = ""
        self._request_seconds = REQUEST_SECONDS
        self._log_epoch: int | None = None
        self._is_refused = False
        self._expires_at: float | None = None
        """Uptime in s at which the lease of another runner expires, as far as an admin knows."""

    @property
    def is_held(self) -> bool:
        """Return whether the runner has the lease, as far as it knows."""
        return self._lease is not None and not self._lease.is_lost

    @property
    def is_served(self) -> bool:
        """Return whether the mailbox is open, and its lease lasts."""
        return self._hosted is not None and self._may_append(self._lease)

    @property
    def remaining_seconds(self) -> float | None:
        """Return the time until the deadline of the lease; None without a lease."""
        lease = self._lease
        return (lease.deadline - self._clock.uptime()) / 1_000_000 if lease is not None else None

    async def run(self) -> None:
        """Own the mailbox as often as possible until the runner stops; an offered mailbox only once."""
        failures = 0
        while not self._stopping.is_set():
            was_refused = self._is_refused
            was_served = await self._own()
            if self._is_offered:
                return
            if was_served or self._is_refused != was_refused:
                failures = 0
            failures += not was_served
            await wait_at_most(self._pause_seconds(failures), self._stopping.wait())

    def _pause_seconds(self, failures: int) -> float:
        """Return the time until the next attempt, at the latest when the lease of another runner expires.

        Attempts before the expiry are made because the lease may be released. They also learn of renewals:
        after each renewal, an attempt is due before the lease expires, and returns the new expiry.
        """
        ceiling: float = min(MAX_PAUSE_SECONDS, MIN_PAUSE_SECONDS * 2 ** min(failures, 10))
        pause = ceiling * random.uniform(0.5, 1)
        if self._expires_at is None:
            return pause
        remaining = max(0.0, self._expires_at - self._clock.uptime() / 1_000_000)
        return min(pause, remaining + random.uniform(*EXPIRY_MARGIN_SECONDS))

    async def _own(self) -> bool:
        """Acquire the lease and serve the mailbox until it is lost; return whether it was served."""
        lease = await self._until_stopped(self._acquire())
        if lease is None:
            return False
        self._lease = lease
        self._ending = asyncio.Event()
        keeping = asyncio.create_task(self._keep(lease), name=f"lease of {self.mailbox}")
        serving = asyncio.create_task(self._serve(lease), name=f"runner of {self.mailbox}")
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({keeping, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await self._close(serving)
            return serving.done() and not serving.cancelled() and serving.result()
        finally:
            await cancel_and_wait(keeping, stopping, serving, seconds=CANCEL_SECONDS)
            await self._release(lease)
            self._lease = None

    async def _until_stopped(self, acquiring: Awaitable[HeldLease | None]) -> HeldLease | None:
        """Return the result of an acquisition, for which a stopping runner has a little time left."""
        task = asyncio.ensure_future(acquiring)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=RELEASE_SECONDS)
            return task.result() if task.done() else None
        finally:
            await cancel_and_wait(task, stopping)

    # -- the lease ---

    async def _acquire(self) -> HeldLease | None:
        """Return the lease; None if it is not granted now."""
        self._is_refused, self._expires_at = False, None
        try:
            lease = await self._try_acquire()
        except LeaseHeld as error:
            self._is_refused = True
            if error.remaining_ms is not None:
                self._expires_at = self._clock.uptime() / 1_000_000 + error.remaining_ms / 1_000
            self._metrics.acquisitions["held"] += 1
            self._note("lease.held_by_another", error, logger().info)
            return None
        except Exception as error:  # even a defect must not end the loop
            self._log_epoch = None
            self._metrics.acquisitions["failed"] += 1
            self._note("lease.not_acquired", error)
            return None
        self._log_epoch = None
        self._metrics.acquisitions["granted"] += 1
        self._problem = ""
        logger().info("lease.acquired", mailbox=self.mailbox, epoch=lease.epoch)
        return lease

    async def _try_acquire(self) -> HeldLease:
        if self._log_epoch is None:  # while others have the lease, its epoch is at least that of the log
            self._log_epoch = await self._host.log_epoch(self.mailbox)
        log_epoch = self._log_epoch
        if self._is_offered and not log_epoch:
            raise NotFound(
                f"Mailbox {self.mailbox} was offered to this runner, whose store does not have it; give its "
                "runners one store, or list it with --mailbox to create it."
            )
        # The outcome of an earlier attempt may be unknown: repeated with its id, it is granted once.
        acquisition = self._acquisition = self._acquisition or str(uuid.uuid4())
        sent_at = self._clock.uptime()
        try:
            grant = await _within(
                REQUEST_SECONDS,
                self._admin.acquire_lease(
                    LeaseRequest(
                        mailbox=self.mailbox,
                        runner=self._identity.runner,
                        proxy=self._identity.proxy,
                        address=self._identity.address,
                        acquisition=acquisition,
                        log_epoch=log_epoch,
                    )
                ),
            )
        except PostroomError as error:
            if not isinstance(error, Unavailable):
                self._acquisition = None
            raise
        self._acquisition = None
        self._request_seconds = min(REQUEST_SECONDS, grant.ttl_ms / 1_000 * REQUEST_FRACTION)
        self._metrics.acquire_seconds.observe((self._clock.uptime() - sent_at) / 1_000_000)
        return _held_lease(grant, sent_at)

    async def _keep(self, lease: HeldLease) -> None:
        """Renew the lease until that is refused."""
        failures = 0
        while True:
            now = self._clock.uptime()
            while (due := lease.next_heartbeat(now)) > now:
                await asyncio.sleep(min((due - now) / 1_000_000, MAX_SLEEP_SECONDS))
                now = self._clock.uptime()
            report = await self._report()
            sent_at = self._clock.uptime()
            try:
                await _within(self._request_seconds, self._admin.renew_lease(self._heartbeat(lease, report)))
            except LeaseLost as error:
                self._metrics.renewals["refused"] += 1
                lease.refused(error.reason)
                logger().error("lease.lost", mailbox=self.mailbox, epoch=lease.epoch, error=str(error))
                return
            except Exception as error:  # even a defect must not end the heartbeats
                self._metrics.renewals["failed"] += 1
                failures += 1
                lease.failed(self._clock.uptime(), random.random())
                if failures == 1:
                    logger().warning("lease.not_renewed", mailbox=self.mailbox, error=_text(error))
            else:
                failures = 0
                self._metrics.renewals["renewed"] += 1
                lease.renewed(sent_at, lease.epoch)
                self._metrics.heartbeat_seconds.observe((self._clock.uptime() - sent_at) / 1_000_000)

    async def _report(self) -> MailboxReport:
        hosted = self._hosted
        if hosted is None:
            return MailboxReport(status="degraded")
        try:
            return await _within(self._request_seconds / 2, hosted.report())
        except Exception as error:  # a failed report must not cost the lease
            logger().debug("lease.no_report", mailbox=self.mailbox, error=_text(error))
            return MailboxReport(status="degraded")

    def _heartbeat(self, lease: HeldLease, report: MailboxReport) -> Heartbeat:
        return Heartbeat(
            mailbox=self.mailbox,
            runner=self._identity.runner,
            proxy=self._identity.proxy,
            epoch=lease.epoch,
            **report._asdict(),
        )

    async def _release(self, lease: HeldLease) -> None:
        """End appends for good, and release the lease."""
        if lease.is_lost:
            return
        lease.refused("released")
        try:
            await _within(
                RELEASE_SECONDS,
                self._admin.release_lease(self.mailbox, self._identity.runner, lease.epoch),
            )
        except Exception as error:
            logger().warning("lease.not_released", mailbox=self.mailbox, error=_text(error))
        else:
            logger().info("lease.released", mailbox=self.mailbox, epoch=lease.epoch)

    def _may_append(self, lease: HeldLease | None) -> bool:
        return lease is not None and lease.may_append(self._clock.uptime())

    # -- the mailbox ---

    async def _serve(self, lease: HeldLease) -> bool:
        """Open the mailbox and serve it until its end; return whether it was served."""
        was_served = False
        try:
            async with self._host.open(
                self.mailbox, lease.epoch, lambda: self._may_append(lease)
            ) as self._hosted:
                was_served = True
                await _first(self._hosted.wait_until_lost(), self._ending.wait())
        except Exception as error:
            self._note("runner.mailbox_failed", error)
        finally:
            self._hosted = None
        return was_served

    async def _close(self, serving: "asyncio.Task[bool]") -> None:
        """Close the mailbox; when the runner stops, within `CLOSE_SECONDS`."""
        if self._hosted is None:
            serving.cancel()  # it is being opened
        self._ending.set()
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await asyncio.wait({serving}, timeout=CLOSE_SECONDS)
            if not serving.done():
                logger().error("runner.mailbox_not_closed", mailbox=self.mailbox)
                serving.cancel()
        finally:
            await cancel_and_wait(stopping)

    def _note(self, event: str, error: Exception, log: Callable[..., None] | None = None) -> None:
        """Log a problem, unless it is still the same; as a warning, or by `log`."""
        text = _text(error)
        if text != self._problem:
            (log or logger().warning)(event, mailbox=self.mailbox, error=text)
        self._problem = text


def _held_lease(grant: LeaseGrant, sent_at: int) -> HeldLease:
    lease = HeldLease(LeasePolicy(ttl_ms=grant.ttl_ms, heartbeat_interval_ms=grant.heartbeat_interval_ms))
    lease.granted(sent_at, grant.ttl_ms, grant.epoch)
    return lease


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, PostroomError) else summarize(error)


async def _within(seconds: float, work: Awaitable[T]) -> T:
    """Return the result of a request, or raise Unavailable when it does not come in time."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise Unavailable(f"The control plane did not answer within {seconds:g} s.") from None


async def _first(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(*tasks)
