"""Who may call what in a cluster with mutual TLS: clients and nodes of each role, at admin, proxy, runner."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import grpc
import pytest
import trustme

from postroom.adapters.compose.connect import ClientTls
from postroom.adapters.compose.control_plane import LeaseStores, serve_admin
from postroom.adapters.compose.proxy import serve_proxy
from postroom.adapters.compose.serve import ServerTls, SurfaceProtection, TlsFiles
from postroom.adapters.grpc.admin.v1 import control_plane_pb2 as admin_pb
from postroom.adapters.grpc.calls import CONTROL_PLANE, MEMBERSHIP, METHODS, ROUTING
from postroom.adapters.grpc.cluster.v1 import cluster_pb2 as cluster_pb
from postroom.adapters.grpc.connections import open_channel
from postroom.adapters.grpc.node_access import NodeAccess, NodeNames
from postroom.adapters.memory.lease_store import MemoryLeaseStore
from postroom.domain.errors import InvalidRequest
from postroom.domain.lease.partitions import partition_of
from tests.support.access import controlled_mailbox
from tests.support.surfaces import served
from tests.support.waiting import SECONDS, until

MAILBOX = "victim@one"
FOREIGN_ADDRESSES = ("client.test:1", "127.6.6.6:1", "admin.test:1", "unix:/run/socket")
NAMES = NodeNames(admin=("admin.test",), proxy=("proxy.test",), runner=("runner.test",))
CALLERS = (None, "client", "admin", "proxy", "runner")
CODES = grpc.StatusCode
NODES = {"admin", "proxy", "runner"}
PERMITTED: Mapping[tuple[str, str], set[str]] = {
    ("admin", "acquire_lease"): {"runner"},
    ("admin", "release_lease"): {"runner", "admin"},
    ("admin", "mailbox_heartbeat"): {"runner"},
    ("admin", "register_proxy"): {"proxy"},
    ("admin", "register_runner"): {"runner"},
    ("admin", "leave"): {"proxy", "runner"},
    ("admin", "list_leases"): NODES,
    ("admin", "list_routes"): NODES,
    ("admin", "list_members"): NODES,
    ("proxy", "update_mailbox_route"): {"admin"},
    ("proxy", "remove_mailbox_route"): {"admin"},
    ("proxy", "resolve"): {"client", *NODES},
}
"""The callers that may make a call of each server; those of mailboxes need a capability from everybody."""
ALL = CONTROL_PLANE | MEMBERSHIP | ROUTING


class Cluster(NamedTuple):
    """An admin, a proxy, and a server of a mailbox, whose certificates are of one authority."""

    addresses: dict[str, str]
    certificates: dict[str | None, ClientTls]
    proxy: Any
    control_plane: Any

    async def ask(
        self,
        server: str,
        caller: str | None,
        name: str,
        *metadata: tuple[str, str],
        request: Any = None,
    ) -> grpc.StatusCode:
        """Make a call, by default an empty one, with the certificate of a caller; return the status."""
        method = (METHODS if server == "runner" else ALL)[name]
        async with open_channel(
            self.addresses[server], self.certificates[caller], is_shared=False
        ) as channel:
            make: Any = channel.unary_stream if method.is_stream else channel.unary_unary
            call = make(method.path, method.request.SerializeToString, method.response.FromString)
            request = method.request() if request is None else request
            if name == "update_mailbox_route":
                request = admin_pb.MailboxRouteUpdate(
                    mailbox_id=MAILBOX,
                    proxy_id="one",
                    runner_id="r",
                    address="127.6.6.6:1",
                    partition=partition_of(MAILBOX),
                )
            try:
                sent = call(request, metadata=metadata, timeout=SECONDS)
                if method.is_stream:
                    await sent.read()
                else:
                    await sent
            except grpc.aio.AioRpcError as error:
                return error.code()
            return CODES.OK


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Certificates of clients and nodes of one authority."""
    folder, authority, written = tmp_path_factory.mktemp("certificates"), trustme.CA(), {}

    def write(name: str, blob: trustme.Blob) -> None:
        written[name] = str(folder / name)
        blob.write_to_path(written[name])

    write("ca", authority.cert_pem)
    for name in ("client", "admin", "proxy", "runner"):
        leaf = authority.issue_cert("127.0.0.1", f"{name}.test")
        write(f"{name}.pem", leaf.cert_chain_pems[0])
        write(f"{name}.key", leaf.private_key_pem)
    return written


@pytest.fixture
async def cluster(files: dict[str, str]) -> AsyncIterator[Cluster]:
    def client(name: str) -> ClientTls:
        return ClientTls(files["ca"], files[f"{name}.pem"], files[f"{name}.key"])

    def server(name: str) -> SurfaceProtection:
        return SurfaceProtection(ServerTls(TlsFiles(files[f"{name}.pem"], files[f"{name}.key"], files["ca"])))

    certificates: dict[str | None, ClientTls] = {name: client(name) for name in CALLERS if name is not None}
    certificates[None] = ClientTls(files["ca"])
    async with AsyncExitStack() as opened:
        enter = opened.enter_async_context
        admin = await enter(
            serve_admin(
                LeaseStores(MemoryLeaseStore()),
                "127.0.0.1:0",
                access=NodeAccess(tls=client("admin"), names=NAMES),
                protection=server("admin"),
            )
        )
        admins = [admin.url.partition("://")[2]]
        access = NodeAccess(tls=client("proxy"), names=NAMES)
        proxy = await enter(
            serve_proxy(
                "one",
                admins,
                "127.0.0.1:0",
                access=access,
                protection=server("proxy"),
                address="proxy.test:7400",
            )
        )
        await until(lambda: proxy.proxy.is_connected)
        place = await enter(controlled_mailbox())
        runner = await enter(
            served(
                place.mailbox,
                "grpc",
                access=lambda *_: place.control.open_session,
                protection=server("runner"),
            )
        )
        urls = {"admin": admin.url, "proxy": proxy.url, "runner": runner}
        addresses = {name: url.partition("://")[2] for name, url in urls.items()}
        yield Cluster(addresses, certificates, proxy.proxy, admin.control_plane)


async def test_each_method_is_for_the_nodes_of_some_roles(cluster: Cluster) -> None:
    differences = []
    for (server, name), permitted in PERMITTED.items():
        for caller in CALLERS:
            metadata = [("postroom-push-key", cluster.proxy.push_key)] if server == "proxy" else []
            status = await cluster.ask(server, caller, name, *metadata)
            if caller is None:
                is_right = status is CODES.UNAVAILABLE  # the handshake fails
            elif caller in permitted:
                is_right = status in (CODES.OK, CODES.INVALID_ARGUMENT)
            else:
                refusal = CODES.PERMISSION_DENIED if caller in NODES else CODES.UNAUTHENTICATED
                is_right = status is refusal
            if not is_right:
                differences.append((server, name, caller, status))
    assert differences == []


async def test_the_matrix_has_all_methods_of_admins_and_proxies() -> None:
    assert {name for _, name in PERMITTED} == {*ALL}


@pytest.mark.parametrize("address", FOREIGN_ADDRESSES)
async def test_no_node_takes_a_lease_or_registers_at_an_address_that_is_no_nodes(
    cluster: Cluster, address: str
) -> None:
    requests: dict[str, Any] = {
        "acquire_lease": admin_pb.AcquireLeaseRequest(
            mailbox_id=MAILBOX,
            runner_id="r",
            proxy_id="one",
            partition=partition_of(MAILBOX),
            address=address,
        ),
        "register_runner": cluster_pb.RegisterRunnerRequest(runner_id="r", proxy_id="one", address=address),
        "register_proxy": cluster_pb.RegisterProxyRequest(proxy_id="two", address=address),
    }
    for name, request in requests.items():
        caller = "proxy" if name == "register_proxy" else "runner"
        status = await cluster.ask("admin", caller, name, request=request)
        assert status is CODES.PERMISSION_DENIED
    members = await cluster.control_plane.list_members()
    assert [each.id for each in members] == ["one"]
    assert await cluster.control_plane.list_leases() == []
    requests["acquire_lease"].address = "runner.test:1"
    await cluster.ask("admin", "runner", "acquire_lease", request=requests["acquire_lease"])
    assert [each.address for each in await cluster.control_plane.list_leases()] == ["runner.test:1"]


async def test_mailboxes_ask_every_certificate_for_a_capability(cluster: Cluster) -> None:
    statuses = {
        (name, caller): await cluster.ask("runner", caller, name)
        for name in METHODS
        for caller in CALLERS[1:]
    }
    assert {*statuses.values()} == {CODES.UNAUTHENTICATED}
    assert await cluster.ask("runner", None, "info") is CODES.UNAVAILABLE


async def test_not_even_an_admins_certificate_pushes_a_route_to_a_proxy_that_registered_elsewhere(
    cluster: Cluster,
) -> None:
    for metadata in ((), (("postroom-push-key", "guess"),), (("postroom-position", str(1 << 40)),)):
        status = await cluster.ask("proxy", "admin", "update_mailbox_route", *metadata)
        assert status is CODES.PERMISSION_DENIED
    assert cluster.proxy.routes() == []


async def test_certificates_that_do_not_tell_nodes_from_clients_are_refused_at_the_start(
    files: dict[str, str],
) -> None:
    protection = SurfaceProtection(ServerTls(TlsFiles(files["admin.pem"], files["admin.key"], files["ca"])))
    for access, given in ((NodeAccess(), protection), (NodeAccess(names=NAMES), SurfaceProtection())):
        with pytest.raises(InvalidRequest, match=r"nodes|node_token"):
            async with serve_admin(
                LeaseStores(MemoryLeaseStore()), "127.0.0.1:0", access=access, protection=given
            ):
                pytest.fail("it serves")
