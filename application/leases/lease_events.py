"""Aggregates of the log of leases, of the `eventsourcing` library, around the deciders of the domain."""

from datetime import UTC, datetime, timedelta
from typing import Any, cast, get_args
from uuid import UUID

import msgspec
from eventsourcing.domain import Aggregate, DomainEventProtocol
from eventsourcing.persistence import JSONTranscoder, Mapper, StoredEvent
from msgspec.structs import asdict

from postroom.domain.errors import BrokenLog, InvalidRequest
from postroom.domain.lease import lease as lease_domain
from postroom.domain.lease import routing as proxy_domain
from postroom.domain.lease.lease import Lease, LeaseChange, LeaseCommand, LeaseEvent
from postroom.domain.lease.routing import (
    AssignPartitions,
    PartitionAssignment,
    PartitionsAssigned,
    Proxy,
    ProxyChange,
    ProxyCommand,
)
from postroom.domain.record import Event

LeaseLogEvent = LeaseChange | ProxyChange | PartitionsAssigned
"""The events in the log of leases."""
_START = datetime(1970, 1, 1, tzinfo=UTC)
_SCHEMA_VERSION = 1


class AggregateChange(Aggregate.Event):
    """An event of the domain, as the library stores and applies it; a fold may start at any of them."""

    event: LeaseLogEvent

    def mutate(self, aggregate: Any) -> Any:
        """Return the aggregate after this event; one whose older events were removed begins here."""
        if aggregate is None:
            cls = _AGGREGATES[type(self.event)]
            aggregate = cls.before_first_event(self.originator_id, self.originator_version - 1)
        return super().mutate(aggregate)

    def apply(self, aggregate: Any) -> None:
        """Evolve the aggregate's state."""
        aggregate.state = aggregate.evolve(aggregate.state, self.event)


class LeaseLogAggregate(Aggregate):
    """Base class of an aggregate whose state is folded by the domain."""

    state: Any

    @classmethod
    def before_first_event(cls, id_: UUID, version: int = 0) -> Any:
        """Return an aggregate without a state, whose next event follows `version`."""
        aggregate = cls.__new__(cls)
        aggregate.__base_init__(id_, version, _START)
        aggregate.state = None
        return aggregate

    def record(self, events: "list[Any]") -> None:
        """Apply events that the domain decided, to be saved."""
        for event in events:
            self.trigger_event(
                AggregateChange, event=event, timestamp=_START + timedelta(microseconds=event.at)
            )

    @staticmethod
    def evolve(state: Any, event: Any) -> Any:
        """Return the state after an event."""
        raise NotImplementedError


class MailboxLease(LeaseLogAggregate):
    """The lease of a mailbox."""

    state: Lease | None

    def decide(self, command: LeaseCommand, now: int, *, is_expired: bool = False) -> None:
        """Decide a command; see `postroom.domain.lease.lease.decide`."""
        self.record(cast(list[Any], lease_domain.decide(command, self.state, now, is_expired=is_expired)))

    @staticmethod
    def evolve(state: Lease | None, event: LeaseChange) -> Lease:
        """Return the lease after an event."""
        return lease_domain.evolve(state, event)


class ProxyRegistration(LeaseLogAggregate):
    """The registration of a proxy."""

    state: Proxy | None

    def decide(self, command: ProxyCommand, now: int) -> None:
        """Decide a command; see `postroom.domain.lease.routing.decide`."""
        self.record(cast(list[Any], proxy_domain.decide(command, self.state, now)))

    @staticmethod
    def evolve(state: Proxy | None, event: ProxyChange) -> Proxy:
        """Return the registration after an event."""
        return proxy_domain.evolve(state, event)


class ProxyPartitions(LeaseLogAggregate):
    """The one assignment of partitions to proxies."""

    state: PartitionAssignment | None

    def decide(self, command: AssignPartitions, now: int) -> None:
        """Decide a command; see `postroom.domain.lease.routing.decide_assignment`."""
        self.record(proxy_domain.decide_assignment(command, self.state, now))

    @staticmethod
    def evolve(state: PartitionAssignment | None, event: PartitionsAssigned) -> PartitionAssignment:
        """Return the assignment after an event."""
        return proxy_domain.evolve_assignment(state, event)


class LeaseMapper(Mapper[UUID]):
    """Mapper of events to JSON; their topics are the names of their classes with a schema version."""

    def __init__(self) -> None:
        super().__init__(JSONTranscoder())

    def to_stored_event(self, domain_event: DomainEventProtocol[UUID]) -> StoredEvent:
        """Return the stored form of an event."""
        event = cast(AggregateChange, domain_event).event
        fields = asdict(event)
        stream, version = fields.pop("stream"), fields.pop("version")
        topic = f"{type(event).__name__}.{_SCHEMA_VERSION}"
        return StoredEvent(UUID(bytes=stream), version, topic, msgspec.json.encode(fields))

    def to_domain_event(self, stored_event: StoredEvent) -> AggregateChange:
        """Return the event of a stored form.

        Raises: BrokenLog for a type unknown to this version of Postroom, or a state that is malformed.
        """
        event = _decode(stored_event)
        return AggregateChange(  # type: ignore[call-arg] # the library makes a dataclass of it
            originator_id=UUID(bytes=event.stream),
            originator_version=event.version,
            timestamp=_START + timedelta(microseconds=event.at),
            event=event,
        )


def _decode(stored: StoredEvent) -> LeaseLogEvent:
    cls = _TOPICS.get(stored.topic)
    where = f"Aggregate {stored.originator_id} in the log of leases"
    if cls is None:
        raise BrokenLog(
            f"{where} has an event of unknown type {stored.topic[:80]!r} at version "
            f"{stored.originator_version}; read it with the Postroom version that wrote it, or a newer one.",
            stored.originator_version,
        )
    try:
        fields = msgspec.json.decode(stored.state, type=dict[str, Any])
        columns = {"stream": _bytes(stored.originator_id), "version": stored.originator_version}
        event: LeaseLogEvent = msgspec.convert(fields | columns, cls)
        if isinstance(event, LeaseEvent):
            lease_domain.check_event(event)
        else:
            proxy_domain.check_event(event)
        _START + timedelta(microseconds=event.at)
    except (msgspec.MsgspecError, InvalidRequest, ValueError, OverflowError, RecursionError) as error:
        raise BrokenLog(
            f"{where} has an event of type {stored.topic} at version {stored.originator_version} that can't "
            f"be read: {str(error).rstrip('.')}; restore the lease store from a backup.",
            stored.originator_version,
        ) from error
    return event


def _bytes(originator_id: UUID | str) -> bytes:
    return originator_id.bytes if isinstance(originator_id, UUID) else UUID(originator_id).bytes


_AGGREGATES: dict[type[Event], type[LeaseLogAggregate]] = {
    **dict.fromkeys(get_args(LeaseChange), MailboxLease),
    **dict.fromkeys(get_args(ProxyChange), ProxyRegistration),
    PartitionsAssigned: ProxyPartitions,
}
_TOPICS: dict[str, Any] = {f"{cls.__name__}.{_SCHEMA_VERSION}": cls for cls in _AGGREGATES}
