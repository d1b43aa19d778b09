"""Runners over one store and one control plane: hand-over, loss of leases, and stopping (RFC-049)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from nats.aio.client import Client

from postroom.adapters.compose import OwnerSettings, open_mailbox
from postroom.adapters.compose.control_plane import LeaseStores, serve_admin
from postroom.adapters.compose.runner import OpenRunner, RunnerSettings, open_runner
from postroom.adapters.compose.serve import unrestricted
from postroom.adapters.grpc.admin_client import connect_admins
from postroom.adapters.grpc.client import connect_grpc
from postroom.adapters.memory.lease_store import MemoryLeaseStore
from postroom.adapters.system.clock import SystemClock
from postroom.application.cluster import leased_mailbox
from postroom.application.cluster.leased_mailbox import RunnerIdentity
from postroom.application.cluster.runner import Runner
from postroom.application.mailbox_client import MailboxClient
from postroom.application.ports.control_plane import LeaseAdmin, MailboxReport
from postroom.domain.errors import Fenced, InvalidRequest, PostroomError, Unavailable, WrongOwner
from postroom.domain.policy import TopicPolicy
from postroom.domain.settings import SettingsChanges
from tests.integration import ingest_world
from tests.support.logs import capture_logs
from tests.support.memory_control_plane import MemoryControlPlane
from tests.support.messages import MAILBOX, message
from tests.support.waiting import SECONDS, until

OTHER = "acme@two"


@pytest.fixture
def admin() -> MemoryControlPlane:
    return MemoryControlPlane()


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


@asynccontextmanager
async def running(
    store: str,
    admin: LeaseAdmin,
    name: str = "r1",
    mailboxes: Sequence[str] = (MAILBOX,),
    **settings: object,
) -> AsyncIterator[OpenRunner]:
    """Run a runner; at the end it is stopped as by SIGTERM, within the deadline of RFC-049."""
    of_runner = RunnerSettings(
        runner=name,
        proxy="p1",
        mailboxes=mailboxes,
        listen="127.0.0.1:0",
        **settings,  # type: ignore[arg-type]
    )
    async with open_runner(store, of_runner, unrestricted, admin) as opened:
        task = asyncio.create_task(opened.runner.run())
        try:
            yield opened
        finally:
            opened.runner.stop()
            async with asyncio.timeout(SECONDS):
                await task


@asynccontextmanager
async def calling(runner: OpenRunner, mailbox: str | None = MAILBOX) -> AsyncIterator[MailboxClient]:
    address = runner.url.removeprefix("grpc://")
    async with connect_grpc(address, timeout_ms=60_000, mailbox=mailbox) as client:
        yield client


async def served(runner: OpenRunner, *mailboxes: str) -> None:
    await until(lambda: runner.runner.served == sorted(mailboxes or (MAILBOX,)))


# -- serving ---


async def test_a_runner_serves_the_mailboxes_whose_leases_it_acquired(
    store: str, admin: MemoryControlPlane
) -> None:
    async with running(store, admin, mailboxes=[MAILBOX, OTHER]) as runner:
        await served(runner, MAILBOX, OTHER)
        async with calling(runner) as first, calling(runner, OTHER) as second:
            await first.send_message(message(b"1"))
            assert await second.receive_messages("orders") == []
            (received,) = await first.receive_messages("orders")
            assert received.receipt.epoch == admin.leases[MAILBOX].epoch == 1
            await until(lambda: any(each.events_stored > 2 for each in admin.heartbeats))
            assert {each.status for each in admin.heartbeats} <= {"healthy", "degraded"}
            await until(lambda: admin.registered == {"r1": (MAILBOX, OTHER)})


async def test_a_second_runner_is_refused_until_the_first_releases_the_lease(
    store: str, admin: MemoryControlPlane
) -> None:
    async with running(store, admin, "r2") as second:
        await served(second)
        async with running(store, admin, "r1") as first:
            await until(lambda: "r1" in admin.registered)
            with pytest.raises(WrongOwner):
                async with calling(first):
                    pass
            second.runner.stop()
            await served(first)
            assert admin.owner(MAILBOX) == "r1"
            async with calling(first) as client:
                await client.send_message(message())
                assert (await client.receive_messages("orders"))[0].receipt.epoch == 2


async def test_messages_survive_the_change_of_their_runner(store: str, admin: MemoryControlPlane) -> None:
    async with running(store, admin, "r1") as first:
        await served(first)
        async with calling(first) as client:
            for number in range(3):
                await client.send_message(message(b"%d" % number, message_id=f"m{number}"))
            (received,) = await client.receive_messages("orders", max_messages=1)
            await client.ack_messages([received.receipt])
    assert admin.owner(MAILBOX) is None
    async with running(store, admin, "r2") as second:
        await served(second)
        async with calling(second) as client:
            assert [each.payload for each in await client.receive_messages("orders")] == [b"1", b"2"]


async def test_a_new_mailbox_gets_the_settings_of_the_runner(store: str, admin: MemoryControlPlane) -> None:
    settings = SettingsChanges(topics={"orders": {"visibility_ms": 7_000}})
    async with running(store, admin, owner=OwnerSettings(settings=settings)) as runner:
        await served(runner)
        async with calling(runner) as client:
            assert await client.get_topic_policy("orders") == TopicPolicy(visibility_ms=7_000)
            await runner.host.reload(SettingsChanges(topics={"orders": {"visibility_ms": 8_000}}))
            assert await client.get_topic_policy("orders") == TopicPolicy(visibility_ms=8_000)


async def test_a_reload_of_a_runner_changes_no_mailbox_that_would_lose_something(
    store: str, admin: MemoryControlPlane
) -> None:
    async with running(store, admin) as runner:
        await served(runner)
        async with calling(runner) as client:
            await client.set_topic_policy("orders", {"max_attempts": 1})
            await client.send_batch([message(), message()])
            for each in await client.receive_messages("orders"):
                await each.nack(reason="broken")
            with capture_logs() as events:
                await runner.host.reload(SettingsChanges(default_policy={"dead_capacity": 1}))
            assert [(each["event"], each["mailbox"]) for each in events] == [
                ("runner.settings_refused", MAILBOX)
            ]
            assert "would lose data: 1 dead letter of orders expires now" in events[0]["error"]
            assert len((await client.list_dead_letters("orders")).items) == 2


async def test_a_runner_with_other_settings_says_what_every_opener_says(
    store: str, admin: MemoryControlPlane
) -> None:
    async with open_mailbox(store, MAILBOX):
        pass
    settings = SettingsChanges(default_policy={"max_attempts": 1}, topics={"ord*": {"shards": 4}})
    with capture_logs() as events:
        async with running(store, admin, owner=OwnerSettings(settings=settings)):
            await until(lambda: any("error" in each for each in events))
    (error, *_) = [each["error"] for each in events if "error" in each]
    assert error == (
        f"Mailbox {MAILBOX} has other settings than those given: policy.max_attempts is 5, not 1; "
        "topics.ord*.shards is unset, not 4. Leave them out to use what is stored; to change it, run "
        f"`postroom mailbox set --mailbox {MAILBOX} policy.max_attempts=1 'topics.ord*.shards=4'` or "
        f"`postroom apply --mailbox {MAILBOX}`."
    )


# -- offers ---


async def test_a_mailbox_that_is_offered_is_taken_if_the_store_has_it(
    store: str, admin: MemoryControlPlane
) -> None:
    async with open_mailbox(store, OTHER) as mailbox:
        await mailbox.send_message(message())
    admin.offers = [OTHER, "none@one"]
    async with running(store, admin, mailboxes=[]) as runner:
        await served(runner, OTHER)
        assert admin.leases[OTHER].epoch == 2  # above that of the log
        assert "none@one" not in admin.leases


# -- the loss of a lease ---


async def test_a_refused_renewal_shuts_the_mailbox_down_and_it_is_acquired_again(
    store: str, admin: MemoryControlPlane
) -> None:
    async with running(store, admin) as runner:
        await served(runner)
        async with calling(runner) as client:
            await client.send_message(message(b"1"))
            await admin.release_lease(MAILBOX, "r1")  # as an operator does
            await until(lambda: admin.leases[MAILBOX].epoch == 2)
            await served(runner)
            await client.send_message(message(b"2"))
            received = await client.receive_messages("orders")
            assert [each.payload for each in received] == [b"1", b"2"]
            assert {each.receipt.epoch for each in received} == {2}


async def test_an_owner_without_lease_is_evicted_and_fenced(store: str, admin: MemoryControlPlane) -> None:
    async with open_mailbox(store, MAILBOX) as former:
        await former.send_message(message(b"1"))
        async with running(store, admin) as runner:
            await served(runner)
            with pytest.raises(Fenced):
                await former.send_message(message(b"2"))
            async with calling(runner) as client:
                assert [each.payload for each in await client.receive_messages("orders")] == [b"1"]


async def test_a_runner_goes_on_without_admins_until_its_deadline(
    store: str, admin: MemoryControlPlane
) -> None:
    async with running(store, admin) as runner:
        await served(runner)
        async with calling(runner) as client:
            await client.send_message(message(b"1"))
            admin.is_away = True
            await client.send_message(message(b"2"))
            await until(lambda: not runner.runner.served)
            assert "lease:acme@one" in runner.runner.find_missing()
            with pytest.raises(Unavailable, match="lease"):
                await runner.host.served.find(MAILBOX).mailbox.send_message(message(b"3"))
            admin.is_away = False  # within the grace period, as nobody else asked
            await served(runner)
            received = await client.receive_messages("orders")
            assert [each.payload for each in received] == [b"1", b"2"]
            assert admin.leases[MAILBOX].epoch == 1


async def test_a_grant_whose_answer_was_lost_is_used_when_it_is_repeated(
    store: str, admin: MemoryControlPlane
) -> None:
    admin.loses_answers = True
    async with running(store, admin) as runner:
        await until(lambda: admin.owner(MAILBOX) == "r1")
        admin.loses_answers = False
        await served(runner)
        assert admin.leases[MAILBOX].epoch == 1


# -- stopping ---


async def test_a_runner_that_stops_ends_its_streams_and_releases_its_leases(
    store: str, admin: MemoryControlPlane
) -> None:
    async with running(store, admin, mailboxes=[MAILBOX, OTHER]) as runner:
        await served(runner, MAILBOX, OTHER)
        async with calling(runner) as client:
            waiting = asyncio.create_task(client.receive_messages("orders", wait_ms=60_000))
            await asyncio.sleep(0.05)
            runner.runner.stop()
            with pytest.raises(PostroomError):
                await waiting
        await until(lambda: admin.registered == {})
        assert [admin.owner(each) for each in (MAILBOX, OTHER)] == [None, None]


async def test_a_runner_stops_in_time_while_no_admin_answers(store: str, admin: MemoryControlPlane) -> None:
    async with running(store, admin) as runner:
        await served(runner)
        admin.is_away = True
    assert admin.owner(MAILBOX) == "r1"  # until the lease expires


async def test_a_mailbox_that_can_not_be_closed_is_released_and_appends_nothing_more(
    admin: MemoryControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leased_mailbox, "CLOSE_SECONDS", 0.1)
    host = HangingHost()
    runner = Runner(RunnerIdentity("r1", "p1", "127.0.0.1:1"), [MAILBOX], admin, host, SystemClock())
    task = asyncio.create_task(runner.run())
    await until(lambda: host.may_append is not None and host.may_append())
    runner.stop()
    async with asyncio.timeout(SECONDS):
        await task
    assert admin.owner(MAILBOX) is None
    assert host.may_append is not None
    assert not host.may_append()


class HangingHost:
    """A host whose disk hangs when a mailbox is closed."""

    may_append: Callable[[], bool] | None = None

    async def log_epoch(self, mailbox: str) -> int:
        return 0

    @asynccontextmanager
    async def open(
        self, mailbox: str, epoch: int, may_append: Callable[[], bool]
    ) -> AsyncIterator["HangingHost"]:
        self.may_append = may_append
        try:
            yield self
        finally:
            await asyncio.sleep(SECONDS)

    async def wait_until_lost(self) -> None:
        await asyncio.Event().wait()

    async def report(self) -> MailboxReport:
        return MailboxReport()


# -- with the servers of others ---


async def test_runners_share_a_database(postgres_store: str, admin: MemoryControlPlane) -> None:
    async with open_mailbox(postgres_store, MAILBOX, listen="off") as former:
        await former.send_message(message(b"1"))
        async with running(postgres_store, admin, "r1") as first:
            await served(first)
            with pytest.raises(Fenced):
                await former.send_message(message())
            async with calling(first) as client:
                await client.send_message(message(b"2"))
    async with running(postgres_store, admin, "r2") as second:
        await served(second)
        async with calling(second) as client:
            received = await client.receive_messages("orders")
            assert [each.payload for each in received] == [b"1", b"2"]
            assert {each.receipt.epoch for each in received} == {3}


async def test_runners_acquire_leases_of_admins_over_grpc(store: str) -> None:
    async with (
        serve_admin(LeaseStores(MemoryLeaseStore()), "127.0.0.1:0") as served_admin,
        connect_admins([served_admin.url.partition("://")[2]]) as control_plane,
    ):
        async with running(store, control_plane, "r1", [MAILBOX, OTHER]) as first:
            await served(first, MAILBOX, OTHER)
            routes = await control_plane.list_routes()
            address = first.url.removeprefix("grpc://")
            assert [(each.mailbox, each.address) for each in routes.routes] == [
                (MAILBOX, address),
                (OTHER, address),
            ]
        async with running(store, control_plane, "r2") as second:
            await served(second, MAILBOX, OTHER)  # it is offered the second
            leases = await control_plane.list_leases()
            assert [(each.runner, each.epoch, each.status) for each in leases] == [("r2", 2, "active")] * 2


async def test_a_runner_ingests_into_its_mailboxes_and_the_next_one_goes_on(
    store: str, nats_url: str, client: Client, admin: MemoryControlPlane
) -> None:
    archive = ingest_world.MAILBOX
    namespaces = {archive: ingest_world.namespace(nats_url, "unused.db")}
    for number in range(2):
        async with running(store, admin, f"r{number}", [archive], namespaces=namespaces) as runner:
            await served(runner, archive)
            ids = [f"order-{number}-{each}" for each in range(50)]
            await ingest_world.publish(client, *ingest_world.envelopes(ids))
            await until(partial(has_stored, store, 50 * (number + 1)))
    assert set(ingest_world.stored(store).values()) == {1}
    assert await ingest_world.unacked(client) == 0


def has_stored(store: str, number: int) -> bool:
    return sum(ingest_world.stored(store).values()) == number


# -- settings ---


@pytest.mark.parametrize(
    "settings",
    [{"runner": "a@b"}, {"proxy": ""}, {"mailboxes": ["none"]}, {"listen": "192.0.2.1:1"}, {"address": "a"}],
    ids=str,
)
async def test_settings_that_make_no_sense_are_refused(
    store: str, admin: MemoryControlPlane, settings: dict[str, object]
) -> None:
    valid = {"runner": "r1", "proxy": "p1", "mailboxes": [MAILBOX], "listen": "127.0.0.1:0"}
    with pytest.raises(InvalidRequest):
        async with open_runner(store, RunnerSettings(**(valid | settings)), unrestricted, admin):  # type: ignore[arg-type]
            pass


async def test_a_store_in_memory_is_refused(admin: MemoryControlPlane) -> None:
    with pytest.raises(InvalidRequest, match="store in memory"):
        async with running("memory:", admin):
            pass
