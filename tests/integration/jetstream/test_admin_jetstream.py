"""Admins over one JetStream stream."""

from contextlib import AsyncExitStack

import pytest

from postroom.adapters.compose.control_plane import LeaseStores, serve_admin
from postroom.adapters.grpc.admin_client import connect_admins
from postroom.application.ports.control_plane import Heartbeat
from postroom.domain.errors import LeaseHeld
from tests.integration.jetstream.conftest import OpenLeaseStore
from tests.support.lease_requests import lease_request
from tests.support.servers.nats import NatsServer


async def test_two_admins_of_one_stream_agree(nats_server: NatsServer, open_store: OpenLeaseStore) -> None:
    async with AsyncExitStack() as opened:
        enter = opened.enter_async_context
        admins = [
            await enter(serve_admin(LeaseStores(open_store(nats_server.url)), "127.0.0.1:0"))
            for _ in range(2)
        ]
        one, two = [
            await enter(connect_admins([each.url.partition("://")[2]], attempt_ms=60_000)) for each in admins
        ]
        assert (await one.acquire_lease(lease_request())).epoch == 1
        with pytest.raises(LeaseHeld):
            await two.acquire_lease(lease_request(runner="runner-2"))
        heartbeat = Heartbeat(mailbox="orders@proxy-1", runner="runner-1", proxy="proxy-1", epoch=1)
        for client in (two, one) * 3:
            await client.renew_lease(heartbeat)
        await two.register_proxy("proxy-1", "127.0.0.1:7101")
        assert [each.runner for each in (await two.list_routes()).routes] == ["runner-1"]
        await one.release_lease("orders@proxy-1", "runner-1", 1)
        assert (await two.list_routes()).routes == ()
        assert [each.partitions for each in await one.list_members()] == [((0, 255),)]
