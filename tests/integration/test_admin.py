"""Admins over gRPC: leases by the contract of RFC-049, fail-over, access, and calls that are malformed."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from postroom.adapters.compose.connect import ClientTls
from postroom.adapters.compose.control_plane import LeaseStores, RunningAdmin, open_leases, serve_admin
from postroom.adapters.compose.serve import ServerTls, SurfaceProtection, TlsFiles
from postroom.adapters.grpc.admin.v1 import control_plane_pb2 as pb
from postroom.adapters.grpc.admin_client import ControlPlaneClient, connect_admins
from postroom.adapters.grpc.calls import CONTROL_PLANE, MEMBERSHIP, POSITION_KEY
from postroom.adapters.grpc.cluster.v1 import cluster_pb2 as cluster_pb
from postroom.adapters.grpc.node_access import NodeAccess, NodeCall, NodeHandlers
from postroom.adapters.grpc.proxy_service import ROUTE_METHODS
from postroom.adapters.grpc.server import serve_handlers
from postroom.adapters.memory.lease_store import MemoryLeaseStore
from postroom.adapters.sockets.address import resolve
from postroom.application.cluster.control_plane_metrics import ControlPlaneSettings
from postroom.application.ports.control_plane import Heartbeat
from postroom.domain.errors import (
    FrameTooLarge,
    InvalidRequest,
    LeaseHeld,
    LeaseLost,
    Rejected,
    Unauthenticated,
    Unavailable,
)
from postroom.domain.lease.partitions import partition_of
from tests.support.lease_requests import lease_request

MAILBOX = "orders@proxy-1"
TOKEN = "node-" + "t" * 40
METHODS = CONTROL_PLANE | MEMBERSHIP


@asynccontextmanager
async def serve(stores: LeaseStores | None = None, **options: Any) -> AsyncIterator[RunningAdmin]:
    listen = options.pop("listen", "127.0.0.1:0")
    async with serve_admin(stores or LeaseStores(MemoryLeaseStore()), listen, **options) as served:
        yield served


def address(served: RunningAdmin) -> str:
    return served.url.partition("://")[2]


@pytest.fixture
async def admin() -> AsyncIterator[RunningAdmin]:
    async with serve() as served:
        yield served


@pytest.fixture
async def client(admin) -> AsyncIterator[ControlPlaneClient]:
    async with connect_admins([address(admin)]) as connected:
        yield connected


class Stranger:
    """A caller that knows RFC-049's contract only."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def __getattr__(self, name: str) -> Any:
        method = METHODS[name]
        return self.channel.unary_unary(
            method.path,
            request_serializer=lambda request: (
                request if isinstance(request, bytes) else request.SerializeToString()
            ),
            response_deserializer=method.response.FromString,
        )


@pytest.fixture
async def stranger(admin) -> AsyncIterator[Stranger]:
    async with grpc.aio.insecure_channel(address(admin)) as channel:
        yield Stranger(channel)


def acquire(**changes: Any) -> pb.AcquireLeaseRequest:
    mailbox = changes.get("mailbox_id", MAILBOX)
    fields = {
        "mailbox_id": mailbox,
        "runner_id": "runner-1",
        "proxy_id": "proxy-1",
        "partition": partition_of(MAILBOX),
        "address": "127.0.0.1:7001",
        "ttl_seconds": 300,
    }
    return pb.AcquireLeaseRequest(**fields | changes)


async def test_a_runner_of_another_implementation_acquires_renews_and_releases(stranger) -> None:
    granted = await stranger.acquire_lease(acquire())
    assert granted.success
    assert granted.lease_expires.seconds > 0
    denied = await stranger.acquire_lease(acquire(runner_id="runner-2"))
    assert (denied.success, denied.message) == (False, "mailbox already leased by runner-1")
    renewed = await stranger.mailbox_heartbeat(
        pb.MailboxHeartbeatRequest(
            mailbox_id=MAILBOX, runner_id="runner-1", proxy_id="proxy-1", events_stored=5, status="healthy"
        )
    )
    assert renewed.lease_renewed
    refused = await stranger.mailbox_heartbeat(
        pb.MailboxHeartbeatRequest(mailbox_id=MAILBOX, runner_id="runner-2", proxy_id="proxy-1")
    )
    assert (refused.lease_renewed, "runner-1" in refused.message) == (False, True)
    released = await stranger.release_lease(pb.ReleaseLeaseRequest(mailbox_id=MAILBOX, runner_id="runner-1"))
    assert released.released
    assert (await stranger.acquire_lease(acquire(runner_id="runner-2"))).success


async def test_a_client_of_the_product_gets_typed_answers(client) -> None:
    grant = await client.acquire_lease(lease_request(log_epoch=6, ttl_ms=60_500))
    assert (grant.epoch, grant.ttl_ms, grant.heartbeat_interval_ms) == (7, 60_000, 12_000)
    with pytest.raises(LeaseHeld) as held:
        await client.acquire_lease(lease_request(runner="läufer"))
    assert held.value.runner == "runner-1"
    assert held.value.remaining_ms is not None
    assert held.value.remaining_ms > 0
    heartbeat = Heartbeat(mailbox=MAILBOX, runner="runner-1", proxy="proxy-1", epoch=7, queries_served=3)
    assert (await client.renew_lease(heartbeat)).epoch == 7
    with pytest.raises(LeaseLost, match="epoch 7, not 6"):
        await client.release_lease(MAILBOX, "runner-1", 6)
    await client.release_lease(MAILBOX, "runner-1", 7)
    registration = await client.register_proxy("proxy-1", "127.0.0.1:7101")
    assert [tuple(each) for each in registration.partitions] == [(0, 255)]
    offers = (await client.register_runner("runner-2", "proxy-1", "127.0.0.1:7002", [])).offers
    assert offers == (MAILBOX,)
    (lease,) = await client.list_leases(MAILBOX)
    assert (lease.status, lease.queries_served, lease.epoch) == ("released", 3, 7)
    assert (await client.list_routes()).routes == ()
    assert [(each.kind, each.id) for each in await client.list_members()] == [
        ("proxy", "proxy-1"),
        ("runner", "runner-2"),
    ]
    await client.leave(proxy="proxy-1")
    await client.leave(runner="runner-2")
    assert await client.list_members() == []


@pytest.fixture
def silent_address() -> Iterator[str]:
    """The address of a process that is paused: it accepts connections, and answers nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def test_a_client_asks_the_next_admin_when_one_is_gone_or_paused(admin, silent_address) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    admins = [silent_address, gone, address(admin)]
    async with connect_admins(admins, attempt_ms=300) as client:
        assert (await client.acquire_lease(lease_request())).epoch == 1
        assert (await client.acquire_lease(lease_request())).epoch == 1
    async with connect_admins(admins[:2], attempt_ms=300) as client:
        with pytest.raises(Unavailable, match="None of 2 admins answered"):
            await client.list_leases()


async def test_a_caller_that_has_no_time_for_a_second_admin_asks_it_the_next_time(
    admin, silent_address
) -> None:
    async with connect_admins([silent_address, address(admin)], attempt_ms=60_000) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.list_leases()
        async with asyncio.timeout(30):
            assert await client.list_leases() == []


@pytest.fixture(params=["sqlite", "postgresql"])
def store_address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a lease store that several processes may use."""
    if request.param == "sqlite":
        return str(tmp_path / "admin.db")
    database: str = request.getfixturevalue("lease_database")
    return database


async def test_two_admins_of_one_store_agree_and_each_tells_its_proxies(store_address) -> None:
    changes: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def update(request: pb.MailboxRouteUpdate, call: NodeCall) -> pb.MailboxRouteUpdateAck:
        changes.put_nowait((request.address, int(call.metadata[POSITION_KEY])))
        return pb.MailboxRouteUpdateAck(success=True)

    async def remove(request: pb.MailboxRouteRemoval, call: NodeCall) -> pb.MailboxRouteRemovalAck:
        changes.put_nowait(("", int(call.metadata[POSITION_KEY])))
        return pb.MailboxRouteRemovalAck(success=True)

    access = NodeAccess(TOKEN)
    routes = NodeHandlers(
        {"update_mailbox_route": update, "remove_mailbox_route": remove}, CONTROL_PLANE, access, ROUTE_METHODS
    )
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as paused,
        open_leases(store_address) as one,
        open_leases(store_address) as two,
    ):
        async with AsyncExitStack() as opened:
            enter = opened.enter_async_context
            admins = [address(await enter(serve(stores, access=access))) for stores in (one, two)]
            url = await enter(serve_handlers(resolve("127.0.0.1:0"), [routes]))
            first, second = [await enter(connect_admins([each], access)) for each in admins]
            await second.register_proxy("paused", f"127.0.0.1:{paused.getsockname()[1]}")
            position = (await second.register_proxy("proxy-1", url.partition("://")[2])).position

            await first.acquire_lease(lease_request())
            moved_to, moved_at = await asyncio.wait_for(changes.get(), 60)
            assert (moved_to, moved_at > position) == ("127.0.0.1:7001", True)
            with pytest.raises(LeaseHeld):
                await second.acquire_lease(lease_request(runner="runner-2"))
            await second.release_lease(MAILBOX, "runner-1", 1)
            removal = await asyncio.wait_for(changes.get(), 60)
            assert (removal[0], removal[1] > moved_at) == ("", True)
            members = [await each.list_members() for each in (first, second)]
            assert [each.partitions for each in members[0]] == [each.partitions for each in members[1]]


@pytest.mark.parametrize("token", [None, "other-" + "t" * 40])
async def test_without_the_node_token_nothing_is_answered_but_health(token) -> None:
    async with serve(access=NodeAccess(TOKEN)) as admin:
        async with connect_admins([address(admin)], NodeAccess(token)) as client:
            for call in (
                client.acquire_lease(lease_request()),
                client.release_lease(MAILBOX, "runner-1"),
                client.register_proxy("proxy-1", "127.0.0.1:7101"),
                client.leave(proxy="proxy-1"),
                client.list_leases(),
                client.list_routes(),
            ):
                with pytest.raises(Unauthenticated) as refused:
                    await call
                assert TOKEN not in str(refused.value)
        async with connect_admins([address(admin)], NodeAccess(TOKEN)) as client:
            assert await client.list_leases() == []
        async with grpc.aio.insecure_channel(address(admin)) as channel:
            stub: Any = HealthStub(channel)
            health = await stub.Check(HealthCheckRequest(service="prism.admin.v1.ControlPlane"))
            assert health.status == HealthCheckResponse.SERVING


async def test_a_node_without_a_certificate_of_the_authority_is_refused(tmp_path) -> None:
    files: dict[str, str] = {}
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("server", "node"):
        leaf = ca.issue_cert("127.0.0.1")
        leaf.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        leaf.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        files |= {f"{name}.{kind}": str(tmp_path / f"{name}.{kind}") for kind in ("pem", "key")}
    own = str(tmp_path / "ca.pem")
    tls = ServerTls(TlsFiles(files["server.pem"], files["server.key"], own))
    async with serve(protection=SurfaceProtection(tls), access=NodeAccess(TOKEN)) as admin:
        assert admin.url.startswith("grpcs://")
        access = NodeAccess(TOKEN, ClientTls(own, files["node.pem"], files["node.key"]))
        async with connect_admins([address(admin)], access) as client:
            assert (await client.acquire_lease(lease_request())).epoch == 1
        access = NodeAccess(TOKEN, ClientTls(own))
        async with connect_admins([address(admin)], access, attempt_ms=500) as client:
            with pytest.raises((Unavailable, InvalidRequest)):
                await client.list_leases()


async def test_beyond_loopback_an_admin_asks_for_a_token_or_a_certificate() -> None:
    with pytest.raises(InvalidRequest, match="TLS"):
        async with serve(listen="0.0.0.0:0", access=NodeAccess(TOKEN)):
            pass
    with pytest.raises(InvalidRequest, match="node_token"):
        async with serve(listen="0.0.0.0:0", protection=SurfaceProtection(behind_proxy=True)):
            pass


HOSTILE_TEXT = ["", " ", "\0", "a b", "x" * 10_000, "a@b@c", "\u202e", "a/b@c", "🦆" * 200, "@", "a@"]
HOSTILE_NUMBERS = [-1, 1 << 62, -(1 << 63)]


@pytest.mark.parametrize("value", HOSTILE_TEXT)
async def test_a_name_that_is_malformed_is_refused_and_changes_nothing(stranger, client, value) -> None:
    heartbeat = {"mailbox_id": MAILBOX, "runner_id": "runner-1", "proxy_id": "proxy-1"}
    calls = [
        *(
            stranger.acquire_lease(acquire(**{name: value}))
            for name in ("mailbox_id", "runner_id", "proxy_id", "address")
            if (name, value) not in ACCEPTED
        ),
        *(
            stranger.mailbox_heartbeat(pb.MailboxHeartbeatRequest(**heartbeat | {name: value}))
            for name in heartbeat
            if (name, value) not in ACCEPTED
        ),
        *(
            stranger.release_lease(
                pb.ReleaseLeaseRequest(**{"mailbox_id": MAILBOX, "runner_id": "r"} | {name: value})
            )
            for name in ("mailbox_id", "runner_id")
            if (name, value) not in ACCEPTED
        ),
        stranger.register_proxy(cluster_pb.RegisterProxyRequest(proxy_id="p", address=value)),
        stranger.register_runner(
            cluster_pb.RegisterRunnerRequest(runner_id="r", proxy_id="p", address="h:1", mailbox_ids=[value])
        ),
        stranger.list_leases(cluster_pb.ListLeasesRequest(mailbox_id=value)),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert await client.list_leases() == []
    assert await client.list_members() == []


ACCEPTED = {("runner_id", "\u202e"), ("proxy_id", "\u202e")}
"""What is a possible part of a mailbox name."""


@pytest.mark.parametrize("value", HOSTILE_NUMBERS)
async def test_a_number_out_of_range_is_refused_and_changes_nothing(stranger, client, value) -> None:
    await stranger.acquire_lease(acquire())
    calls: list[Any] = []
    if value < 0 or value > 1 << 40:
        calls.append(stranger.acquire_lease(acquire(runner_id="runner-2", ttl_seconds=value)))
    if value < 0:
        calls += [
            stranger.mailbox_heartbeat(
                pb.MailboxHeartbeatRequest(
                    mailbox_id=MAILBOX, runner_id="runner-1", proxy_id="proxy-1", **{name: value}
                )
            )
            for name in ("events_stored", "queries_served", "storage_size_bytes")
        ]
        calls.append(
            stranger.register_proxy(
                cluster_pb.RegisterProxyRequest(proxy_id="p", address="h:1", position=value)
            )
        )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert [each.runner for each in await client.list_leases()] == ["runner-1"]
    assert await client.list_members() == []


@pytest.mark.parametrize(
    "metadata",
    [
        ("postroom-log-epoch", "-1"),
        ("postroom-log-epoch", str(1 << 63)),
        ("postroom-log-epoch", str((1 << 63) - 1)),
        ("postroom-acquisition", "not a UUID"),
        ("postroom-acquisition", "%00"),
    ],
)
async def test_metadata_that_is_malformed_is_refused(stranger, client, metadata) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stranger.acquire_lease(acquire(), metadata=[metadata])
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert await client.list_leases() == []


@pytest.mark.parametrize("partition", [-1, 256, (partition_of(MAILBOX) + 1) % 256, (1 << 31) - 1])
async def test_a_wrong_partition_is_refused_naming_the_right_one(stranger, partition) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=f"partition {partition_of(MAILBOX)}"):
        await stranger.acquire_lease(acquire(partition=partition))


@pytest.mark.parametrize("data", [b"\xff", b"\x08", b"\x0a\xff\xff\xff\xff\x0f", b"\xf8\x07\x01"])
async def test_bytes_that_are_no_request_are_refused(stranger, data) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stranger.acquire_lease(data)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_above_the_limit_and_methods_of_proxies_are_refused(stranger, client) -> None:
    with pytest.raises((FrameTooLarge, Rejected)):
        await client.register_runner("r", "p", "h:1", ["x" * 120 + f"{n}@p" for n in range(12_000)])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stranger.update_mailbox_route(pb.MailboxRouteUpdate(mailbox_id=MAILBOX))
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stranger.leave(cluster_pb.LeaveRequest())
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_of_two_addresses_of_a_proxy_id_that_register_in_turns_the_first_stays(client) -> None:
    for _ in range(10):
        await client.register_proxy("proxy-1", "127.0.0.1:7101")
        with pytest.raises(Unavailable, match=r"registered at 127\.0\.0\.1:7101"):
            await client.register_proxy("proxy-1", "127.0.0.1:7102")
    assert [each.address for each in await client.list_members()] == ["127.0.0.1:7101"]


async def test_a_lease_store_that_fails_is_unavailable_and_not_ready_until_it_is_back(tmp_path: Path) -> None:
    class FailingStore(MemoryLeaseStore):
        def __init__(self) -> None:
            super().__init__()
            self.is_failing = False
            insert, select = self.recorder.insert_events, self.recorder.select_notifications

            def fail(call: Any) -> Any:
                def run(*args: Any, **kwargs: Any) -> Any:
                    if self.is_failing:
                        raise ConnectionError("the disk is gone")
                    return call(*args, **kwargs)

                return run

            self.recorder.insert_events = fail(insert)  # type: ignore[method-assign]
            self.recorder.select_notifications = fail(select)  # type: ignore[method-assign]

    store = FailingStore()
    settings = ControlPlaneSettings(poll_ms=10, expiry_ms=10)
    async with serve(LeaseStores(store), settings=settings) as admin:
        monitor = admin.control_plane.monitor
        assert await monitor.find_missing() == []
        store.is_failing = True
        for _ in range(1_000):
            if await monitor.find_missing():
                break
            await asyncio.sleep(0.01)
        assert await monitor.find_missing() == ["lease_store"]
        store.is_failing = False
        for _ in range(1_000):
            if not await monitor.find_missing():
                break
            await asyncio.sleep(0.01)
        assert await monitor.find_missing() == []
