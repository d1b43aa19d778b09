"""Routes of a proxy: the service that receives and returns them, and the client that pushes changes."""

import asyncio
import hmac
from collections.abc import Collection, Mapping

import grpc

from postroom.adapters.grpc import admin_messages as messages
from postroom.adapters.grpc.admin.v1 import control_plane_pb2 as admin_pb
from postroom.adapters.grpc.calls import (
    CONTROL_PLANE,
    EPOCH_KEY,
    POSITION_KEY,
    PUSH_KEY,
    ROUTING,
    Method,
    error_of,
    read_number,
)
from postroom.adapters.grpc.cluster.v1 import cluster_pb2 as pb
from postroom.adapters.grpc.node_access import NodeAccess, NodeCall, NodeHandlers
from postroom.application.cluster.proxy import Proxy
from postroom.application.ports.control_plane import RouteChange
from postroom.domain.arguments import check_int
from postroom.domain.errors import Forbidden, Unavailable
from postroom.domain.lease.partitions import PARTITIONS
from postroom.domain.lease.routing import Route
from postroom.domain.names import check_address, check_mailbox, check_member

ROUTE_METHODS: Mapping[str, Collection[str]] = {
    "update_mailbox_route": ("admin",),
    "remove_mailbox_route": ("admin",),
}
"""Methods of `ControlPlane` that proxies serve, with the roles of their callers; admins serve the others."""


def proxy_handlers(proxy: Proxy, access: NodeAccess) -> list[NodeHandlers]:
    """Return the handlers of a proxy's services; anybody may ask for routes."""
    routes, routing = _RouteService(proxy), _RoutingService(proxy)
    return [
        NodeHandlers(
            {name: getattr(routes, name) for name in ROUTE_METHODS}, CONTROL_PLANE, access, ROUTE_METHODS
        ),
        NodeHandlers({"resolve": routing.resolve}, ROUTING, access, {}),
    ]


class _RouteService:
    """The methods of `ControlPlane` that admins call."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def update_mailbox_route(
        self, request: admin_pb.MailboxRouteUpdate, call: NodeCall
    ) -> admin_pb.MailboxRouteUpdateAck:
        """Add or replace a route; an outdated one is ignored."""
        self._check_admin(call)
        mailbox = check_mailbox(request.mailbox_id)
        self._proxy.update_route(
            Route(
                mailbox=mailbox,
                proxy=check_member("proxy_id", request.proxy_id),
                runner=check_member("runner_id", request.runner_id),
                address=check_address("address", request.address),
                partition=check_int("partition", request.partition, 0, PARTITIONS - 1),
                position=self._position(call),
                epoch=read_number(call.metadata, EPOCH_KEY) or 0,
            )
        )
        return admin_pb.MailboxRouteUpdateAck(success=True)

    async def remove_mailbox_route(
        self, request: admin_pb.MailboxRouteRemoval, call: NodeCall
    ) -> admin_pb.MailboxRouteRemovalAck:
        """Remove a route, unless the table has a newer one."""
        self._check_admin(call)
        self._proxy.remove_route(check_mailbox(request.mailbox_id), self._position(call))
        return admin_pb.MailboxRouteRemovalAck(success=True)

    def _check_admin(self, call: NodeCall) -> None:
        """Raise Forbidden unless the caller is an admin at which this proxy has registered."""
        key = call.metadata.get(PUSH_KEY, "")
        if not hmac.compare_digest(key.encode("utf-8", "replace"), self._proxy.push_key.encode()):
            raise Forbidden(
                "Only an admin at which this proxy has registered pushes routes to it; the call lacks its "
                "postroom-push-key."
            )

    def _position(self, call: NodeCall) -> int:
        """Return the position of a change; without a position, as in RFC-049, it counts as the newest."""
        position = read_number(call.metadata, POSITION_KEY)
        return self._proxy.next_position() if position is None else position


class _RoutingService:
    """The service `Routing`."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def resolve(self, request: pb.ResolveRequest, call: NodeCall) -> pb.ResolveResponse:
        """Return the routes of a namespace."""
        routes = self._proxy.routes(check_member("namespace", request.namespace))
        return pb.ResolveResponse(position=self._proxy.position, routes=map(messages.write_route, routes))


_UPDATE: Method = CONTROL_PLANE["update_mailbox_route"]
_REMOVE: Method = CONTROL_PLANE["remove_mailbox_route"]


class GrpcRoutePush:
    """`RoutePush` over a gRPC channel to each proxy, which is opened with its first push."""

    def __init__(self, access: NodeAccess) -> None:
        self._access = access
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def push(self, address: str, change: RouteChange, key: str) -> None:
        """Tell the proxy at an address of a change."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._access.open_channel(address)
        where = f"{self._access.scheme}://{address}"
        metadata = {POSITION_KEY: str(change.position), PUSH_KEY: key}
        route = change.route
        if route is None:
            await self._call(
                channel, where, _REMOVE, admin_pb.MailboxRouteRemoval(mailbox_id=change.mailbox), metadata
            )
            return
        metadata[EPOCH_KEY] = str(route.epoch)
        update = admin_pb.MailboxRouteUpdate(
            mailbox_id=route.mailbox,
            proxy_id=route.proxy,
            runner_id=route.runner,
            address=route.address,
            partition=route.partition,
        )
        await self._call(channel, where, _UPDATE, update, metadata)

    async def forget(self, address: str) -> None:
        """Close the connection to a proxy that is gone."""
        if (channel := self._channels.pop(address, None)) is not None:
            await channel.close()

    async def _call(
        self,
        channel: grpc.aio.Channel,
        where: str,
        method: Method,
        request: object,
        metadata: Mapping[str, str],
    ) -> None:
        call = channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        try:
            await call(request, metadata=(*self._access.metadata, *metadata.items()))
        except grpc.aio.AioRpcError as error:
            raise error_of(error, where) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unavailable(f"The connection to {where} was closed.") from None
