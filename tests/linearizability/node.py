"""An admin or a runner as a process, which notes in a journal what it asked and was answered.

    python -m tests.linearizability.node SETTINGS

SETTINGS is a JSON object; see `Settings`.
"""

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from postroom.adapters.compose import OwnerSettings
from postroom.adapters.compose.control_plane import open_lease_store
from postroom.adapters.compose.runner import RunnerSettings, open_runner
from postroom.adapters.compose.serve import unrestricted
from postroom.adapters.grpc.admin_client import ControlPlaneClient, connect_admins
from postroom.adapters.grpc.admin_service import admin_handlers
from postroom.adapters.grpc.node_access import NodeAccess
from postroom.adapters.grpc.proxy_service import GrpcRoutePush
from postroom.adapters.grpc.server import serve_handlers
from postroom.adapters.jetstream.lease_store import JetStreamLeaseStore
from postroom.adapters.jetstream.settings import LeaseStreamSettings
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.sockets.address import resolve
from postroom.adapters.system.clock import SystemClock
from postroom.application.cluster.control_plane import ControlPlane
from postroom.application.cluster.control_plane_metrics import ControlPlaneSettings, LeasePolicies
from postroom.application.cluster.lease_follower import BlockingThreads
from postroom.application.ports.control_plane import Heartbeat, LeaseGrant, LeaseRequest
from postroom.application.ports.lease_store import LeaseStore
from postroom.domain.errors import LeaseHeld, LeaseLost
from postroom.domain.lease.lease import LeasePolicy
from postroom.domain.settings import SettingsChanges
from tests.linearizability.defects import DEFECTS
from tests.linearizability.history import Recorder
from tests.linearizability.models import REFUSED
from tests.support.servers.process import end_with_parent

TOPIC = "orders"
SECTION = {"max_attempts": 1_000, "visibility_ms": 1_000}
TOKEN = "t" * 32
LEASE = LeasePolicy(ttl_ms=2_000, heartbeat_interval_ms=500, grace_period_ms=500)
OWN_SECONDS = 0.05


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is.

    Arguments:
        listen: `host:port` of its gRPC server.
        leases: of an admin: the lease store; with `monitoring`, the URLs of NATS servers.
        monitoring: addresses of the servers' monitoring, if they have the stores of the process.
        admins: of a runner: their addresses.
        store: of a runner: its messages.
        journal: of a runner: file for its history.
        start: number of this start; each has a journal of its own.
        group: see `join_group`.
        defect: of a runner: name of a defect that is put into it; see `defects`.
    """

    name: str
    listen: str
    leases: str = ""
    monitoring: tuple[str, ...] = ()
    admins: tuple[str, ...] = ()
    store: str = ""
    mailboxes: tuple[str, ...] = ()
    journal: str = ""
    start: int = 1
    group: int = 0
    defect: str = ""


def join_group(group: int) -> None:
    """Have the sockets of this process belong to a group, by which a packet filter can tell them."""
    if group:
        os.setegid(group)
        end_with_parent()  # the change of the group has cleared that


def open_leases(settings: Settings) -> LeaseStore:
    if not settings.monitoring:
        return open_lease_store(settings.leases, durability="relaxed")
    nats = NatsSettings(url=settings.leases)
    return JetStreamLeaseStore(LeaseStreamSettings(nats=nats, monitoring=settings.monitoring))


@asynccontextmanager
async def admin(settings: Settings) -> AsyncIterator[None]:
    """Be an admin while the context lasts."""
    access = NodeAccess(TOKEN)
    blocking = BlockingThreads("admin", 5_000)
    async with AsyncExitStack() as opened:
        store = await asyncio.to_thread(open_leases, settings)
        opened.callback(store.close)
        opened.callback(blocking.close)
        control_plane = ControlPlane(
            store,
            SystemClock(),
            GrpcRoutePush(access),
            blocking,
            LeasePolicies(LEASE),
            ControlPlaneSettings(expiry_ms=100),
        )
        await opened.enter_async_context(control_plane.running())
        handlers = admin_handlers(control_plane, access, uuid.uuid4)
        address = resolve(settings.listen, is_protected=True)
        await opened.enter_async_context(serve_handlers(address, handlers))
        yield


class RecordedAdmin:
    """`LeaseAdmin` that notes the history of leases."""

    def __init__(self, client: ControlPlaneClient, recorder: Recorder) -> None:
        self._client = client
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def acquire_lease(self, request: LeaseRequest) -> LeaseGrant:
        call = self._recorder.call(request.mailbox, "acquire", [request.runner, request.acquisition])
        try:
            grant = await self._client.acquire_lease(request)
        except (LeaseHeld, LeaseLost):
            self._recorder.answer(call, REFUSED)
            raise
        self._recorder.answer(call, grant.epoch)
        return grant

    async def renew_lease(self, heartbeat: Heartbeat) -> LeaseGrant:
        call = self._recorder.call(heartbeat.mailbox, "renew", [heartbeat.runner, heartbeat.epoch])
        try:
            grant = await self._client.renew_lease(heartbeat)
        except LeaseLost:
            self._recorder.answer(call, REFUSED)
            raise
        self._recorder.answer(call, grant.epoch)
        return grant

    async def release_lease(self, mailbox: str, runner: str, epoch: int | None = None) -> None:
        call = self._recorder.call(mailbox, "release", [runner, epoch])
        try:
            await self._client.release_lease(mailbox, runner, epoch)
        except LeaseLost:
            self._recorder.answer(call, REFUSED)
            raise
        self._recorder.answer(call, True)


def note_ownership(open_: Any, runner: str, recorder: Recorder) -> Any:
    """Return `MailboxHost.open` that notes again and again that the runner takes its lease for valid."""

    @asynccontextmanager
    async def opening(mailbox: str, epoch: int, may_append: Callable[[], bool]) -> AsyncIterator[Any]:
        async def note() -> None:
            while True:
                call = recorder.call(mailbox, "own", [runner, epoch])
                recorder.answer(call, may_append())
                await asyncio.sleep(OWN_SECONDS)

        noting = asyncio.create_task(note())
        try:
            async with open_(mailbox, epoch, may_append) as hosted:
                yield hosted
        finally:
            noting.cancel()

    return opening


@asynccontextmanager
async def runner(settings: Settings) -> AsyncIterator[None]:
    """Be a runner while the context lasts."""
    async with AsyncExitStack() as opened:
        journal = Path(f"{settings.journal}-{settings.start}.journal")
        recorder = opened.enter_context(Recorder(journal, settings.name))
        client = await opened.enter_async_context(
            connect_admins(settings.admins, NodeAccess(TOKEN), attempt_ms=600)
        )
        # Killed processes lose nothing that was written; only servers are asked whether they sync it.
        durability: Literal["full", "relaxed"] = "full" if settings.monitoring else "relaxed"
        identity = RunnerSettings(
            runner=settings.name,
            proxy="p",
            mailboxes=settings.mailboxes,
            listen=settings.listen,
            owner=OwnerSettings(durability=durability, settings=SettingsChanges(topics={TOPIC: SECTION})),
        )
        running: Any = await opened.enter_async_context(
            open_runner(settings.store, identity, unrestricted, RecordedAdmin(client, recorder))
        )
        running.host.open = note_ownership(running.host.open, settings.name, recorder)
        task = asyncio.create_task(running.runner.run())
        try:
            yield
        finally:
            running.runner.stop()
            await task


async def main(settings: Settings) -> None:
    join_group(settings.group)
    if settings.defect:
        DEFECTS[settings.defect]()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with admin(settings) if settings.leases else runner(settings):
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Settings)))
