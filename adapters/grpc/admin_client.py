"""Client of the control plane, which asks another admin when one does not answer."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import grpc

from postroom.adapters.grpc import admin_messages as messages
from postroom.adapters.grpc.admin.v1 import control_plane_pb2 as admin_pb
from postroom.adapters.grpc.calls import (
    ACQUISITION_KEY,
    CONTROL_PLANE,
    EPOCH_KEY,
    INTERVAL_KEY,
    LOG_EPOCH_KEY,
    MEMBERSHIP,
    REMAINING_KEY,
    RUNNER_KEY,
    TTL_KEY,
    error_of,
    read_metadata,
    read_number,
    read_text,
)
from postroom.adapters.grpc.cluster.v1 import cluster_pb2 as pb
from postroom.adapters.grpc.node_access import NodeAccess
from postroom.application.ports.control_plane import (
    Heartbeat,
    LeaseGrant,
    LeaseRequest,
    LeaseSummary,
    Member,
    ProxyRegistration,
    RoutingSnapshot,
    RunnerRegistration,
)
from postroom.domain.errors import InvalidRequest, LeaseHeld, LeaseLost, Unavailable
from postroom.domain.lease.lease import LeasePolicy
from postroom.domain.lease.partitions import partition_of

ATTEMPT_MS = 1_500
"""Time in which an admin must answer before the next one is asked; a runner that stops has 5 s in all."""
MAX_ADMINS = 32
_METHODS = CONTROL_PLANE | MEMBERSHIP

Metadata = Sequence[tuple[str, str]]


class _Admin(NamedTuple):
    where: str
    channel: grpc.aio.Channel


@asynccontextmanager
async def connect_admins(
    admins: Sequence[str], access: NodeAccess | None = None, *, attempt_ms: int = ATTEMPT_MS
) -> AsyncIterator["ControlPlaneClient"]:
    """Use a control plane for as long as the context lasts.

    Arguments:
        admins: `host:port` of each admin.
        access: credentials of this process; None sends none.
        attempt_ms: time in which an admin must answer before the next one is asked.

    Raises: InvalidRequest without admins, and for unusable certificates.
    """
    if not 1 <= len(admins) <= MAX_ADMINS:
        raise InvalidRequest(f"Name 1 to {MAX_ADMINS} admins; there were {len(admins)}.")
    access = access or NodeAccess()
    async with AsyncExitStack() as opened:
        channels = [
            _Admin(f"{access.scheme}://{each}", await opened.enter_async_context(access.open_channel(each)))
            for each in admins
        ]
        yield ControlPlaneClient(channels, access, attempt_ms)


class ControlPlaneClient:
    """`LeaseAdmin` over the gRPC channels of admins.

    A request goes to the admin that answered last. When it does not answer in time, or can't use its lease
    store, the others are asked in turn, each once. So a request may be served twice, which changes nothing.
    """

    def __init__(self, admins: Sequence[_Admin], access: NodeAccess, attempt_ms: int) -> None:
        self._admins = admins
        self._access = access
        self._seconds = attempt_ms / 1_000
        self._preferred = 0

    async def acquire_lease(self, request: LeaseRequest) -> LeaseGrant:
        """Acquire the lease of a mailbox."""
        partition = partition_of(request.mailbox) if request.partition is None else request.partition
        message = admin_pb.AcquireLeaseRequest(
            mailbox_id=request.mailbox,
            runner_id=request.runner,
            proxy_id=request.proxy,
            partition=partition,
            address=request.address,
            ttl_seconds=_seconds(request.ttl_ms),
        )
        metadata = [
            (ACQUISITION_KEY, request.acquisition),
            (LOG_EPOCH_KEY, str(request.log_epoch)),
            *_optional(TTL_KEY, request.ttl_ms),
        ]
        response, trailers = await self._call("acquire_lease", message, metadata)
        if not response.success:
            if RUNNER_KEY in trailers:
                runner = read_text(trailers[RUNNER_KEY])
                raise LeaseHeld(request.mailbox, runner, read_number(trailers, REMAINING_KEY))
            raise LeaseLost(request.mailbox, response.message)
        return _grant(trailers, messages.read_time(response.lease_expires), request.ttl_ms, None)

    async def renew_lease(self, heartbeat: Heartbeat) -> LeaseGrant:
        """Renew a lease."""
        message = admin_pb.MailboxHeartbeatRequest(
            mailbox_id=heartbeat.mailbox,
            runner_id=heartbeat.runner,
            proxy_id=heartbeat.proxy,
            events_stored=heartbeat.events_stored,
            queries_served=heartbeat.queries_served,
            storage_size_bytes=heartbeat.storage_size_bytes,
            status=heartbeat.status,
        )
        response, trailers = await self._call(
            "mailbox_heartbeat", message, _optional(EPOCH_KEY, heartbeat.epoch)
        )
        if not response.lease_renewed:
            raise LeaseLost(heartbeat.mailbox, response.message)
        return _grant(trailers, messages.read_time(response.new_expiration), None, heartbeat.epoch)

    async def release_lease(self, mailbox: str, runner: str, epoch: int | None = None) -> None:
        """Release a lease."""
        message = admin_pb.ReleaseLeaseRequest(mailbox_id=mailbox, runner_id=runner)
        response, _ = await self._call("release_lease", message, _optional(EPOCH_KEY, epoch))
        if not response.released:
            raise LeaseLost(mailbox, response.message)

    async def register_proxy(
        self, proxy: str, address: str, position: int = 0, push_key: str = ""
    ) -> ProxyRegistration:
        """Register a proxy."""
        message = pb.RegisterProxyRequest(
            proxy_id=proxy, address=address, position=position, push_key=push_key
        )
        return messages.read_proxy_registration((await self._call("register_proxy", message))[0])

    async def register_runner(
        self, runner: str, proxy: str, address: str, mailboxes: Sequence[str] = ()
    ) -> RunnerRegistration:
        """Register a runner."""
        message = pb.RegisterRunnerRequest(
            runner_id=runner, proxy_id=proxy, address=address, mailbox_ids=mailboxes
        )
        return messages.read_runner_registration((await self._call("register_runner", message))[0])

    async def leave(self, *, proxy: str | None = None, runner: str | None = None) -> None:
        """End the registration of a proxy or runner."""
        await self._call("leave", pb.LeaveRequest(proxy_id=proxy, runner_id=runner))

    async def list_leases(self, mailbox: str | None = None) -> list[LeaseSummary]:
        """Return the leases by mailbox."""
        response, _ = await self._call("list_leases", pb.ListLeasesRequest(mailbox_id=mailbox))
        return [messages.read_lease(each) for each in response.leases]

    async def list_routes(self) -> RoutingSnapshot:
        """Return the routing table."""
        response, _ = await self._call("list_routes", pb.ListRoutesRequest())
        return messages.read_table(response.table)

    async def list_members(self) -> list[Member]:
        """Return the proxies and runners."""
        response, _ = await self._call("list_members", pb.ListMembersRequest())
        return [messages.read_member(each) for each in response.members]

    async def _call(self, name: str, request: Any, metadata: Metadata = ()) -> tuple[Any, dict[str, str]]:
        """Return the answer of the first admin that gives one, and its trailing metadata."""
        first, failures = self._preferred, []
        for number in range(len(self._admins)):
            index = (first + number) % len(self._admins)
            try:
                answer = await self._attempt(self._admins[index], name, request, metadata)
            except Unavailable as error:
                failures.append(error)
                self._pass_over(index)
            except asyncio.CancelledError:  # a short lease's heartbeat has less time than an attempt
                self._pass_over(index)
                raise
            else:
                self._preferred = index
                return answer
        if len(failures) == 1:
            raise failures[0]
        texts = " ".join(dict.fromkeys(map(str, failures)))
        raise Unavailable(f"None of {len(failures)} admins answered: {texts}", failures[0].retry_after_ms)

    def _pass_over(self, index: int) -> None:
        """Ask the next admin first from now on, unless a concurrent call has moved on already."""
        if self._preferred == index:
            self._preferred = (index + 1) % len(self._admins)

    async def _attempt(
        self, admin: _Admin, name: str, request: Any, metadata: Metadata
    ) -> tuple[Any, dict[str, str]]:
        method = _METHODS[name]
        call = admin.channel.unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )(request, timeout=self._seconds, metadata=(*self._access.metadata, *metadata))
        try:
            return await call, read_metadata(await call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            raise error_of(error, admin.where) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Closing a channel cancels its calls, but not their callers.
            raise Unavailable(f"The connection to {admin.where} was closed.") from None


def _optional(key: str, number: int | None) -> list[tuple[str, str]]:
    return [] if number is None else [(key, str(number))]


def _seconds(ttl_ms: int | None) -> int:
    """Return a TTL as RFC-049's message has it: whole seconds, 0 for the TTL of the namespace."""
    return 0 if ttl_ms is None else max(1, ttl_ms // 1_000)


def _grant(
    trailers: dict[str, str], expires_at: int, requested_ttl_ms: int | None, epoch: int | None
) -> LeaseGrant:
    """Return the granted lease; admins of other implementations return only its expiry."""
    default = LeasePolicy()
    ttl_ms = read_number(trailers, TTL_KEY) or requested_ttl_ms or default.ttl_ms
    granted = read_number(trailers, EPOCH_KEY)
    if granted is None:
        granted = epoch
    if granted is None:
        raise InvalidRequest(
            "The admin granted a lease without an epoch, which fences former owners; use postroom admin."
        )
    return LeaseGrant(
        epoch=granted,
        ttl_ms=ttl_ms,
        heartbeat_interval_ms=read_number(trailers, INTERVAL_KEY) or max(1, ttl_ms // 5),
        expires_at=expires_at,
    )
