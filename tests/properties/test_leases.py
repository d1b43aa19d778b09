"""Leases, their times and their partitions, whatever happens."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.errors import Rejected
from postroom.domain.lease.lease import (
    AcquireLease,
    ExpireLease,
    Lease,
    LeaseAcquired,
    LeaseCommand,
    LeasePolicy,
    ReleaseLease,
    RenewLease,
    decide,
    evolve,
)
from postroom.domain.lease.observation import HeldLease, LeaseObservations
from postroom.domain.lease.partitions import NO_PARTITIONS, PARTITIONS, assign_partitions
from postroom.domain.lease.routing import Route, RoutingTable
from postroom.domain.message import MS

MAILBOX = "orders@p"
runners = st.sampled_from(["r1", "r2", "r3"])
epochs = st.none() | st.integers(0, 6)
acquisitions = st.integers(1, 4).map(lambda n: f"018f0000-0000-7000-8000-00000000000{n}")
acquire = st.builds(
    AcquireLease,
    st.just(MAILBOX),
    runners,
    st.just("p"),
    st.just("h:1"),
    acquisitions,
    st.integers(0, 5),
    st.just(1_000),
    st.just(100),
)
commands = st.one_of(
    acquire,
    st.builds(RenewLease, st.just(MAILBOX), runners, epochs),
    st.builds(ReleaseLease, st.just(MAILBOX), runners, epochs),
    st.builds(ExpireLease, st.just(MAILBOX), st.integers(1, 12)),
)


@given(history=st.lists(st.tuples(commands, st.booleans()), max_size=20))
def test_epochs_grow_with_every_acquisition_and_versions_with_every_event(
    history: list[tuple[LeaseCommand, bool]],
) -> None:
    lease: Lease | None = None
    for now, (command, is_expired) in enumerate(history):
        try:
            events = decide(command, lease, now, is_expired=is_expired)
        except Rejected:
            continue
        for event in events:
            before, lease = lease, evolve(lease, event)
            assert lease.version == (before.version if before else 0) + 1
            if isinstance(event, LeaseAcquired):
                assert lease.epoch > (before.epoch if before else 0)
                assert isinstance(command, AcquireLease)
                assert lease.epoch > command.log_epoch
                assert before is None or not before.is_held or before.runner == lease.runner
            else:
                assert before is not None
                assert lease.epoch == before.epoch
                assert before.is_held


@given(
    policy=st.tuples(st.integers(1, 20), st.integers(0, 20)).map(
        lambda n: LeasePolicy(
            ttl_ms=n[0] * 1_000, heartbeat_interval_ms=n[0] * 400, grace_period_ms=n[0] * 50 + n[1]
        ).validate()
    ),
    rate=st.floats(0.96, 1.04),
    offset=st.integers(0, 10**12),
    steps=st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 9_000), st.booleans()), max_size=12),
)
def test_no_admin_lets_a_lease_expire_before_its_holder_stopped(
    policy: LeasePolicy, rate: float, offset: int, steps: list[tuple[int, int, bool]]
) -> None:
    """The admin's clock counts from another moment, at a rate that differs by less than a twentieth."""

    def admin_time(at_ms: int) -> int:
        return offset + int(at_ms * MS * rate)

    holder, admin = HeldLease(policy), LeaseObservations()
    holder.granted(0, policy.ttl_ms, 1)
    sent, version = 0, 1
    admin.observe(MAILBOX, version, admin_time(0))
    for pause, delay, is_lost in steps:
        sent += pause
        arrived = sent + delay
        lease = Lease(
            MAILBOX, "r", "p", "h:1", 0, 1, "", policy.ttl_ms, policy.grace_period_ms, True, version, 0, 0, 0
        )
        if admin.is_expired(lease, admin_time(arrived)):
            assert not holder.may_append(arrived * MS)
            return
        version += 1
        admin.observe(MAILBOX, version, admin_time(arrived))
        if not is_lost:
            holder.renewed(sent * MS)


@given(changes=st.lists(st.frozensets(st.sampled_from("abcdefgh"), max_size=8), max_size=6))
def test_partitions_are_balanced_and_as_few_as_possible_move(changes: list[frozenset[str]]) -> None:
    partitions = NO_PARTITIONS
    for proxies in changes:
        before, partitions = partitions, assign_partitions(partitions, proxies)
        assert partitions == assign_partitions(before, sorted(proxies, reverse=True))
        assert assign_partitions(partitions, proxies) == partitions
        if not proxies:
            assert partitions == NO_PARTITIONS
            continue
        counts = Counter(partitions.owners)
        assert {*partitions.owners} <= proxies
        assert {counts[proxy] for proxy in proxies} <= {
            PARTITIONS // len(proxies),
            -(-PARTITIONS // len(proxies)),
        }
        moves = sum(old != new for old, new in zip(before.owners, partitions.owners, strict=True))
        old = sorted((Counter(before.owners)[proxy] for proxy in proxies), reverse=True)
        share, over = divmod(PARTITIONS, len(proxies))
        stay = sum(min(count, share + (index < over)) for index, count in enumerate(old))
        assert moves == PARTITIONS - stay


positions = st.integers(1, 12)


@given(
    history=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=12),
    order=st.randoms(use_true_random=False),
    whole=st.integers(0, 12),
)
def test_a_table_ends_the_same_in_whatever_order_and_number_updates_arrive(
    history: list[tuple[str, bool]], order: object, whole: int
) -> None:
    def apply(table: RoutingTable, position: int) -> None:
        mailbox, is_held = history[position - 1]
        if is_held:
            table.update(Route(mailbox, "p", f"r{position}", "h:1", 0, position, position))
        else:
            table.remove(mailbox, position)

    expected, part = RoutingTable(), RoutingTable()
    for position in range(1, len(history) + 1):
        apply(expected, position)
        if position <= whole:
            apply(part, position)
            part.complete(position)
    arrivals = [*range(1, len(history) + 1)] * 2 + [0]
    order.shuffle(arrivals)  # type: ignore[attr-defined] # Hypothesis's random numbers
    table = RoutingTable()
    for position in arrivals:
        if position:
            apply(table, position)
        else:
            table.replace_all(part.position, part.routes())
    assert table.routes() == expected.routes()
