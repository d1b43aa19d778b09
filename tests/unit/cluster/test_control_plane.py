"""The control plane, in which two admins share a lease store and a test moves their clocks."""

from typing import Any

import pytest

from postroom.adapters.memory.lease_store import MemoryLeaseStore
from postroom.application.cluster.control_plane import ControlPlane
from postroom.application.cluster.control_plane_metrics import ControlPlaneSettings, LeasePolicies
from postroom.application.ports.control_plane import Heartbeat, PartitionRange, RunnerRegistration
from postroom.domain.errors import InvalidRequest, LeaseHeld, LeaseLost, Unavailable
from postroom.domain.lease.lease import LeasePolicy
from postroom.domain.lease.partitions import partition_of
from tests.support.clocks import ManualClock
from tests.support.lease_requests import lease_request
from tests.support.route_push import RecordedPush, call_at_once

MAILBOX, OTHER = "orders@proxy-1", "bills@proxy-2"
POLICY = LeasePolicy(ttl_ms=10_000, heartbeat_interval_ms=2_000, grace_period_ms=2_000)
SETTINGS = ControlPlaneSettings(member_ttl_ms=3_000)
PROXY_1, PROXY_2 = "127.0.0.1:7101", "127.0.0.1:7102"


class Admins:
    """Two admins over one store, each with a clock of its own."""

    def __init__(self) -> None:
        self.store = MemoryLeaseStore()
        self.push = RecordedPush()
        self.clocks = (ManualClock(), ManualClock())
        self.one, self.two = (self.start(clock) for clock in self.clocks)

    def start(self, clock: ManualClock) -> ControlPlane:
        policies = LeasePolicies(POLICY, {"slow": LeasePolicy()})
        return ControlPlane(self.store, clock, self.push, call_at_once, policies, SETTINGS)

    def advance(self, ms: int) -> None:
        for clock in self.clocks:
            clock.advance(ms)

    async def catch_up(self) -> None:
        await self.one.catch_up()
        await self.two.catch_up()


@pytest.fixture
def admins() -> Admins:
    return Admins()


def heartbeat(epoch: int | None = None, **fields: Any) -> Heartbeat:
    return Heartbeat(
        **{"mailbox": MAILBOX, "runner": "runner-1", "proxy": "proxy-1", "epoch": epoch} | fields
    )


async def test_one_runner_has_the_lease_at_all_admins(admins) -> None:
    grant = await admins.one.acquire_lease(lease_request())
    assert (grant.epoch, grant.ttl_ms, grant.heartbeat_interval_ms) == (1, 10_000, 2_000)
    with pytest.raises(LeaseHeld, match="leased by runner-1"):
        await admins.two.acquire_lease(lease_request(runner="runner-2"))


async def test_repeating_an_acquisition_keeps_its_epoch_and_another_one_of_the_runner_raises_it(
    admins,
) -> None:
    epochs = [
        (await admin.acquire_lease(lease_request(attempt=attempt))).epoch
        for admin, attempt in ((admins.one, 1), (admins.two, 1), (admins.one, 2))
    ]
    assert epochs == [1, 1, 2]


async def test_the_epoch_is_above_that_of_the_log(admins) -> None:
    assert (await admins.one.acquire_lease(lease_request(log_epoch=41))).epoch == 42


async def test_a_heartbeat_or_release_of_another_epoch_is_refused(admins) -> None:
    await admins.one.acquire_lease(lease_request())
    await admins.one.acquire_lease(lease_request(attempt=2))
    with pytest.raises(LeaseLost, match="epoch 2"):
        await admins.two.renew_lease(heartbeat(epoch=1))
    with pytest.raises(LeaseLost, match="epoch 2"):
        await admins.two.release_lease(MAILBOX, "runner-1", 1)
    assert (await admins.two.renew_lease(heartbeat(epoch=2))).epoch == 2
    assert (await admins.two.renew_lease(heartbeat())).epoch == 2  # RFC-049 compares runners only


async def test_a_lease_that_nobody_renews_expires_after_its_ttl_and_grace_period(admins) -> None:
    await admins.one.acquire_lease(lease_request())
    await admins.catch_up()
    admins.advance(11_999)
    await admins.two.expire()
    with pytest.raises(LeaseHeld):
        await admins.two.acquire_lease(lease_request(runner="runner-2"))
    admins.advance(1)
    await admins.two.expire()
    assert (await admins.one.acquire_lease(lease_request(runner="runner-2", attempt=2))).epoch == 2
    with pytest.raises(LeaseLost, match="runner-2"):
        await admins.one.renew_lease(heartbeat(epoch=1))


async def test_a_refused_acquisition_says_when_the_lease_expires_unless_it_is_renewed(admins) -> None:
    await admins.one.acquire_lease(lease_request())
    await admins.catch_up()
    admins.advance(3_000)
    with pytest.raises(LeaseHeld) as held:
        await admins.two.acquire_lease(lease_request(runner="runner-2"))
    assert held.value.remaining_ms == 9_001
    admins.advance(held.value.remaining_ms)
    assert (await admins.two.acquire_lease(lease_request(runner="runner-2"))).epoch == 2


async def test_an_admin_that_did_not_read_an_acquisition_does_not_say_when_that_lease_expires(admins) -> None:
    await admins.one.acquire_lease(lease_request())
    await admins.catch_up()
    admins.advance(12_000)
    await admins.one.acquire_lease(lease_request(runner="runner-2"))
    with pytest.raises(LeaseHeld, match="runner-2") as held:
        await admins.two.acquire_lease(lease_request(runner="runner-3"))
    assert held.value.remaining_ms is None


async def test_runners_register_again_when_a_lease_expires_and_are_offered_its_mailbox(admins) -> None:
    await admins.one.acquire_lease(lease_request())
    await admins.catch_up()
    address = "127.0.0.1:7002"
    registration = await admins.one.register_runner("runner-2", "proxy-1", address)
    assert registration.interval_ms == SETTINGS.member_interval_ms
    admins.advance(11_500)
    registration = await admins.one.register_runner("runner-2", "proxy-1", address)
    assert (registration.interval_ms, registration.offers) == (501, ())
    admins.advance(registration.interval_ms)
    registration = await admins.one.register_runner("runner-2", "proxy-1", address)
    assert (registration.interval_ms, registration.offers) == (SETTINGS.member_interval_ms, (MAILBOX,))


async def test_a_renewal_within_the_grace_period_is_granted_and_starts_the_ttl_again(admins) -> None:
    await admins.one.acquire_lease(lease_request())
    await admins.catch_up()
    admins.advance(11_000)
    assert [each.status for each in await admins.one.list_leases()] == ["expiring"]
    await admins.one.renew_lease(heartbeat(epoch=1))
    await admins.catch_up()
    admins.advance(11_000)
    await admins.two.expire()
    assert [each.runner for each in await admins.two.list_leases()] == ["runner-1"]
    assert [each.remaining_ms for each in await admins.two.list_leases()] == [-1_000]


async def test_an_admin_that_did_not_read_a_renewal_can_not_let_the_lease_expire(admins) -> None:
    await admins.one.acquire_lease(lease_request())
    await admins.catch_up()
    admins.advance(10_000)
    await admins.one.renew_lease(heartbeat(epoch=1))
    admins.advance(2_000)  # admin two was paused, and knows the first version only
    await admins.two.expire()
    await admins.catch_up()
    assert [each.status for each in await admins.two.list_leases()] == ["active"]


async def test_an_admin_that_was_paused_reports_no_expiry_of_what_was_renewed_meanwhile(
    admins, caplog: pytest.LogCaptureFixture
) -> None:
    await admins.one.acquire_lease(lease_request())
    await admins.one.register_proxy("proxy-1", PROXY_1)
    await admins.catch_up()
    admins.advance(6_000)
    await admins.one.renew_lease(heartbeat(epoch=1))
    await admins.one.register_proxy("proxy-1", PROXY_1)
    admins.advance(6_000)
    await admins.two.expire()
    assert "expired" not in caplog.text
    await admins.catch_up()
    admins.advance(12_000)
    await admins.two.expire()
    assert "lease.expired" in caplog.text
    assert "proxy.expired" in caplog.text


async def test_an_admin_that_starts_waits_for_the_whole_ttl_and_grace_period(admins) -> None:
    await admins.one.acquire_lease(lease_request())
    clock = ManualClock()
    started = admins.start(clock)
    clock.advance(1_000_000)
    await started.catch_up()
    clock.advance(11_999)
    await started.expire()
    assert [each.status for each in await started.list_leases()] == ["expiring"]
    clock.advance(1)
    await started.expire()
    await started.catch_up()
    assert [each.status for each in await started.list_leases()] == ["expired"]


async def test_a_wall_clock_that_jumps_neither_expires_a_lease_nor_keeps_one(admins) -> None:
    await admins.one.acquire_lease(lease_request())
    await admins.catch_up()
    admins.clocks[0].wall_us += 10**15
    admins.clocks[1].wall_us -= 10**15
    for admin in (admins.one, admins.two):
        await admin.expire()
        assert [each.status for each in await admin.list_leases()] == ["active"]
    admins.advance(12_000)
    await admins.two.expire()
    await admins.catch_up()
    assert [each.status for each in await admins.one.list_leases()] == ["expired"]


async def test_a_released_lease_may_be_acquired_at_once_and_releasing_it_again_is_fine(admins) -> None:
    await admins.one.acquire_lease(lease_request())
    for admin in (admins.one, admins.two):
        await admin.release_lease(MAILBOX, "runner-1", 1)
    await admins.catch_up()
    assert [each.status for each in await admins.two.list_leases()] == ["released"]
    assert (await admins.two.acquire_lease(lease_request(runner="runner-2", attempt=2))).epoch == 2
    with pytest.raises(LeaseLost):
        await admins.two.release_lease(MAILBOX, "runner-1", 1)


async def test_an_acquisition_that_was_delayed_until_after_its_release_does_not_come_back(admins) -> None:
    await admins.one.acquire_lease(lease_request())
    await admins.one.release_lease(MAILBOX, "runner-1", 1)
    with pytest.raises(LeaseLost, match="has ended"):
        await admins.two.acquire_lease(lease_request())


async def test_a_namespace_has_its_own_policy_which_a_runner_may_shorten(admins) -> None:
    slow = await admins.one.acquire_lease(lease_request("slow@proxy-1"))
    assert (slow.ttl_ms, slow.heartbeat_interval_ms) == (300_000, 60_000)
    longer = await admins.one.acquire_lease(lease_request(ttl_ms=600_000))
    shorter = await admins.one.acquire_lease(lease_request(ttl_ms=5_999, attempt=2))
    assert (longer.ttl_ms, shorter.ttl_ms, shorter.heartbeat_interval_ms) == (10_000, 5_000, 1_000)
    (lease,) = await admins.one.list_leases(MAILBOX) or [None]
    assert lease is None or lease.grace_ms == 1_000


async def test_a_wrong_partition_is_refused_with_the_right_one(admins) -> None:
    request = lease_request()
    right = partition_of(MAILBOX)
    wrong = type(request)(
        **{name: getattr(request, name) for name in request.__struct_fields__}
        | {"partition": (right + 1) % 256}
    )
    with pytest.raises(InvalidRequest, match=f"in partition {right}, not {(right + 1) % 256}"):
        await admins.one.acquire_lease(wrong)


async def test_statistics_of_the_last_heartbeat_are_listed(admins) -> None:
    await admins.one.acquire_lease(lease_request())
    await admins.one.renew_lease(
        heartbeat(epoch=1, events_stored=7, queries_served=8, storage_size_bytes=9, status="degraded")
    )
    await admins.one.catch_up()
    (lease,) = await admins.one.list_leases()
    statistics = (lease.events_stored, lease.queries_served, lease.storage_size_bytes, lease.health)
    assert statistics == (7, 8, 9, "degraded")


async def test_proxies_that_registered_get_the_table_first_and_changes_afterwards(admins, settled) -> None:
    await admins.one.acquire_lease(lease_request())
    first = await admins.one.register_proxy("proxy-1", PROXY_1)
    assert first.table is not None
    assert [each.mailbox for each in first.table.routes] == [MAILBOX]
    assert first.partitions == (PartitionRange(0, 255),)
    again = await admins.one.register_proxy("proxy-1", PROXY_1, first.position)
    assert again.table is None

    await admins.two.acquire_lease(lease_request(OTHER, "runner-2"))
    await admins.one.catch_up()
    await settled(lambda: admins.push.mailboxes(PROXY_1) == [OTHER])
    await admins.two.release_lease(MAILBOX, "runner-1", 1)
    await admins.one.catch_up()
    await settled(lambda: admins.push.mailboxes(PROXY_1) == [OTHER, MAILBOX])
    assert [each.route is None for each in admins.push.changes[PROXY_1]] == [False, True]
    positions = [each.position for each in admins.push.changes[PROXY_1]]
    assert positions == sorted(positions)
    assert positions[0] > first.position


async def test_renewals_change_no_route(admins) -> None:
    await admins.one.acquire_lease(lease_request())
    position = (await admins.one.register_proxy("proxy-1", PROXY_1)).position
    await admins.one.renew_lease(heartbeat(epoch=1))
    assert (await admins.one.register_proxy("proxy-1", PROXY_1, position)).table is None


async def test_a_push_that_was_lost_is_repaired_by_the_next_registration(admins, settled) -> None:
    position = (await admins.one.register_proxy("proxy-1", PROXY_1)).position
    admins.push.unreachable.add(PROXY_1)
    await admins.one.acquire_lease(lease_request())
    await admins.one.catch_up()
    metrics = await admins.one.monitor.collect()
    await settled(lambda: _failed(metrics) or True)
    table = (await admins.one.register_proxy("proxy-1", PROXY_1, position)).table
    assert table is not None
    assert [each.runner for each in table.routes] == ["runner-1"]


def _failed(metrics: Any) -> bool:
    return any(each.name == "postroom_route_pushes" for each in metrics)


async def test_all_admins_agree_on_the_partitions_of_proxies(admins) -> None:
    await admins.one.register_proxy("proxy-1", PROXY_1)
    await admins.two.register_proxy("proxy-2", PROXY_2)
    await admins.catch_up()
    partitions = [
        [each.partitions for each in await admin.list_members()] for admin in (admins.one, admins.two)
    ]
    assert partitions[0] == partitions[1]
    assert sorted(last - first + 1 for ranges in partitions[0] for first, last in ranges) == [128, 128]


async def test_the_partitions_of_a_proxy_that_is_gone_move_to_the_others(admins) -> None:
    await admins.one.register_proxy("proxy-1", PROXY_1)
    await admins.one.register_proxy("proxy-2", PROXY_2)
    await admins.catch_up()
    admins.advance(2_000)
    await admins.two.register_proxy("proxy-2", PROXY_2)
    await admins.catch_up()
    admins.advance(1_500)
    await admins.two.expire()
    members = await admins.two.list_members()
    assert [(each.id, each.partitions) for each in members] == [("proxy-2", (PartitionRange(0, 255),))]

    await admins.one.leave(proxy="proxy-2")
    assert await admins.one.list_members() == []


async def test_a_proxy_id_is_of_one_address_at_a_time(admins) -> None:
    await admins.one.register_proxy("proxy-1", PROXY_1)
    await admins.catch_up()
    for admin in (admins.one, admins.two):
        with pytest.raises(Unavailable, match=f"registered at {PROXY_1}") as refused:
            await admin.register_proxy("proxy-1", PROXY_2)
        assert refused.value.retry_after_ms == SETTINGS.member_interval_ms
    admins.advance(3_000)
    await admins.two.expire()
    await admins.two.register_proxy("proxy-1", PROXY_2)
    assert [each.address for each in await admins.two.list_members()] == [PROXY_2]


async def test_a_mailbox_without_a_lease_is_offered_to_one_runner_of_its_proxy(admins) -> None:
    await admins.one.register_proxy("proxy-1", PROXY_1)
    await admins.one.acquire_lease(lease_request())
    await admins.one.release_lease(MAILBOX, "runner-1", 1)
    await admins.one.catch_up()

    async def register(runner: str, proxy: str = "proxy-1") -> tuple[str, ...]:
        registration: RunnerRegistration = await admins.one.register_runner(runner, proxy, "127.0.0.1:7002")
        return registration.offers

    assert await register("runner-x", "proxy-9") == (MAILBOX,)  # while its proxy has no runner
    assert await register("runner-2") == ()
    assert await register("runner-3") == ()
    admins.advance(1_000)
    assert await register("runner-2") == ()
    assert await register("runner-3") == ()
    admins.advance(2_001)  # runner-x did not acquire it, and is gone
    assert [await register("runner-2"), await register("runner-3")] == [(MAILBOX,), ()]
    await admins.one.acquire_lease(lease_request(runner="runner-2", attempt=2))
    await admins.one.catch_up()
    assert await register("runner-2") == ()


async def test_runners_that_leave_or_are_silent_are_no_members(admins) -> None:
    for runner in ("runner-1", "runner-2"):
        await admins.one.register_runner(runner, "proxy-1", "127.0.0.1:7002")
    await admins.one.leave(runner="runner-1")
    assert [(each.id, each.kind) for each in await admins.one.list_members()] == [("runner-2", "runner")]
    admins.advance(3_001)
    assert await admins.one.list_members() == []


async def test_leases_and_members_are_measured(admins) -> None:
    await admins.one.acquire_lease(lease_request())
    with pytest.raises(LeaseHeld):
        await admins.one.acquire_lease(lease_request(runner="runner-2"))
    await admins.one.register_proxy("proxy-1", PROXY_1)
    metrics = {
        (each.name, *labels.values()): value
        for each in await admins.one.monitor.collect()
        for labels, value in each.samples
    }
    assert metrics["postroom_leases", "active"] == 1
    assert metrics["postroom_lease_refusals", "E_LEASE_HELD"] == 1
    assert metrics["postroom_members", "proxy"] == 1
    assert await admins.one.monitor.find_missing() == []
