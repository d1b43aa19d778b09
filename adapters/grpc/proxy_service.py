"""The services of a proxy besides `postroom.v1`: pushed routes, and routes for clients."""

import hmac
from collections.abc import Collection, Mapping

from postroom.adapters.grpc import admin_messages as messages
from postroom.adapters.grpc.admin.v1 import control_plane_pb2 as admin_pb
from postroom.adapters.grpc.cluster.v1 import cluster_pb2 as pb
from postroom.adapters.grpc.metadata import EPOCH_KEY, POSITION_KEY, PUSH_KEY, read_number
from postroom.adapters.grpc.methods import CONTROL_PLANE, ROUTING
from postroom.adapters.grpc.node_access import NodeAccess
from postroom.adapters.grpc.node_handlers import NodeCall, NodeHandlers
from postroom.application.cluster.proxy import Proxy
from postroom.domain.arguments import check_int
from postroom.domain.errors import Forbidden
from postroom.domain.lease.partitions import PARTITIONS
from postroom.domain.lease.routing import Route
from postroom.domain.names import check_address, check_mailbox, check_member

ROUTE_METHODS: Mapping[str, Collection[str]] = {
    "update_mailbox_route": ("admin",),
    "remove_mailbox_route": ("admin",),
}
"""Of `ControlPlane`, with the roles of their callers; admins serve the others."""


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
                "Only an admin at which this proxy has registered pushes routes to it; the call has not its "
                "postroom-push-key."
            )

    def _position(self, call: NodeCall) -> int:
        """Return the position of a change; one without any, as in RFC-049, counts as the newest."""
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
