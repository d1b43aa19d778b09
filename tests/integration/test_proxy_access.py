"""Who may do what at a proxy: admins push routes, anybody asks for them, and owners verify tokens."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from postroom.adapters.grpc.admin.v1 import control_plane_pb2 as admin_pb
from postroom.adapters.grpc.calls import CONTROL_PLANE, ROUTING, error_of
from postroom.adapters.grpc.client import connect_grpc
from postroom.adapters.grpc.cluster.v1 import cluster_pb2 as cluster_pb
from postroom.adapters.grpc.node_access import NodeAccess
from postroom.adapters.grpc.proxy_service import GrpcRoutePush
from postroom.application.ports.control_plane import RouteChange
from postroom.domain.errors import Forbidden, InvalidRequest, PostroomError, Unauthenticated, Unavailable
from postroom.domain.lease.routing import Route
from tests.support.access import controlled_mailbox
from tests.support.fixed_control_plane import FixedControlPlane
from tests.support.messages import MAILBOX, message
from tests.support.proxies import RunningProxy, running_proxy
from tests.support.surfaces import served
from tests.support.waiting import SECONDS

TOKEN = "canary-" + "t" * 32
CODES = grpc.StatusCode


@pytest.fixture
def control_plane() -> FixedControlPlane:
    return FixedControlPlane()


@pytest.fixture
async def proxy(control_plane: FixedControlPlane) -> AsyncIterator[RunningProxy]:
    async with running_proxy(control_plane, access=NodeAccess(TOKEN)) as running:
        yield running


@asynccontextmanager
async def pusher(token: str | None = TOKEN) -> AsyncIterator[GrpcRoutePush]:
    push = GrpcRoutePush(NodeAccess(token))
    yield push
    for address in list(push._channels):
        await push.forget(address)


async def ask(address: str, name: str, request: Any, *metadata: tuple[str, str]) -> Any:
    """Make a call of the services of a proxy, and return its answer or raise its error."""
    method = (CONTROL_PLANE | ROUTING)[name]
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(
            method.path, method.request.SerializeToString, method.response.FromString
        )
        try:
            return await call(request, metadata=metadata, timeout=SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, address) from error


def authorized(proxy: RunningProxy) -> tuple[tuple[str, str], ...]:
    """Return the metadata of an admin at which a proxy is registered."""
    return ("authorization", f"Bearer {TOKEN}"), ("postroom-push-key", proxy.proxy.push_key)


def change(route: Route) -> RouteChange:
    return RouteChange(route.mailbox, route.position, route)


# -- pushes ---


async def test_an_admin_pushes_routes_and_their_removal(
    control_plane: FixedControlPlane, proxy: RunningProxy
) -> None:
    route = control_plane.lease("köln@one", "10.0.0.1:7000", epoch=7)
    async with pusher() as push:
        await push.push(proxy.address, change(route), proxy.proxy.push_key)
        assert proxy.proxy.routes() == [route]
        removal = RouteChange(route.mailbox, control_plane.expire(route.mailbox), None)
        await push.push(proxy.address, removal, proxy.proxy.push_key)
        assert proxy.proxy.routes() == []


async def test_a_route_that_arrives_late_replaces_no_newer_one(
    control_plane: FixedControlPlane, proxy: RunningProxy
) -> None:
    old, new = (control_plane.lease(MAILBOX, f"10.0.0.{n}:7000", epoch=n) for n in (1, 2))
    async with pusher() as push:
        for each in (new, old, new, old):
            await push.push(proxy.address, change(each), proxy.proxy.push_key)
        assert proxy.proxy.routes() == [new]
        assert proxy.metric("route_updates", outcome="ignored") == 3
        removed = control_plane.expire(MAILBOX)
        await push.push(proxy.address, RouteChange(MAILBOX, removed, None), proxy.proxy.push_key)
        for each in (old, new):
            await push.push(proxy.address, change(each), proxy.proxy.push_key)
        await push.push(proxy.address, RouteChange(MAILBOX, old.position, None), proxy.proxy.push_key)
        assert proxy.proxy.routes() == []


async def test_a_push_that_was_lost_is_repaired_by_the_next_registration(
    control_plane: FixedControlPlane, proxy: RunningProxy
) -> None:
    lost = control_plane.lease("lost@one", "10.0.0.1:7000")
    later = control_plane.lease(MAILBOX, "10.0.0.2:7000")
    async with pusher() as push:
        await push.push(proxy.address, change(later), proxy.proxy.push_key)
    assert proxy.proxy.routes() == [later]
    await proxy.proxy.refresh()
    assert proxy.proxy.routes() == [later, lost]
    assert proxy.proxy.position == control_plane.position


@pytest.mark.parametrize("token", [None, "x" * 32, TOKEN + "x"])
@pytest.mark.parametrize("name", ["update_mailbox_route", "remove_mailbox_route"])
async def test_nobody_but_admins_changes_routes(proxy: RunningProxy, name: str, token: str | None) -> None:
    metadata = (
        ("postroom-position", "9"),
        *(() if token is None else (("authorization", f"Bearer {token}"),)),
    )
    request = (
        admin_pb.MailboxRouteRemoval(mailbox_id=MAILBOX)
        if name == "remove_mailbox_route"
        else admin_pb.MailboxRouteUpdate(
            mailbox_id=MAILBOX, proxy_id="one", runner_id="r", address="6.6.6.6:1", partition=1
        )
    )
    with pytest.raises(Unauthenticated) as refused:
        await ask(proxy.address, name, request, *metadata)
    assert "canary" not in str(refused.value)
    assert proxy.proxy.routes() == []


@pytest.mark.parametrize("key", [None, "", "guess", "k\u00f6y"])
@pytest.mark.parametrize("name", ["update_mailbox_route", "remove_mailbox_route"])
async def test_a_node_at_which_a_proxy_has_not_registered_changes_no_routes(
    control_plane: FixedControlPlane, proxy: RunningProxy, name: str, key: str | None
) -> None:
    route = control_plane.lease(MAILBOX, "10.0.0.1:7000")
    await proxy.proxy.refresh()
    metadata = [("authorization", f"Bearer {TOKEN}"), ("postroom-position", str(1 << 40))]
    if key is not None:
        metadata.append(("postroom-push-key", key.encode("ascii", "ignore").decode()))
    request = (
        admin_pb.MailboxRouteRemoval(mailbox_id=MAILBOX)
        if name == "remove_mailbox_route"
        else admin_pb.MailboxRouteUpdate(**VALID | {"address": "127.6.6.6:1"})
    )
    with pytest.raises(Forbidden, match="at which this proxy has registered"):
        await ask(proxy.address, name, request, *metadata)
    assert proxy.proxy.routes() == [route]


@pytest.mark.parametrize("name", ["update_mailbox_route", "remove_mailbox_route"])
async def test_a_push_beyond_the_end_of_the_log_does_not_outlive_the_next_registration(
    control_plane: FixedControlPlane, proxy: RunningProxy, name: str
) -> None:
    route = control_plane.lease(MAILBOX, "10.0.0.1:7000")
    await proxy.proxy.refresh()
    request = (
        admin_pb.MailboxRouteRemoval(mailbox_id=MAILBOX)
        if name == "remove_mailbox_route"
        else admin_pb.MailboxRouteUpdate(**VALID | {"address": "127.6.6.6:1"})
    )
    await ask(proxy.address, name, request, *authorized(proxy), ("postroom-position", str(1 << 40)))
    assert proxy.proxy.routes() != [route]
    for _ in range(2):  # the second brings the whole table
        await proxy.proxy.refresh()
    assert proxy.proxy.routes() == [route]
    newer = control_plane.lease(MAILBOX, "10.0.0.2:7000", epoch=2)
    async with pusher() as push:
        await push.push(proxy.address, change(newer), proxy.proxy.push_key)
    assert proxy.proxy.routes() == [newer]


VALID: dict[str, Any] = {
    "mailbox_id": MAILBOX,
    "proxy_id": "one",
    "runner_id": "runner-1",
    "address": "127.0.0.1:1",
    "partition": 0,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mailbox_id", ""),
        ("mailbox_id", "no-proxy"),
        ("mailbox_id", "a" * 10_000 + "@one"),
        ("proxy_id", ""),
        ("proxy_id", "a/b"),
        ("runner_id", "a b"),
        ("address", ""),
        ("address", "nowhere"),
        ("address", "127.0.0.1:0"),
        ("address", "dns:///evil:1"),
        ("partition", -1),
        ("partition", 256),
    ],
)
async def test_a_malformed_route_changes_nothing(proxy: RunningProxy, field: str, value: Any) -> None:
    request = admin_pb.MailboxRouteUpdate(**(VALID | {field: value}))
    metadata = (*authorized(proxy), ("postroom-position", "9"))
    with pytest.raises(InvalidRequest):
        await ask(proxy.address, "update_mailbox_route", request, *metadata)
    assert proxy.proxy.routes() == []


@pytest.mark.parametrize("position", ["", "-1", "1.5", "x", "9" * 40, "%EF%BC%91"])
async def test_a_malformed_position_changes_nothing(proxy: RunningProxy, position: str) -> None:
    request = admin_pb.MailboxRouteUpdate(**VALID)
    metadata = (*authorized(proxy), ("postroom-position", position))
    with pytest.raises(InvalidRequest, match="postroom-position must be a number"):
        await ask(proxy.address, "update_mailbox_route", request, *metadata)
    assert proxy.proxy.routes() == []


async def test_a_push_without_a_position_counts_as_the_newest(
    control_plane: FixedControlPlane, proxy: RunningProxy
) -> None:
    proxy.proxy.update_route(control_plane.lease(MAILBOX, "10.0.0.1:7000"))
    metadata = authorized(proxy)
    await ask(proxy.address, "update_mailbox_route", admin_pb.MailboxRouteUpdate(**VALID), *metadata)
    assert [each.address for each in proxy.proxy.routes()] == ["127.0.0.1:1"]
    removal = admin_pb.MailboxRouteRemoval(mailbox_id=MAILBOX)
    await ask(proxy.address, "remove_mailbox_route", removal, *metadata)
    assert proxy.proxy.routes() == []


async def test_a_proxy_grants_no_leases(proxy: RunningProxy) -> None:
    metadata = ("authorization", f"Bearer {TOKEN}")
    with pytest.raises(InvalidRequest, match="does not serve this call"):
        await ask(proxy.address, "acquire_lease", admin_pb.AcquireLeaseRequest(), metadata)


# -- routes for clients ---


async def test_anybody_may_ask_for_the_routes_of_a_namespace(
    control_plane: FixedControlPlane, proxy: RunningProxy
) -> None:
    routes = [control_plane.lease(f"acme@p{n}", f"10.0.0.{n}:7000", epoch=n) for n in (2, 1)]
    control_plane.lease("acme-2@p1", "10.0.0.9:7000")
    await proxy.proxy.refresh()
    answer = await ask(proxy.address, "resolve", cluster_pb.ResolveRequest(namespace="acme"))
    assert [(each.mailbox_id, each.address, each.epoch, each.position) for each in answer.routes] == [
        (each.mailbox, each.address, each.epoch, each.position) for each in reversed(routes)
    ]
    assert answer.position == control_plane.position
    nothing = await ask(proxy.address, "resolve", cluster_pb.ResolveRequest(namespace="none"))
    assert list(nothing.routes) == []


@pytest.mark.parametrize("namespace", ["", "a b", "acme@one", "*" * 200, "a/b"])
async def test_routes_are_told_of_one_namespace_at_a_time(proxy: RunningProxy, namespace: str) -> None:
    with pytest.raises(InvalidRequest, match="namespace must be"):
        await ask(proxy.address, "resolve", cluster_pb.ResolveRequest(namespace=namespace))


async def test_a_proxy_without_a_routing_table_tells_no_routes(control_plane: FixedControlPlane) -> None:
    control_plane.is_away = True
    async with running_proxy(control_plane, waits=False) as proxy:
        with pytest.raises(Unavailable, match="No admin has answered"):
            await ask(proxy.address, "resolve", cluster_pb.ResolveRequest(namespace="acme"))


# -- tokens of callers ---


async def test_a_token_is_verified_by_the_owner_and_not_by_the_proxy(
    control_plane: FixedControlPlane,
) -> None:
    async with controlled_mailbox() as place:
        session, name = place.control.open_session, place.mailbox.name
        async with (
            served(place.mailbox, "grpc", access=lambda *_: session) as url,
            running_proxy(control_plane) as proxy,
        ):
            control_plane.lease(name, url.removeprefix("grpc://"))

            async def send(token: str | None) -> None:
                async with connect_grpc(
                    proxy.address, timeout_ms=60_000, token=token, mailbox=name
                ) as client:
                    await client.send_message(message())

            refusals: list[type[PostroomError]] = [Unauthenticated, Unauthenticated, Forbidden]
            for token, refusal in zip(
                (None, "junk", place.issue(mailboxes=["other*"])), refusals, strict=True
            ):
                with pytest.raises(refusal):
                    await send(token)
            await send(place.issue())
            assert len(await place.mailbox.receive_messages("orders")) == 1
