"""When the holder of a lease stops, and when an admin lets it expire (ADR 0058)."""

from msgspec.structs import replace

from postroom.domain.lease.lease import Lease, LeasePolicy
from postroom.domain.lease.observation import HeldLease, LeaseObservations
from postroom.domain.message import MS

POLICY = LeasePolicy(ttl_ms=10_000, heartbeat_interval_ms=2_000, grace_period_ms=1_000)
LEASE = Lease(
    "orders@p", "r", "p", "h:1", 0, 1, "018f0000-0000-7000-8000-000000000001", 10_000, 1_000, True, 3, 0, 0, 0
)


def holder() -> HeldLease:
    lease = HeldLease(POLICY)
    lease.granted(100 * MS, 10_000, 1)
    return lease


def test_nothing_is_appended_without_a_lease() -> None:
    lease = HeldLease(POLICY)
    assert not lease.may_append(0)
    lease.renewed(0)
    assert not lease.may_append(1)


def test_the_holder_stops_a_ttl_after_it_sent_the_last_request_that_succeeded() -> None:
    lease = holder()
    assert lease.may_append(100 * MS)
    assert lease.may_append(10_100 * MS - 1)
    assert not lease.may_append(10_100 * MS)
    lease.renewed(2_000 * MS)
    assert lease.may_append(12_000 * MS - 1)
    assert not lease.may_append(12_000 * MS)


def test_answers_in_another_order_never_shorten_or_lengthen_a_lease() -> None:
    lease = holder()
    lease.renewed(4_000 * MS)
    lease.renewed(2_000 * MS)
    assert lease.deadline == 14_000 * MS
    assert lease.next_heartbeat(0) == 6_000 * MS


def test_a_refused_renewal_ends_the_lease_until_another_epoch_is_granted() -> None:
    lease = holder()
    lease.refused("it is owned by another runner")
    assert (lease.is_lost, lease.reason) == (True, "it is owned by another runner")
    assert not lease.may_append(200 * MS)
    lease.renewed(200 * MS)
    lease.granted(200 * MS, 10_000, 1)
    assert not lease.may_append(300 * MS)
    lease.granted(300 * MS, 10_000, 2)
    assert lease.may_append(300 * MS)


def test_a_delayed_answer_of_an_older_epoch_is_ignored() -> None:
    lease = holder()
    lease.granted(200 * MS, 5_000, 2)
    lease.refused("it was acquired again", epoch=1)
    lease.granted(100 * MS, 10_000, 1)
    lease.renewed(9_000 * MS, epoch=1)
    assert (lease.epoch, lease.deadline, lease.is_lost) == (2, 5_200 * MS, False)


def test_a_renewal_within_the_grace_period_lets_the_holder_go_on() -> None:
    lease = holder()
    assert not lease.may_append(10_500 * MS)
    lease.renewed(10_500 * MS)
    assert lease.may_append(10_500 * MS)


def test_a_clock_that_went_back_stops_the_holder() -> None:
    assert not holder().may_append(99 * MS)


def test_heartbeats_are_sent_at_the_interval_and_after_failures_with_a_backoff_up_to_it() -> None:
    lease = holder()
    assert lease.next_heartbeat(150 * MS) == 2_100 * MS
    assert lease.next_heartbeat(5_000 * MS) == 5_000 * MS
    pauses = []
    for _ in range(60):
        lease.failed(3_000 * MS, 1.0)
        pauses.append((lease.next_heartbeat(0) - 3_000 * MS) // MS)
    assert pauses[:5] == [200, 400, 800, 1_600, 2_000]
    assert {*pauses[4:]} == {2_000}
    lease.failed(3_000 * MS, 0.0)
    assert lease.next_heartbeat(0) == 4_000 * MS
    lease.renewed(4_000 * MS)
    assert lease.next_heartbeat(0) == 6_000 * MS
    lease.failed(6_000 * MS, 1.0)
    assert lease.next_heartbeat(0) == 6_200 * MS


def test_an_admin_lets_a_lease_expire_when_it_saw_one_version_for_the_ttl_and_the_grace_period() -> None:
    admin = LeaseObservations()
    assert not admin.is_expired(LEASE, 10**15)
    admin.observe("orders@p", 3, 500 * MS)
    admin.observe("orders@p", 3, 9_000 * MS)
    admin.observe("orders@p", 2, 9_000 * MS)
    assert not admin.is_expired(LEASE, 11_500 * MS - 1)
    assert admin.is_expired(LEASE, 11_500 * MS)
    assert not admin.is_expired(replace(LEASE, version=4), 11_500 * MS)
    assert not admin.is_expired(replace(LEASE, is_held=False), 11_500 * MS)
    admin.observe("orders@p", 4, 9_000 * MS)
    assert not admin.is_expired(LEASE, 30_000 * MS)
    assert admin.is_expired(replace(LEASE, version=4), 30_000 * MS)
    admin.forget("orders@p")
    assert not admin.is_expired(replace(LEASE, version=4), 30_000 * MS)


def test_the_rest_of_a_lease_is_negative_in_its_grace_period() -> None:
    admin = LeaseObservations()
    assert admin.remaining_ms(LEASE, 0) == 10_000
    admin.observe("orders@p", 3, 500 * MS)
    assert admin.remaining_ms(LEASE, 4_500 * MS) == 6_000
    assert admin.remaining_ms(LEASE, 11_000 * MS) == -500
