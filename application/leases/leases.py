"""`Leases`: change and read the log of leases (RFC-049 Admin Plane Lease Management, ADR 0058)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from eventsourcing.application import Application
from eventsourcing.persistence import (
    ApplicationRecorder,
    IntegrityError,
    Mapper,
    OperationalError,
    PersistenceError,
)
from eventsourcing.utils import Environment, EnvType

from postroom.application.leases.lease_events import (
    AggregateChange,
    LeaseLogAggregate,
    LeaseLogEvent,
    LeaseMapper,
    MailboxLease,
    ProxyPartitions,
    ProxyRegistration,
)
from postroom.application.ports.lease_store import LeaseRow, LeaseTables
from postroom.domain.errors import Unavailable
from postroom.domain.lease.lease import (
    AcquireLease,
    ExpireLease,
    Lease,
    LeaseAcquired,
    LeaseEvent,
    LeaseExpired,
    LeaseReleased,
    LeaseRenewed,
    ReleaseLease,
    RenewLease,
)
from postroom.domain.lease.routing import (
    AssignPartitions,
    ExpireProxy,
    LeaveProxy,
    PartitionAssignment,
    Proxy,
    RegisterProxy,
)
from postroom.domain.message import MS
from postroom.domain.names import check_mailbox, check_member, lease_stream, partitions_stream, proxy_stream

PAGE = 1_000
CONFLICTS = 20
"""Attempts at a command whose aggregate others change at the same time."""
UNKNOWN_OUTCOMES = 3
"""Attempts at a command if it is unknown whether the store recorded it."""

A = TypeVar("A", bound=LeaseLogAggregate)


class LoggedEvent(msgspec.Struct, frozen=True):
    """An event of the log of leases, and its position there."""

    position: int
    event: LeaseLogEvent


class Leases(Application[UUID]):
    """The leases of mailboxes, the registrations of proxies and their partitions.

    Calls block and may come from any thread. Any number of processes may use one store: if commands race, one
    wins, and the others are decided again. A command whose outcome is unknown is also decided again, on the
    log as it is then: if it was recorded, it now changes nothing or only renews. All methods raise
    Unavailable when the store can't be used, and InvalidRequest for malformed arguments.

    Arguments:
        recorder: of a lease store.
        wall: the wall clock in µs since 1970 UTC, recorded for people.
        is_expired: whether this admin saw no event newer than a lease for its TTL and grace period.
    """

    def __init__(
        self,
        recorder: ApplicationRecorder,
        wall: Callable[[], int],
        is_expired: Callable[[Lease], bool] = lambda lease: False,
    ) -> None:
        self._store_recorder = recorder
        self._wall = wall
        self._is_expired = is_expired
        super().__init__()

    def construct_env(self, name: str, env: EnvType | None = None) -> Environment:
        """Return no settings: the process's environment variables are for other applications."""
        return Environment(name, {})

    def construct_recorder(self) -> ApplicationRecorder:
        """Return the recorder of the lease store."""
        return self._store_recorder

    def construct_mapper(self) -> Mapper[UUID]:
        """Return the mapper of the log's events."""
        return LeaseMapper()

    def acquire(self, command: AcquireLease) -> Lease:
        """Acquire the lease of a mailbox for a runner (RFC-049 Lease Acquisition).

        Raises:
            LeaseHeld: another runner has it.
            LeaseLost: the acquisition was granted before, and its lease has ended.
        """
        return self._change_lease(command)

    def renew(self, command: RenewLease) -> Lease:
        """Renew a lease for another TTL (RFC-049 Heartbeat Processing).

        Raises: LeaseLost when the runner does not have it.
        """
        return self._change_lease(command)

    def release(self, command: ReleaseLease) -> Lease:
        """End a lease, unless it has ended (RFC-049 Shutdown: Release Lease).

        Raises: LeaseLost when another runner has it, or the same one in another epoch.
        """
        return self._change_lease(command)

    def expire(self, command: ExpireLease) -> Lease | None:
        """Expire a lease, unless it was renewed or has ended; return it, or None if it does not exist."""
        state: Lease | None = self._change_any_lease(command)
        return state

    def register_proxy(self, command: RegisterProxy) -> Proxy:
        """Register a proxy, or renew its registration."""
        state: Proxy = self._change_proxy(command)
        return state

    def leave_proxy(self, command: LeaveProxy) -> Proxy | None:
        """End the registration of a proxy, unless it has ended; return it, or None if it does not exist."""
        state: Proxy | None = self._change_proxy(command)
        return state

    def expire_proxy(self, command: ExpireProxy) -> Proxy | None:
        """Let a registration expire, unless it was renewed or has ended; return it, or None."""
        state: Proxy | None = self._change_proxy(command)
        return state

    def assign_partitions(self, command: AssignPartitions) -> PartitionAssignment | None:
        """Assign partitions to proxies, unless an admin that had read more did; return the assignment."""

        def decide(partitions: ProxyPartitions) -> None:
            partitions.decide(command, self._wall())

        state: PartitionAssignment | None = self._change(ProxyPartitions, partitions_stream(), decide)
        return state

    def lease(self, mailbox: str) -> Lease | None:
        """Return the lease of a mailbox as the store has it, or None before the first acquisition."""
        with _persistence_errors():
            state: Lease | None = self._load(MailboxLease, lease_stream(check_mailbox(mailbox))).state
        return state

    def read_events(self, after: int, limit: int = PAGE) -> list[LoggedEvent]:
        """Return up to `limit` events after a position of the log, in order.

        Raises: BrokenLog for an event that can't be read, Unavailable when the log ends before `after`.
        """
        with _persistence_errors():
            page = self.recorder.select_notifications(after, limit, inclusive_of_start=False)
            last = page[-1].id if page else self.recorder.max_notification_id() or 0
        if last < after:
            raise Unavailable(
                f"The log of leases ends at position {last}, though this process has read it up to {after}: "
                "it was restored from a backup, or replaced. Start all admins and then all proxies again."
            )
        return [LoggedEvent(each.id, _event(self.mapper.to_domain_event(each))) for each in page]

    def _change_lease(self, command: AcquireLease | RenewLease | ReleaseLease) -> Lease:
        state: Lease = self._change_any_lease(command)
        return state

    def _change_any_lease(self, command: AcquireLease | RenewLease | ReleaseLease | ExpireLease) -> Any:
        def decide(lease: MailboxLease) -> None:
            is_expired = lease.state is not None and self._is_expired(lease.state)
            lease.decide(command, self._wall(), is_expired=is_expired)

        return self._change(MailboxLease, lease_stream(check_mailbox(command.mailbox)), decide)

    def _change_proxy(self, command: RegisterProxy | LeaveProxy | ExpireProxy) -> Any:
        def decide(proxy: ProxyRegistration) -> None:
            proxy.decide(command, self._wall())

        stream = proxy_stream(check_member("The proxy id", command.proxy))
        return self._change(ProxyRegistration, stream, decide)

    def _change(self, cls: type[A], stream: bytes, decide: Callable[[A], None]) -> Any:
        """Decide on an aggregate and save it; return its state.

        A refusal is true even after an attempt whose outcome is unknown: that attempt names the version that
        it follows, so it can't be recorded after the events on which the refusal rests.
        """
        conflicts = unknown = 0
        while True:
            with _persistence_errors():
                aggregate = self._load(cls, stream)
                decide(aggregate)
                try:
                    self.save(aggregate)
                    return aggregate.state
                except IntegrityError:
                    conflicts += 1
                    if conflicts == CONFLICTS:
                        raise
                except OperationalError:
                    unknown += 1
                    if unknown == UNKNOWN_OUTCOMES:
                        raise

    def _load(self, cls: type[A], stream: bytes) -> A:
        """Return an aggregate from its last event alone, which contains its whole state."""
        id_ = UUID(bytes=stream)
        aggregate: A = cls.before_first_event(id_)
        for event in self.events.get(id_, desc=True, limit=1):
            aggregate = _change_of(event).mutate(None)
        return aggregate


def _event(change: Any) -> LeaseLogEvent:
    return _change_of(change).event


def _change_of(change: Any) -> AggregateChange:
    assert isinstance(change, AggregateChange)
    return change


@contextmanager
def _persistence_errors() -> Iterator[None]:
    try:
        yield
    except PersistenceError as error:
        raise Unavailable(f"The log of leases can't be used: {error}") from error


class LeaseProjection:
    """Keeps `mailbox_leases` and `mailbox_routes` up to date; any number of admins may do so.

    Arguments:
        wall: the wall clock in µs since 1970 UTC, to show a lease as expiring.
    """

    def __init__(self, leases: Leases, tables: LeaseTables, wall: Callable[[], int]) -> None:
        self._leases = leases
        self._tables = tables
        self._wall = wall

    def update(self) -> int:
        """Fold the events that the tables lack; return the position up to which they are folded then.

        Raises: Unavailable when the log or the tables can't be used, BrokenLog for an unreadable event.
        """
        position = self._tables.position()
        if position > (
            self._leases.recorder.max_notification_id() or 0
        ):  # the log was replaced by a shorter one
            self._tables.clear()
            position = 0
        while events := self._leases.read_events(position):
            through = events[-1].position
            is_applied = self._tables.apply(position, through, *fold(events))
            position = through if is_applied else self._tables.position()
            if len(events) < PAGE:
                break
        self._tables.mark_expiring(self._wall() // MS)
        return position


def fold(events: list[LoggedEvent]) -> tuple[list[LeaseRow], list[str]]:
    """Return the rows that events change, and the mailboxes whose leases they release."""
    last: dict[str, LeaseEvent] = {}
    for each in events:
        event = each.event
        if isinstance(event, LeaseAcquired | LeaseRenewed | LeaseReleased | LeaseExpired):
            last[event.mailbox] = event
    removals = [mailbox for mailbox, event in last.items() if isinstance(event, LeaseReleased)]
    rows = [_row(event) for event in last.values() if not isinstance(event, LeaseReleased)]
    return rows, removals


def _row(event: LeaseEvent) -> LeaseRow:
    return LeaseRow(
        event.mailbox,
        event.runner,
        event.proxy,
        event.address,
        event.partition,
        "expired" if isinstance(event, LeaseExpired) else "active",
        event.renewed_at // MS + event.ttl_ms,
        event.renewed_at // MS,
        event.created_at // MS,
        event.acquired_at // MS,
        event.at // MS,
    )
