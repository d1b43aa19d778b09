"""Proxies: each registers, and keeps the routes to owners that the control plane reports (RFC-049)."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from secrets import token_urlsafe
from typing import NamedTuple

from postroom.application.cluster.route_queue import PushCounts, RouteQueue
from postroom.application.metrics import Metric, gauge
from postroom.application.ports.control_plane import (
    LeaseAdmin,
    PartitionRange,
    ProxyRegistration,
    RouteChange,
    RoutePush,
)
from postroom.application.telemetry import logger
from postroom.application.threads import wait_at_most
from postroom.domain.errors import InvalidRequest, NotFound, PostroomError, Unavailable
from postroom.domain.lease.routing import Route, RoutingTable
from postroom.domain.message import MS
from postroom.domain.names import check_mailbox

REFRESH_PAUSE_SECONDS = 0.1
"""Least time between two registrations, however many calls find their routes outdated."""
REFRESH_SECONDS = 2.0
"""How long a call waits for a newer routing table."""
LEAVE_SECONDS = 2.0
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.2, 2.0
"""Pauses between registrations while no admin answers."""
MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS = 0.1, 60.0
"""Bounds of the interval that an admin asks for."""
RETRY_MS = 500
"""When to repeat a call to a mailbox that has no owner, or whose owner can't be reached."""
LEASE_QUERIES = 4
"""Number of calls that ask an admin at a time whether a mailbox without a route exists."""


class Proxy:
    """Routing table of a proxy, kept by its registrations with the control plane and by pushes from it.

    While no admin answers, the last table stays in use.

    Arguments:
        proxy: id of the proxy.
        admin: the control plane.
        monotonic: clock in seconds.
    """

    def __init__(self, proxy: str, admin: LeaseAdmin, monotonic: Callable[[], float]) -> None:
        self.id = proxy
        self.partitions: tuple[PartitionRange, ...] = ()
        self._admin = admin
        self._monotonic = monotonic
        self._table = RoutingTable()
        self._requested = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._lease_queries = asyncio.Semaphore(LEASE_QUERIES)
        self.push_key = token_urlsafe(32)
        """Secret that only the admins at which this proxy registers know."""
        self._has_table = False
        self._is_connected = False
        self._failures = 0
        self._registered_at: float | None = None
        self._registrations: Counter[str] = Counter()
        self._pushes: Counter[str] = Counter()

    @property
    def position(self) -> int:
        """Return the position in the log of leases up to which the table is complete."""
        return self._table.position

    @property
    def is_connected(self) -> bool:
        """Return whether an admin answered the last registration."""
        return self._is_connected

    @property
    def is_ready(self) -> bool:
        """Return whether a routing table was received."""
        return self._has_table

    def routes(self, namespace: str | None = None) -> list[Route]:
        """Return the routes by mailbox, of all namespaces or of one.

        Raises: Unavailable before a table was received.
        """
        self._check_table()
        return self._table.routes(namespace)

    def addresses(self) -> set[str]:
        """Return the addresses of all owners."""
        return {each.address for each in self._table.routes()}

    def next_position(self) -> int:
        """Return a position after the positions of all routes."""
        return max((each.position for each in self._table.routes()), default=self.position) + 1

    def update_route(self, route: Route) -> bool:
        """Take a route that an admin pushed, unless the table has a newer one (RFC-049 Proxy Routing Table).

        Returns: whether the table changed.
        """
        return self._count_push(self._table.update(route))

    def remove_route(self, mailbox: str, position: int) -> bool:
        """Remove a route, at the request of an admin, unless the table has a newer one.

        Returns: whether the table changed.
        """
        return self._count_push(self._table.remove(mailbox, position))

    def only_mailbox(self) -> str:
        """Return the mailbox of a call that names none.

        Raises: InvalidRequest unless the table has a single one, Unavailable before a table was received.
        """
        routes = self.routes()
        if len(routes) != 1:
            raise InvalidRequest(
                f"The call names no mailbox, and this proxy has routes to {len(routes)}; name one by the "
                "metadata postroom-mailbox."
            )
        return routes[0].mailbox

    async def find_route(self, mailbox: str) -> Route:
        """Return the route of a mailbox, from the table or from an admin (RFC-049 Query Forwarding).

        Raises: NotFound when there is no such mailbox; Unavailable when it has no owner now, or when no admin
            can say whether it exists; InvalidRequest for a malformed name.
        """
        route = self._table.get(mailbox)
        if route is not None:
            return route
        check_mailbox(mailbox)
        await self.refresh()
        route = self._table.get(mailbox)
        if route is not None:
            return route
        self._check_table()
        async with self._lease_queries:
            leases = await self._admin.list_leases(mailbox)
        if leases:
            raise no_owner(mailbox)
        raise NotFound(f"There is no mailbox {mailbox}; check the name, or start a runner for it.")

    async def find_newer_route(self, stale: Route) -> Route:
        """Return the route of a mailbox after asking an admin, as `stale` did not lead to the owner.

        It may be equal to `stale`.

        Raises: Unavailable when the mailbox has no owner now.
        """
        route = self._table.get(stale.mailbox)
        if route == stale:
            await self.refresh()
            route = self._table.get(stale.mailbox)
        if route is None:
            raise no_owner(stale.mailbox)
        return route

    def request_refresh(self) -> None:
        """Register soon, as the route of some mailbox may be outdated."""
        self._requested.set()

    async def refresh(self) -> None:
        """Wait for a registration that begins now or later, or until no admin answers in time."""
        answered = asyncio.get_running_loop().create_future()
        self._waiting.append(answered)
        self.request_refresh()
        await wait_at_most(REFRESH_SECONDS, answered)

    async def run(self, address: str) -> None:
        """Register at the interval that admins ask for, and when a route is outdated, until cancelled.

        Arguments:
            address: at which admins and other processes reach this proxy.
        """
        while True:
            self._requested.clear()
            waiting, self._waiting = self._waiting, []
            try:
                seconds = await self._register(address)
            finally:
                for answered in waiting:
                    if not answered.done():
                        answered.set_result(None)
            await asyncio.sleep(REFRESH_PAUSE_SECONDS)
            await wait_at_most(seconds - REFRESH_PAUSE_SECONDS, self._requested.wait())

    async def leave(self) -> None:
        """End the registration, if an admin answers in time."""
        with suppress(PostroomError, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._admin.leave(proxy=self.id)

    def measure(self) -> list[Metric]:
        """Return the metrics of the routing table and of the connection to the admins."""
        age = -1.0 if self._registered_at is None else self._monotonic() - self._registered_at
        return [
            gauge("postroom_proxy_routes", "Routes in the routing table.", len(self._table.routes())),
            gauge(
                "postroom_proxy_position",
                "Position in the log of leases up to which the routing table is complete.",
                self.position,
            ),
            gauge(
                "postroom_proxy_route_age_seconds",
                "Time since an admin confirmed the routing table; -1 before it ever did.",
                age,
            ),
            gauge(
                "postroom_proxy_admin_connected",
                "1 if an admin answered the last registration.",
                self._is_connected,
            ),
            Metric(
                "postroom_proxy_registrations",
                "counter",
                "Registrations with the admins by outcome.",
                _samples("outcome", self._registrations),
            ),
            Metric(
                "postroom_proxy_route_updates",
                "counter",
                "Changes of routes that admins pushed; those that are older than the table are ignored.",
                _samples("outcome", self._pushes),
            ),
        ]

    async def _register(self, address: str) -> float:
        """Register with an admin; return the time in seconds until the next registration."""
        pushed = self._table.find_unconfirmed()
        try:
            answer = await self._admin.register_proxy(self.id, address, self._table.position, self.push_key)
            # An admin that answers has read the log to its end, so a later position is of no event.
            if unknown := self._table.discard(pushed, answer.position):
                logger().warning("proxy.unknown_routes", proxy=self.id, mailboxes=unknown)
                self.request_refresh()
            self._apply(answer)
        except PostroomError as error:
            if self._is_connected or not self._failures:
                logger().warning("proxy.registration_failed", proxy=self.id, error=str(error))
            return self._count_failure()
        except Exception:  # a defect must not end the registrations
            logger().retry_defect("proxy.registration_failed", proxy=self.id)
            return self._count_failure()
        if not self._is_connected:
            logger().info("proxy.registered", proxy=self.id, position=self._table.position)
        self._registrations["succeeded"] += 1
        self._is_connected, self._failures = True, 0
        self._registered_at = self._monotonic()
        return min(MAX_INTERVAL_SECONDS, max(MIN_INTERVAL_SECONDS, answer.interval_ms / 1_000))

    def _count_failure(self) -> float:
        """Count a registration that failed; return the time in seconds until the next one."""
        self._registrations["failed"] += 1
        self._is_connected = False
        self._failures += 1
        return min(MAX_RETRY_SECONDS, MIN_RETRY_SECONDS * float(2 ** min(self._failures - 1, 8)))

    def _apply(self, answer: ProxyRegistration) -> None:
        if answer.table is not None:
            self._table.replace_all(answer.table.position, answer.table.routes)
        self.partitions = answer.partitions
        self._has_table = True

    def _check_table(self) -> None:
        if not self._has_table:
            raise Unavailable(
                "No admin has answered this proxy yet, so it knows no mailbox; retry.", RETRY_MS
            )

    def _count_push(self, is_change: bool) -> bool:
        self._pushes["applied" if is_change else "ignored"] += 1
        return is_change


def no_owner(mailbox: str) -> Unavailable:
    """Return the error of a call to a mailbox without an owner."""
    return Unavailable(f"Mailbox {mailbox} has no owner at the moment; nothing was done. Retry.", RETRY_MS)


def _samples(label: str, numbers: Counter[str]) -> list[tuple[dict[str, str], float]]:
    return [({label: name}, number) for name, number in sorted(numbers.items())]


class _RegisteredProxy(NamedTuple):
    queue: RouteQueue
    seen_at: int


class RegisteredProxies:
    """Proxies that registered with an admin: soft state, as a proxy registers again with another admin.

    Arguments:
        ttl_ms: time without a registration after which changes are not pushed to a proxy any more.
        uptime: µs of a monotonic clock.
    """

    def __init__(self, push: RoutePush, counts: PushCounts, ttl_ms: int, uptime: Callable[[], int]) -> None:
        self._push = push
        self._counts = counts
        self._ttl_us = ttl_ms * MS
        self._uptime = uptime
        self._proxies: dict[str, _RegisteredProxy] = {}

    async def register(self, proxy: str, address: str, push_key: str) -> RouteQueue:
        """Note that a proxy is alive, and return the queue of its changes."""
        current = self._proxies.get(proxy)
        if current is not None and current.queue.address == address:
            queue, former = current.queue, None
        else:
            queue = RouteQueue(address, self._push, self._counts, self._uptime)
            former = current
        queue.push_key = push_key
        self._proxies[proxy] = _RegisteredProxy(queue, self._uptime())
        if former is not None:
            await former.queue.close()
        return queue

    async def forget(self, proxy: str) -> None:
        """Push nothing more to a proxy."""
        if (current := self._proxies.pop(proxy, None)) is not None:
            await current.queue.close()

    async def forget_silent(self) -> None:
        """Push nothing more to proxies that did not register again in time."""
        now = self._uptime()
        for proxy in [name for name, each in self._proxies.items() if now - each.seen_at > self._ttl_us]:
            await self.forget(proxy)

    def add_changes(self, changes: Iterable[RouteChange]) -> None:
        """Push changes to all proxies soon."""
        changes = list(changes)
        for each in self._proxies.values():
            each.queue.add(changes)

    def seen_at(self, proxy: str) -> int | None:
        """Return the uptime in µs at which a proxy registered last; None if it did not with this admin."""
        current = self._proxies.get(proxy)
        return None if current is None else current.seen_at

    async def close(self) -> None:
        """Stop pushing."""
        await asyncio.gather(*map(self.forget, list(self._proxies)))
