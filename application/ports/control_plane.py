"""Ports: the control plane of runners and proxies, hosts of mailboxes, routes, namespaces (RFC-049)."""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, NamedTuple, Protocol

import msgspec

from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import InvalidRequest
from postroom.domain.lease.routing import Route

Health = Literal["healthy", "degraded"]
LeaseState = Literal["active", "expiring", "released", "expired"]
MemberKind = Literal["proxy", "runner"]


class PartitionRange(NamedTuple):
    """Partitions from `first` to `last`, both included."""

    first: int
    last: int


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A runner's request for the lease of a mailbox.

    Arguments:
        address: at which the runner serves gRPC: `host:port`.
        partition: partition of the mailbox, which must be right; None leaves it to the control plane.
        acquisition: a UUID of this attempt; repeating it is idempotent, and keeps the epoch.
        log_epoch: of the last record of the mailbox's log; the lease's epoch is above it.
        ttl_ms: may shorten the TTL of the namespace, not lengthen it; None takes the namespace's.
    """

    mailbox: str
    runner: str
    proxy: str
    address: str
    acquisition: str
    partition: int | None = None
    log_epoch: int = 0
    ttl_ms: int | None = None


class LeaseGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that was acquired or renewed.

    The holder's deadline is the time before it sent the request, on its own monotonic clock, plus `ttl_ms`.

    Arguments:
        epoch: with which the runner opens the mailbox.
        expires_at: wall clock of the admin, µs since 1970 UTC; for people only.
    """

    epoch: int
    ttl_ms: int
    heartbeat_interval_ms: int
    expires_at: int


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A runner's request to renew a lease, with statistics of the mailbox.

    Arguments:
        epoch: of the lease; None checks the runner only, as RFC-049 does.
    """

    mailbox: str
    runner: str
    proxy: str
    epoch: int | None = None
    events_stored: int = 0
    queries_served: int = 0
    storage_size_bytes: int = 0
    status: Health = "healthy"


class RoutingSnapshot(msgspec.Struct, frozen=True):
    """All routes as of a position of the log of leases."""

    position: int
    routes: tuple[Route, ...]


class ProxyRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a proxy's registration or heartbeat.

    Arguments:
        interval_ms: until it registers again.
        ttl_ms: after which it counts as gone.
        position: of the admin's routing table.
        table: None if the proxy's table has this position already.
    """

    interval_ms: int
    ttl_ms: int
    partitions: tuple[PartitionRange, ...]
    position: int
    table: RoutingSnapshot | None = None


class RunnerRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a runner's registration or heartbeat.

    Arguments:
        interval_ms: until it registers again.
        ttl_ms: after which it counts as gone.
        offers: mailboxes without a lease that it may try to acquire.
    """

    interval_ms: int
    ttl_ms: int
    offers: tuple[str, ...] = ()


class LeaseSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A lease as an admin sees it; times of the wall clock are in µs since 1970 UTC.

    Arguments:
        remaining_ms: until it expires, by the admin's monotonic clock; negative in the grace period, 0 when
            it is not held.
        events_stored: as the other statistics, of the last heartbeat that this admin received.
        health: empty without such a heartbeat.
    """

    mailbox: str
    runner: str
    proxy: str
    address: str
    partition: int
    epoch: int
    status: LeaseState
    ttl_ms: int
    grace_ms: int
    remaining_ms: int
    acquired_at: int
    renewed_at: int
    events_stored: int = 0
    queries_served: int = 0
    storage_size_bytes: int = 0
    health: str = ""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A proxy or runner.

    Arguments:
        proxy: of a runner, the one that it belongs to; of a proxy, its id.
        partitions: of a proxy.
        seen_ms: time since it registered with this admin last; None if it never did.
    """

    id: str
    kind: MemberKind
    proxy: str
    address: str
    partitions: tuple[PartitionRange, ...] = ()
    seen_ms: int | None = None


class LeaseAdmin(Protocol):
    """The control plane, in this process or behind the addresses of admins.

    Every request may be repeated. All raise Unavailable when no admin answers in time or the lease store
    can't be used, InvalidRequest for a malformed argument, and Unauthenticated for a wrong node token.
    """

    async def acquire_lease(self, request: LeaseRequest) -> LeaseGrant:
        """Acquire the lease of a mailbox (RFC-049 Lease Acquisition).

        Raises: LeaseHeld when another runner has it.
        """

    async def renew_lease(self, heartbeat: Heartbeat) -> LeaseGrant:
        """Renew a lease (RFC-049 Heartbeat Processing).

        Raises: LeaseLost when the runner does not have it, or has it with another epoch.
        """

    async def release_lease(self, mailbox: str, runner: str, epoch: int | None = None) -> None:
        """Release a lease, so that another runner may acquire it at once (RFC-049 Release Lease).

        Arguments:
            epoch: of the lease; None checks the runner only, as RFC-049 does.

        Raises: LeaseLost when the runner does not have it, or has it with another epoch.
        """

    async def register_proxy(
        self, proxy: str, address: str, position: int = 0, push_key: str = ""
    ) -> ProxyRegistration:
        """Register a proxy, or tell that it is alive.

        Arguments:
            position: of the proxy's routing table; 0 if it has none.
            push_key: secret with which routes are to be pushed to the proxy.
        """

    async def register_runner(
        self, runner: str, proxy: str, address: str, mailboxes: Sequence[str] = ()
    ) -> RunnerRegistration:
        """Register a runner, or tell that it is alive.

        Arguments:
            mailboxes: mailboxes whose leases it has.
        """

    async def leave(self, *, proxy: str | None = None, runner: str | None = None) -> None:
        """End the registration of a proxy, or of a runner, that shuts down."""

    async def list_leases(self, mailbox: str | None = None) -> list[LeaseSummary]:
        """Return the leases by mailbox, also those that ended.

        Arguments:
            mailbox: only its lease; None for all.
        """

    async def list_routes(self) -> RoutingSnapshot:
        """Return the routing table, by mailbox."""

    async def list_members(self) -> list[Member]:
        """Return the proxies and runners that are alive, by kind and id."""


class MailboxReport(NamedTuple):
    """Statistics of a mailbox in a runner's heartbeat (RFC-049 MailboxHeartbeat)."""

    events_stored: int = 0
    queries_served: int = 0
    storage_size_bytes: int = 0
    status: Health = "healthy"


class HostedMailbox(Protocol):
    """A mailbox that is open and served."""

    async def wait_until_lost(self) -> None:
        """Return when another owner has taken over the mailbox."""

    async def report(self) -> MailboxReport:
        """Return counts since the mailbox was opened, and its health; raise Unavailable without them."""


class MailboxHost(Protocol):
    """The store of a runner, and the server at which its mailboxes are called."""

    async def log_epoch(self, mailbox: str) -> int:
        """Return the epoch of the last record of a mailbox's log; 0 for a mailbox that does not exist.

        Raises: Unavailable when the store can't be read.
        """

    def open(
        self, mailbox: str, epoch: int, may_append: Callable[[], bool]
    ) -> AbstractAsyncContextManager[HostedMailbox]:
        """Open a mailbox and serve it for as long as the context lasts; create it if it does not exist.

        At the end it is served no longer, its pending requests finish, and its log is closed.

        Arguments:
            epoch: of the lease.
            may_append: returns whether the lease lasts; called from any thread.

        Raises: Fenced when the log has this epoch or a later one, Unavailable when the store can't be used or
            the lease has ended, and the other errors of opening a mailbox.
        """


class NamespaceDirectory(Protocol):
    """Finds the mailboxes of one namespace."""

    @property
    def namespace(self) -> str:
        """Return the name of the namespace."""

    async def list_members(self) -> Sequence[str]:
        """Return the names of the mailboxes that have an owner now.

        Raises: Unavailable when nobody can be asked.
        """

    def mailbox(self, name: str) -> Mailbox:
        """Return a mailbox; its calls are repeated for the whole time of a call while it has no owner."""

    def poller(self, name: str) -> Mailbox:
        """Return a mailbox whose calls fail after seconds, so that others need not wait for it."""


_PUSH_KEY = re.compile(r"[A-Za-z0-9_-]{0,64}")


def check_push_key(key: object) -> str:
    """Return the key of a proxy; raise InvalidRequest unless it has up to 64 letters, digits, `_` or `-`."""
    if not isinstance(key, str) or not _PUSH_KEY.fullmatch(key):
        raise InvalidRequest("push_key must have up to 64 letters, digits, _ or -.")
    return key


class RouteChange(NamedTuple):
    """A change of the route of a mailbox.

    Arguments:
        position: of the lease event that made it; proxies ignore a change that is older than their table.
        route: None if the mailbox has none any more.
    """

    mailbox: str
    position: int
    route: Route | None


class RoutePush(Protocol):
    """Calls of the proxies' routing tables."""

    async def push(self, address: str, change: RouteChange, key: str) -> None:
        """Tell the proxy at an address of a change.

        Arguments:
            key: key that the proxy named when it registered, by which it knows its admins.

        Raises: PostroomError, or TimeoutError, when it is unknown whether the proxy has it.
        """

    async def forget(self, address: str) -> None:
        """Close the connection to a proxy that is gone."""
