"""The services of an admin: `prism.admin.v1.ControlPlane` and `postroom.cluster.v1.Membership`."""

from collections.abc import Callable, Collection, Mapping

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
    read_number,
    write_text,
)
from postroom.adapters.grpc.cluster.v1 import cluster_pb2 as pb
from postroom.adapters.grpc.node_access import ROLES, NodeAccess, NodeCall, NodeHandlers
from postroom.application.ports.control_plane import Heartbeat, LeaseAdmin, LeaseGrant, LeaseRequest
from postroom.domain.errors import Forbidden, InvalidRequest, LeaseHeld, LeaseLost
from postroom.domain.names import check_address

LEASE_METHODS: Mapping[str, Collection[str]] = {
    "acquire_lease": ("runner",),
    "release_lease": ("runner", "admin"),
    "mailbox_heartbeat": ("runner",),
}
"""Methods of `ControlPlane` that admins serve, with the roles of their callers; proxies serve the others."""
MEMBERSHIP_ROLES: Mapping[str, Collection[str]] = {
    "register_proxy": ("proxy",),
    "register_runner": ("runner",),
    "leave": ("proxy", "runner"),
    "list_leases": ROLES,
    "list_routes": ROLES,
    "list_members": ROLES,
}
MAX_TTL_SECONDS = 1 << 40
"""Maximum TTL in a request, which is shortened to the TTL of the namespace."""


def admin_handlers(
    admin: LeaseAdmin, access: NodeAccess, new_acquisition: Callable[[], object]
) -> list[NodeHandlers]:
    """Return the handlers of an admin's services.

    Arguments:
        new_acquisition: returns a new UUID, for runners that send none.
    """
    leases, members = _LeaseService(admin, access, new_acquisition), _MembershipService(admin, access)
    return [
        NodeHandlers(
            {name: getattr(leases, name) for name in LEASE_METHODS}, CONTROL_PLANE, access, LEASE_METHODS
        ),
        NodeHandlers(
            {name: getattr(members, name) for name in MEMBERSHIP}, MEMBERSHIP, access, MEMBERSHIP_ROLES
        ),
    ]


class _LeaseService:
    """The methods of `ControlPlane` that runners call; a refusal is an answer, as in RFC-049."""

    def __init__(self, admin: LeaseAdmin, access: NodeAccess, new_acquisition: Callable[[], object]) -> None:
        self._admin = admin
        self._access = access
        self._new_acquisition = new_acquisition

    async def acquire_lease(
        self, request: admin_pb.AcquireLeaseRequest, call: NodeCall
    ) -> admin_pb.AcquireLeaseResponse:
        """Acquire a lease."""
        if not 0 <= request.ttl_seconds <= MAX_TTL_SECONDS:
            raise InvalidRequest(
                f"ttl_seconds must be from 0, for the TTL of the namespace, to {MAX_TTL_SECONDS}; it was "
                f"{request.ttl_seconds}."
            )
        _check_address(self._access, request.address, ("runner", "proxy"))
        try:
            grant = await self._admin.acquire_lease(
                LeaseRequest(
                    mailbox=request.mailbox_id,
                    runner=request.runner_id,
                    proxy=request.proxy_id,
                    address=request.address,
                    acquisition=call.metadata.get(ACQUISITION_KEY) or str(self._new_acquisition()),
                    partition=request.partition,
                    log_epoch=read_number(call.metadata, LOG_EPOCH_KEY) or 0,
                    ttl_ms=request.ttl_seconds * 1_000 or None,
                )
            )
        except LeaseHeld as error:
            call.trailers[RUNNER_KEY] = write_text(error.runner)
            if error.remaining_ms is not None:
                call.trailers[REMAINING_KEY] = str(error.remaining_ms)
            return admin_pb.AcquireLeaseResponse(
                success=False, message=f"mailbox already leased by {error.runner}"
            )
        except LeaseLost as error:
            return admin_pb.AcquireLeaseResponse(success=False, message=error.reason)
        _write_grant(grant, call)
        return admin_pb.AcquireLeaseResponse(
            success=True, lease_expires=messages.write_time(grant.expires_at)
        )

    async def release_lease(
        self, request: admin_pb.ReleaseLeaseRequest, call: NodeCall
    ) -> admin_pb.ReleaseLeaseResponse:
        """Release a lease."""
        epoch = read_number(call.metadata, EPOCH_KEY)
        try:
            await self._admin.release_lease(request.mailbox_id, request.runner_id, epoch)
        except LeaseLost as error:
            return admin_pb.ReleaseLeaseResponse(released=False, message=error.reason)
        return admin_pb.ReleaseLeaseResponse(released=True)

    async def mailbox_heartbeat(
        self, request: admin_pb.MailboxHeartbeatRequest, call: NodeCall
    ) -> admin_pb.MailboxHeartbeatResponse:
        """Renew a lease."""
        heartbeat = Heartbeat(
            mailbox=request.mailbox_id,
            runner=request.runner_id,
            proxy=request.proxy_id,
            epoch=read_number(call.metadata, EPOCH_KEY),
            events_stored=request.events_stored,
            queries_served=request.queries_served,
            storage_size_bytes=request.storage_size_bytes,
            status=request.status or "healthy",  # type: ignore[arg-type]  # the control plane checks it
        )
        try:
            grant = await self._admin.renew_lease(heartbeat)
        except LeaseLost as error:
            return admin_pb.MailboxHeartbeatResponse(lease_renewed=False, message=error.reason)
        _write_grant(grant, call)
        return admin_pb.MailboxHeartbeatResponse(
            lease_renewed=True, new_expiration=messages.write_time(grant.expires_at)
        )


class _MembershipService:
    """The methods of `Membership`."""

    def __init__(self, admin: LeaseAdmin, access: NodeAccess) -> None:
        self._admin = admin
        self._access = access

    async def register_proxy(
        self, request: pb.RegisterProxyRequest, call: NodeCall
    ) -> pb.RegisterProxyResponse:
        """Register a proxy."""
        _check_address(self._access, request.address, ("proxy",))
        registration = await self._admin.register_proxy(
            request.proxy_id, request.address, request.position, request.push_key
        )
        return messages.write_proxy_registration(registration)

    async def register_runner(
        self, request: pb.RegisterRunnerRequest, call: NodeCall
    ) -> pb.RegisterRunnerResponse:
        """Register a runner."""
        _check_address(self._access, request.address, ("runner", "proxy"))
        registration = await self._admin.register_runner(
            request.runner_id, request.proxy_id, request.address, tuple(request.mailbox_ids)
        )
        return pb.RegisterRunnerResponse(
            interval_ms=registration.interval_ms, ttl_ms=registration.ttl_ms, offers=registration.offers
        )

    async def leave(self, request: pb.LeaveRequest, call: NodeCall) -> pb.LeaveResponse:
        """End a registration."""
        match request.WhichOneof("member"):
            case "proxy_id":
                await self._admin.leave(proxy=request.proxy_id)
            case "runner_id":
                await self._admin.leave(runner=request.runner_id)
            case _:
                raise InvalidRequest("LeaveRequest names no member; set proxy_id or runner_id.")
        return pb.LeaveResponse()

    async def list_leases(self, request: pb.ListLeasesRequest, call: NodeCall) -> pb.ListLeasesResponse:
        """List leases."""
        mailbox = request.mailbox_id if request.HasField("mailbox_id") else None
        leases = await self._admin.list_leases(mailbox)
        return pb.ListLeasesResponse(leases=map(messages.write_lease, leases))

    async def list_routes(self, request: pb.ListRoutesRequest, call: NodeCall) -> pb.ListRoutesResponse:
        """List the routing table."""
        return pb.ListRoutesResponse(table=messages.write_table(await self._admin.list_routes()))

    async def list_members(self, request: pb.ListMembersRequest, call: NodeCall) -> pb.ListMembersResponse:
        """List proxies and runners."""
        members = await self._admin.list_members()
        return pb.ListMembersResponse(members=map(messages.write_member, members))


def _check_address(access: NodeAccess, text: str, roles: Collection[str]) -> None:
    """Raise Forbidden for an address that is not a node's: proxies and clients would send tokens to it."""
    if not access.is_node(check_address("address", text), roles):
        raise Forbidden(
            f"The host of the address {text} is not the name of a {' or '.join(roles)} in nodes of [cluster]."
        )


def _write_grant(grant: LeaseGrant, call: NodeCall) -> None:
    call.trailers[EPOCH_KEY] = str(grant.epoch)
    call.trailers[TTL_KEY] = str(grant.ttl_ms)
    call.trailers[INTERVAL_KEY] = str(grant.heartbeat_interval_ms)
