"""A caller that knows only the contract of the gRPC interface, and a server for it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status as RpcStatus

from postroom.adapters.grpc.calls import METHODS
from postroom.adapters.grpc.server import grpc_surface
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.application.mailbox.settle import DeliveryWindows
from postroom.application.operations.mailbox import Mailbox
from postroom.application.page import Page
from postroom.application.service import Service, SurfaceMetrics, WriteHealth, unrestricted
from postroom.domain.errors import NotFound
from postroom.domain.search import EventFilter, FoundMessage
from tests.support.waiting import SECONDS


async def no_search(filter_: EventFilter) -> Page[FoundMessage]:
    raise NotFound("There are no read models.")


def serve_grpc(
    mailbox: Mailbox, address: str, search: Callable[[EventFilter], Awaitable[Page[FoundMessage]]] = no_search
) -> AbstractAsyncContextManager[str]:
    session = unrestricted(mailbox, search)
    service = Service(mailbox, session, asyncio.Event(), DeliveryWindows(), SurfaceMetrics(), WriteHealth())
    return grpc_surface(address)(service)


class Caller:
    """Calls of one channel, by the names of their methods."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = METHODS[name]
        make = self.channel.unary_stream if method.is_stream else self.channel.unary_unary
        return make(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Caller]:
    target = url.removeprefix("grpc://").removeprefix("grpc+")
    async with grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield Caller(channel)


def new(payload: bytes = b"hello", topic: str = "orders", **fields: Any) -> pb.SendRequest:
    return pb.SendRequest(message=pb.NewMessage(topic=topic, payload=payload, **fields))


def details(error: grpc.aio.AioRpcError) -> tuple[ErrorInfo, RetryInfo | None]:
    trailers = dict(error.trailing_metadata() or ())
    status = RpcStatus.FromString(trailers["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    info, retry = ErrorInfo(), RetryInfo()
    assert status.details[0].Unpack(info)
    return info, retry if len(status.details) > 1 and status.details[1].Unpack(retry) else None


async def read(stream: Any, kind: str = "delivery") -> Any:
    """Return the next item of a kind; heartbeats are passed over unless they are asked for."""
    async with asyncio.timeout(SECONDS):
        while True:
            item = await stream.read()
            assert item is not grpc.aio.EOF
            if item.WhichOneof("item") == kind:
                return getattr(item, kind)
            assert item.WhichOneof("item") == "heartbeat", item
