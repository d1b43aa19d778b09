"""Runners: each registers, owns mailboxes by leases, and serves them (RFC-049)."""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from postroom.application.cluster.control_plane_metrics import LeaseMetrics
from postroom.application.cluster.leased_mailbox import (
    CANCEL_SECONDS,
    CLOSE_SECONDS,
    RELEASE_SECONDS,
    REQUEST_SECONDS,
    LeasedMailbox,
    RunnerIdentity,
)
from postroom.application.metrics import Metric
from postroom.application.ports.control_plane import LeaseAdmin, MailboxHost
from postroom.application.ports.event_log import Clock
from postroom.application.service import Service
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import cancel_and_wait, wait_at_most
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable, WrongOwner

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


MAX_RUNNERS = 10_000
MAX_OFFERS = 100
"""Mailboxes that are offered in one answer; the next answers offer the others."""


class RegisteredRunner(msgspec.Struct):
    """A runner that is alive.

    Arguments:
        mailboxes: mailboxes whose leases it has, as it says.
        seen_at: uptime in µs at which it registered last.
    """

    runner: str
    proxy: str
    address: str
    mailboxes: frozenset[str]
    seen_at: int


class _Offer(msgspec.Struct):
    runner: str
    until: int
    declined: set[str]
    is_made: bool = False


class Runners:
    """Runners that registered with an admin: soft state, as they register again with another admin.

    Arguments:
        ttl_ms: after which a runner counts as gone.
        offer_ms: how long a mailbox that was offered to one runner is offered to no other.
    """

    def __init__(self, ttl_ms: int, offer_ms: int) -> None:
        self._ttl_us = ttl_ms * 1_000
        self._offer_us = offer_ms * 1_000
        self._runners: dict[str, RegisteredRunner] = {}
        self._offers: dict[str, _Offer] = {}

    def register(self, runner: RegisteredRunner) -> bool:
        """Note that a runner is alive; return False if there are too many of them."""
        if runner.runner not in self._runners and len(self._runners) >= MAX_RUNNERS:
            self.alive(runner.seen_at)
            if len(self._runners) >= MAX_RUNNERS:
                return False
        self._runners[runner.runner] = runner
        return True

    def leave(self, runner: str) -> None:
        """Forget a runner that shuts down."""
        self._runners.pop(runner, None)

    def alive(self, now: int) -> list[RegisteredRunner]:
        """Return the runners that are alive by id, and forget the others; `now` is uptime in µs."""
        for each in [each for each in self._runners.values() if now - each.seen_at > self._ttl_us]:
            del self._runners[each.runner]
        return sorted(self._runners.values(), key=lambda each: each.runner)

    def offer(self, runner: str, orphans: Mapping[str, str | None], now: int) -> list[str]:
        """Return the mailboxes to offer to a runner, each to one runner at a time.

        A mailbox is offered to the runner with the fewest mailboxes among those of its proxy. If the proxy
        has no live runner, it is offered to any other, as a mailbox without an owner delivers nothing.

        Arguments:
            orphans: the mailboxes without a lease, with the proxy that each belongs to.
            now: uptime in µs.
        """
        alive = self.alive(now)
        for mailbox in [mailbox for mailbox in self._offers if mailbox not in orphans]:
            del self._offers[mailbox]
        loads = {each.runner: len(each.mailboxes) for each in alive}
        for offer in self._offers.values():
            if offer.runner in loads and offer.until > now:
                loads[offer.runner] += 1
        offers: list[str] = []
        for mailbox, proxy in sorted(orphans.items()):
            if len(offers) == MAX_OFFERS:
                break
            if self._choose(mailbox, proxy, alive, loads, now) == runner:
                offer = self._offers[mailbox]
                if not offer.is_made:  # it counts from when the runner learns of it
                    offer.is_made, offer.until = True, now + self._offer_us
                offers.append(mailbox)
        return offers

    def _choose(
        self,
        mailbox: str,
        proxy: str | None,
        alive: Iterable[RegisteredRunner],
        loads: dict[str, int],
        now: int,
    ) -> str | None:
        """Return the runner that a mailbox is offered to now."""
        offer = self._offers.get(mailbox)
        if offer is not None and offer.until > now and offer.runner in loads:
            return offer.runner
        candidates = {each.runner for each in alive if each.proxy == proxy} or {*loads}
        declined = set() if offer is None else offer.declined | {offer.runner}
        if not candidates - declined:
            declined = set()
        choice = min(candidates - declined, key=lambda each: (loads[each], each), default=None)
        if choice is not None:
            loads[choice] += 1
            self._offers[mailbox] = _Offer(choice, now + self._offer_us, declined)
        return choice


RETRY_MS = 500


class ServedMailboxes:
    """Services of mailboxes by name; `find` is the `FindService` of a server."""

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}

    def __contains__(self, mailbox: str) -> bool:
        return mailbox in self._services

    @property
    def names(self) -> list[str]:
        """Return the names of the mailboxes, sorted."""
        return sorted(self._services)

    def find(self, mailbox: str | None) -> Service:
        """Return the service of a mailbox, or of the only one when no name is given.

        Raises: WrongOwner when it is not served here, InvalidRequest without a name when several are,
            Unavailable when none is.
        """
        if mailbox is not None:
            service = self._services.get(mailbox)
            if service is None:
                raise WrongOwner(mailbox)
            return service
        if len(self._services) > 1:
            raise InvalidRequest(
                "The server serves several mailboxes; name one in the metadata postroom-mailbox."
            )
        for service in self._services.values():
            return service
        raise Unavailable("The server serves no mailbox now; retry shortly.", RETRY_MS)

    def add(self, service: Service) -> Callable[[], None]:
        """Serve a mailbox; return the function that stops it, with its streams and long polls."""
        name = service.mailbox.name
        self._services[name] = service

        def remove() -> None:
            if self._services.get(name) is service:
                del self._services[name]
            service.stopping.set()

        return remove
