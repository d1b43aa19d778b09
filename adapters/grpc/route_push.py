"""Pushing changes of routes to proxies over gRPC (RFC-049 Routing Table Distribution)."""

import asyncio
from collections.abc import Mapping

import grpc

from postroom.adapters.grpc.admin.v1 import control_plane_pb2 as pb
from postroom.adapters.grpc.metadata import EPOCH_KEY, POSITION_KEY, PUSH_KEY
from postroom.adapters.grpc.methods import CONTROL_PLANE, Method
from postroom.adapters.grpc.node_access import NodeAccess
from postroom.adapters.grpc.status import error_of
from postroom.application.ports.control_plane import RouteChange
from postroom.domain.errors import Unavailable

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
                channel, where, _REMOVE, pb.MailboxRouteRemoval(mailbox_id=change.mailbox), metadata
            )
            return
        metadata[EPOCH_KEY] = str(route.epoch)
        update = pb.MailboxRouteUpdate(
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
