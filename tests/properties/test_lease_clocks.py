"""The bound on the rates of clocks within which a lease is safe (ADR 0058): it holds, and it is sharp."""

from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.lease.lease import Lease, LeasePolicy
from postroom.domain.lease.observation import HeldLease, LeaseObservations

MAILBOX = "orders@p"
UNIT = 1_000_000
policies = st.tuples(st.integers(1, 300), st.integers(50, 2_000)).map(
    lambda n: LeasePolicy(
        ttl_ms=n[0] * 1_000, heartbeat_interval_ms=n[0] * 500, grace_period_ms=n[0] * n[1]
    ).validate()
)
rates = st.integers(UNIT // 10, 10 * UNIT)


def overlap(policy: LeasePolicy, holder_rate: int, admin_rate: int, seen_after_us: int) -> bool:
    """Return whether an admin lets a lease expire while its holder may append, by clocks of these rates.

    The rates are millionths of true time. The holder sends its request at 0; the admin sees the lease later.
    """
    holder, admin = HeldLease(policy), LeaseObservations()
    holder.granted(0, policy.ttl_ms, 1)
    lease = Lease(MAILBOX, "r", "p", "h:1", 0, 1, "", policy.ttl_ms, policy.grace_period_ms, True, 1, 0, 0, 0)
    admin.observe(MAILBOX, 1, seen_after_us * admin_rate // UNIT)
    last = (holder.deadline - 1) * UNIT // holder_rate  # the last moment at which the holder appends
    assert holder.may_append(last * holder_rate // UNIT)
    return last >= seen_after_us and admin.is_expired(lease, last * admin_rate // UNIT)


@given(
    policy=policies,
    holder=rates,
    thousandths=st.integers(1, 999),
    seen_after_us=st.integers(0, 10_000_000),
)
def test_a_lease_is_safe_while_clock_rates_differ_by_less_than_the_grace_period_allows(
    policy: LeasePolicy, holder: int, thousandths: int, seen_after_us: int
) -> None:
    admin = holder * (policy.ttl_ms + policy.grace_period_ms) * thousandths // (policy.ttl_ms * 1_000)
    assert not overlap(policy, holder, admin, seen_after_us)


@given(policy=policies, holder=rates)
def test_a_lease_is_not_safe_beyond_that(policy: LeasePolicy, holder: int) -> None:
    admin = holder * (policy.ttl_ms + policy.grace_period_ms) // policy.ttl_ms * 101 // 100
    assert overlap(policy, holder, admin, 0)
