"""Connections without a valid token: gRPC servers close them soon, and they keep nobody out."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.connect import connect_remote
from postroom.adapters.compose.control_plane import (
    LeaseStores,
    connect_control_plane,
    open_node_access,
    serve_admin,
)
from postroom.adapters.compose.serve import ConnectionLimits, HttpSettings, SurfaceProtection
from postroom.adapters.grpc import connections
from postroom.adapters.grpc.connections import GrpcConnections
from postroom.adapters.memory.lease_store import MemoryLeaseStore
from postroom.application.threads import background_task
from tests.support.access import controlled_mailbox
from tests.support.lease_requests import lease_request
from tests.support.messages import message
from tests.support.surfaces import served
from tests.support.waiting import SECONDS, until

LONG_MS = 600_000
READY = grpc.ChannelConnectivity.READY


@asynccontextmanager
async def stranger(url: str) -> AsyncIterator[grpc.aio.Channel]:
    """Yield a connection of its own whose client only asks whether the server is healthy."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.keepalive_time_ms", LONG_MS)]
    async with grpc.aio.insecure_channel(url.partition("://")[2], options=options) as channel:
        stub: Any = HealthStub(channel)
        await stub.Check(HealthCheckRequest(), timeout=SECONDS, wait_for_ready=True)
        yield channel


async def wait_until_closed(channel: grpc.aio.Channel) -> None:
    """Return when the server has closed a connection."""
    async with asyncio.timeout(SECONDS):
        while (state := channel.get_state()) is READY:
            await channel.wait_for_state_change(state)


async def test_a_connection_without_a_token_ends_before_one_with_a_token() -> None:
    async with controlled_mailbox() as place:
        settings = HttpSettings(unauthenticated_timeout_ms=300)
        access = place.control.open_session
        async with (
            served(place.mailbox, "grpc", settings=settings, access=lambda *_: access) as url,
            connect_remote(url, token=place.issue(), timeout_ms=20_000) as known,
        ):
            await known.send_message(message())
            async with stranger(url) as channel:
                await wait_until_closed(channel)
            await known.send_message(message())


async def test_connections_above_the_share_of_an_address_are_closed(mailbox: OwnedMailbox) -> None:
    settings = HttpSettings(max_unauthenticated_per_address=2, unauthenticated_timeout_ms=LONG_MS)
    async with served(mailbox, "grpc", settings=settings) as url, AsyncExitStack() as opened:
        channels = [await opened.enter_async_context(stranger(url)) for _ in range(4)]
        await until(lambda: [each.get_state() for each in channels].count(READY) == 2)


async def test_one_client_without_a_token_shuts_nobody_out(mailbox: OwnedMailbox) -> None:
    settings = HttpSettings(max_connections=12, unauthenticated_timeout_ms=LONG_MS)
    async with (
        served(mailbox, "grpc", settings=settings) as url,
        AsyncExitStack() as opened,
        connect_remote(url, timeout_ms=20_000) as before,
    ):
        await before.send_message(message())
        for _ in range(30):
            await opened.enter_async_context(stranger(url))
        async with connect_remote(url, timeout_ms=20_000) as after:
            await after.send_message(message())
        await before.send_message(message())


async def test_an_admin_closes_connections_without_the_node_token() -> None:
    access = open_node_access("node-" + "t" * 40, None)
    protection = SurfaceProtection(limits=ConnectionLimits(unauthenticated_timeout_ms=300))
    stores = LeaseStores(MemoryLeaseStore())
    async with (
        serve_admin(stores, "127.0.0.1:0", access=access, protection=protection) as admin,
        connect_control_plane([admin.url.partition("://")[2]], access) as control_plane,
    ):
        await control_plane.acquire_lease(lease_request())
        async with stranger(admin.url) as channel:
            await wait_until_closed(channel)
        assert await control_plane.list_leases()


async def test_the_wait_for_clients_ends_with_one_and_leaves_no_files_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.001)
    looks: list[None] = []
    monkeypatch.setattr(GrpcConnections, "look", lambda self: looks.append(None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watched = GrpcConnections(listener.getsockname()[1])
        before = len(os.listdir("/dev/fd"))
        monkeypatch.setattr(connections, "IDLE_SECONDS", 0.001)
        async with background_task(watched.run()):
            await until(lambda: len(looks) > 20)
        assert len(os.listdir("/dev/fd")) == before
        monkeypatch.setattr(connections, "IDLE_SECONDS", 3_600.0)
        looks.clear()
        async with background_task(watched.run()):
            await asyncio.sleep(0.05)
            assert not looks
            with socket.create_connection(listener.getsockname()):
                await until(lambda: looks)


@pytest.mark.parametrize("peer", ["unknown", ""])
def test_a_call_whose_connection_has_ended_names_no_client(peer: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watched = GrpcConnections(listener.getsockname()[1])
        with socket.create_connection(listener.getsockname()) as client, listener.accept()[0]:
            watched.note(peer)
            watched.note(f"ipv4:127.0.0.1:{client.getsockname()[1]}")
            watched.forget(peer)
            watched.look()
