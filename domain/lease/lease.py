"""The lease of a mailbox: the right of a runner to own it for a time (RFC-049 Admin Plane Lease Management).

A lease expires by the uptime of admins, never by its recorded times, which are for people (ADR 0058).
"""

from typing import TypeVar

import msgspec

from postroom.domain.arguments import check_int
from postroom.domain.errors import InvalidRequest, LeaseHeld, LeaseLost
from postroom.domain.lease.partitions import partition_of
from postroom.domain.message import MAX_EPOCH
from postroom.domain.names import check_address, check_mailbox, check_member, check_uuid, lease_stream
from postroom.domain.policy import DAY_MS, SECOND_MS
from postroom.domain.record import Event

MAX_LEASE_MS = DAY_MS
MIN_GRACE_FRACTION = 20
"""The grace period is at least this fraction of the TTL: clock rates may differ by less than that."""
MIN_HEARTBEATS = 2
"""Heartbeats per TTL, so that one may fail."""


class LeasePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations of the leases of a namespace, in ms.

    Arguments:
        ttl_ms: how long a lease lasts after its acquisition or last renewal; whole seconds, as on the wire.
        heartbeat_interval_ms: pause between renewals.
        grace_period_ms: how long after the TTL the holder may still renew, and nobody else may acquire.
    """

    ttl_ms: int = 300_000
    heartbeat_interval_ms: int = 60_000
    grace_period_ms: int = 60_000

    def validate(self) -> "LeasePolicy":
        """Return this policy, whose durations fit each other.

        Raises: InvalidRequest naming the duration that is out of bounds.
        """
        check_int("ttl_ms", self.ttl_ms, SECOND_MS, MAX_LEASE_MS)
        check_int("heartbeat_interval_ms", self.heartbeat_interval_ms, 1, MAX_LEASE_MS)
        check_int("grace_period_ms", self.grace_period_ms, 1, MAX_LEASE_MS)
        if self.ttl_ms % SECOND_MS:
            raise InvalidRequest(f"ttl_ms must be a multiple of {SECOND_MS}; it was {self.ttl_ms}.")
        if MIN_HEARTBEATS * self.heartbeat_interval_ms > self.ttl_ms:
            raise InvalidRequest(
                f"heartbeat_interval_ms must be at most half of ttl_ms, {self.ttl_ms // MIN_HEARTBEATS}, "
                f"so that one heartbeat may fail; it was {self.heartbeat_interval_ms}."
            )
        if MIN_GRACE_FRACTION * self.grace_period_ms < self.ttl_ms:
            minimum = -(-self.ttl_ms // MIN_GRACE_FRACTION)
            raise InvalidRequest(
                f"grace_period_ms must be at least a twentieth of ttl_ms, {minimum}, "
                f"to allow for clocks of different rates; it was {self.grace_period_ms}."
            )
        return self


MAX_LOG_EPOCH = MAX_EPOCH // 2
"""Greatest epoch of a log that a runner may name; each later acquisition adds one."""

T = TypeVar("T", bound="LeaseEvent")


class LeaseEvent(Event, frozen=True, gc=False):
    """Base class of the events of a lease; each contains all that a fold needs, so older ones can be removed.

    Arguments:
        address: gRPC address of the runner, `host:port` or `unix:/path`.
        partition: 0 to 255, of the mailbox.
        acquisition: UUID of the attempt that acquired the lease.
        ttl_ms, grace_ms: time to live and grace period.
        created_at: when the mailbox was leased for the first time, µs since 1970 UTC.
        acquired_at, renewed_at: when this lease was acquired and last renewed, the same.
    """

    mailbox: str
    runner: str
    proxy: str
    address: str
    partition: int
    epoch: int
    acquisition: str
    ttl_ms: int
    grace_ms: int
    created_at: int
    acquired_at: int
    renewed_at: int


class LeaseAcquired(LeaseEvent, frozen=True, gc=False):
    """A runner acquired the lease, with an epoch above all earlier ones."""


class LeaseRenewed(LeaseEvent, frozen=True, gc=False):
    """The runner has the lease for another TTL."""


class LeaseReleased(LeaseEvent, frozen=True, gc=False):
    """The runner gave the lease up; others may acquire it at once."""


class LeaseExpired(LeaseEvent, frozen=True, gc=False):
    """The runner did not renew the lease within its TTL and grace period."""


LeaseChange = LeaseAcquired | LeaseRenewed | LeaseReleased | LeaseExpired


class Lease(msgspec.Struct, frozen=True):
    """State of the lease of a mailbox: the fold of its events; see `LeaseEvent` for most fields.

    Arguments:
        is_held: whether the runner has it; otherwise it was released or has expired.
        version: number of its last event.
    """

    mailbox: str
    runner: str
    proxy: str
    address: str
    partition: int
    epoch: int
    acquisition: str
    ttl_ms: int
    grace_ms: int
    is_held: bool
    version: int
    created_at: int
    acquired_at: int
    renewed_at: int


class AcquireLease(msgspec.Struct, frozen=True):
    """Command of a runner that wants to own a mailbox; repeating an acquisition keeps its epoch.

    Arguments:
        address: gRPC address of the runner, `host:port` or `unix:/path`.
        acquisition: UUID of this attempt.
        log_epoch: epoch of the last record of the mailbox's log; 0 for an empty log.
        ttl_ms, grace_ms: time to live and grace period.
    """

    mailbox: str
    runner: str
    proxy: str
    address: str
    acquisition: str
    log_epoch: int
    ttl_ms: int
    grace_ms: int


class RenewLease(msgspec.Struct, frozen=True):
    """Command of the runner that has the lease; `epoch` must be the lease's, unless it is None."""

    mailbox: str
    runner: str
    epoch: int | None = None


class ReleaseLease(msgspec.Struct, frozen=True):
    """Command that ends a lease; `epoch` must be the lease's, unless it is None."""

    mailbox: str
    runner: str
    epoch: int | None = None


class ExpireLease(msgspec.Struct, frozen=True):
    """Command of an admin that saw no newer event than `version` for the TTL and the grace period."""

    mailbox: str
    version: int


LeaseCommand = AcquireLease | RenewLease | ReleaseLease | ExpireLease


def decide(
    command: LeaseCommand, lease: Lease | None, now: int, *, is_expired: bool = False
) -> list[LeaseChange]:
    """Return the events that a command causes; none if it changes nothing.

    Arguments:
        lease: current state; None before the first acquisition.
        now: µs since 1970 UTC, recorded for people.
        is_expired: whether this admin saw no event newer than `lease` for its TTL and grace period.

    Raises:
        InvalidRequest: an argument is malformed.
        LeaseHeld: another runner has the lease that the command would acquire.
        LeaseLost: the runner does not have the lease that the command would renew or release.
    """
    _check(command)
    match command:
        case AcquireLease():
            return _acquire(command, lease, now, is_expired=is_expired)
        case RenewLease():
            return [_renew(command, lease, now, is_expired=is_expired)]
        case ReleaseLease():
            return _release(command, lease, now)
        case ExpireLease():
            if lease is None or not lease.is_held or lease.version != command.version:
                return []
            return [_next(LeaseExpired, lease, now)]


def evolve(lease: Lease | None, event: LeaseChange) -> Lease:
    """Return the lease after one more event; a fold may start at any event."""
    return Lease(
        event.mailbox,
        event.runner,
        event.proxy,
        event.address,
        event.partition,
        event.epoch,
        event.acquisition,
        event.ttl_ms,
        event.grace_ms,
        isinstance(event, LeaseAcquired | LeaseRenewed),
        event.version,
        event.created_at,
        event.acquired_at,
        event.renewed_at,
    )


def check_event(event: LeaseChange) -> None:
    """Check an event that was read from a store.

    Raises: InvalidRequest for one that `decide` can't have returned.
    """
    check_mailbox(event.mailbox)
    _check_holder(event)
    if event.stream != lease_stream(event.mailbox) or event.partition != partition_of(event.mailbox):
        raise InvalidRequest(f"The event is not of mailbox {event.mailbox}, which it names.")
    check_int("version", event.version, 1)
    check_int("epoch", event.epoch, 1)
    for name in ("at", "created_at", "acquired_at", "renewed_at"):
        check_int(name, getattr(event, name))


def _check_holder(holder: AcquireLease | LeaseChange) -> None:
    check_member("The runner id", holder.runner)
    check_member("The proxy id", holder.proxy)
    check_address("The address of the runner", holder.address)
    check_uuid("The acquisition", holder.acquisition)
    check_int("ttl_ms", holder.ttl_ms, 1, MAX_LEASE_MS)
    check_int("grace_ms", holder.grace_ms, 0, MAX_LEASE_MS)


def _check(command: LeaseCommand) -> None:
    check_mailbox(command.mailbox)
    match command:
        case AcquireLease():
            _check_holder(command)
            check_int("log_epoch", command.log_epoch, 0, MAX_LOG_EPOCH)
        case RenewLease() | ReleaseLease():
            check_member("The runner id", command.runner)
            if command.epoch is not None:
                check_int("epoch", command.epoch)
        case ExpireLease():
            check_int("version", command.version)


def _acquire(command: AcquireLease, lease: Lease | None, now: int, *, is_expired: bool) -> list[LeaseChange]:
    if lease is None:
        return [_acquired(command, None, now)]
    if lease.runner == command.runner and lease.acquisition == command.acquisition:
        if not lease.is_held:  # a request that was delayed must not bring a released lease back
            raise LeaseLost(lease.mailbox, "the lease of this acquisition has ended")
        # The holder counts its TTL from this repetition, so admins must see a new version.
        return [_next(LeaseRenewed, lease, now)]
    if not lease.is_held or lease.runner == command.runner:
        return [_acquired(command, lease, now)]
    if is_expired:
        expired = _next(LeaseExpired, lease, now)
        return [expired, _acquired(command, evolve(lease, expired), now)]
    raise LeaseHeld(lease.mailbox, lease.runner)


def _renew(command: RenewLease, lease: Lease | None, now: int, *, is_expired: bool) -> LeaseRenewed:
    lease = _lease_of(command, lease)
    if not lease.is_held:
        raise LeaseLost(command.mailbox, "it was released or has expired")
    if is_expired:
        raise LeaseLost(command.mailbox, "it expired beyond its grace period")
    return _next(LeaseRenewed, lease, now)


def _release(command: ReleaseLease, lease: Lease | None, now: int) -> list[LeaseChange]:
    lease = _lease_of(command, lease)
    return [_next(LeaseReleased, lease, now)] if lease.is_held else []


def _lease_of(command: RenewLease | ReleaseLease, lease: Lease | None) -> Lease:
    """Return the lease; raise LeaseLost unless the runner held it last, in the epoch of the command."""
    if lease is None:
        raise LeaseLost(command.mailbox, "there is no lease")
    if lease.runner != command.runner:
        state = "is owned" if lease.is_held else "was last owned"
        raise LeaseLost(command.mailbox, f"it {state} by {lease.runner}")
    if command.epoch is not None and command.epoch != lease.epoch:
        raise LeaseLost(
            command.mailbox, f"{lease.runner} acquired it again as epoch {lease.epoch}, not {command.epoch}"
        )
    return lease


def _acquired(command: AcquireLease, lease: Lease | None, now: int) -> LeaseAcquired:
    epoch = max(0 if lease is None else lease.epoch, command.log_epoch) + 1
    return LeaseAcquired(
        lease_stream(command.mailbox),
        1 if lease is None else lease.version + 1,
        now,
        command.mailbox,
        command.runner,
        command.proxy,
        command.address,
        partition_of(command.mailbox),
        epoch,
        command.acquisition,
        command.ttl_ms,
        command.grace_ms,
        now if lease is None else lease.created_at,
        now,
        now,
    )


def _next(cls: type[T], lease: Lease, now: int) -> T:
    return cls(
        lease_stream(lease.mailbox),
        lease.version + 1,
        now,
        lease.mailbox,
        lease.runner,
        lease.proxy,
        lease.address,
        lease.partition,
        lease.epoch,
        lease.acquisition,
        lease.ttl_ms,
        lease.grace_ms,
        lease.created_at,
        lease.acquired_at,
        now if cls is LeaseRenewed else lease.renewed_at,
    )
