"""Wiring of what admins, runners and proxies have in common."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import msgspec

from postroom.adapters.compose.remote import ClientTls
from postroom.adapters.sockets.address import Address
from postroom.application.extras import explain_missing_extra
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import check_address

if TYPE_CHECKING:  # grpcio is an extra
    from postroom.adapters.grpc.admin_client import ControlPlaneClient
    from postroom.adapters.grpc.node_access import NodeAccess

__all__ = [
    "NodeAccess",
    "advertised_address",
    "check_admins",
    "connect_control_plane",
    "open_node_access",
]

WILDCARDS = ("0.0.0.0", "::")


@explain_missing_extra("cluster")
def open_node_access(
    token: str | None, tls: ClientTls | None, nodes: Mapping[str, Sequence[str]] | None = None
) -> "NodeAccess":
    """Return the credentials of a process of a cluster; see `NodeAccess`."""
    from postroom.adapters.grpc.node_access import NodeAccess, NodeNames

    try:
        names = None if nodes is None else msgspec.convert(nodes, NodeNames, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"[cluster] nodes: {error}; they are lists of names by role.") from None
    return NodeAccess(token, None if tls is None else tls.check(), names)


@explain_missing_extra("cluster")
def connect_control_plane(
    admins: Sequence[str], access: "NodeAccess | None" = None
) -> AbstractAsyncContextManager["ControlPlaneClient"]:
    """Use the control plane behind the addresses of admins; see `connect_admins`."""
    from postroom.adapters.grpc.admin_client import connect_admins

    return connect_admins(admins, access)


def check_admins(text: str) -> list[str]:
    """Return the addresses of admins, which are separated by commas, or raise InvalidRequest."""
    return [check_address("An address of admins", each.strip()) for each in text.split(",")]


def advertised_address(url: str, target: Address, address: str | None) -> str:
    """Return the address at which other processes of a cluster reach this one.

    Arguments:
        url: at which it serves.
        target: at which it was asked to listen.
        address: what the settings say; None takes the one at which it serves.

    Raises: InvalidRequest when the settings name no address and it listens at all addresses of the machine.
    """
    if address is not None:
        return check_address("address", address)
    if target.is_unix:
        return target.text
    if target.target[0] in WILDCARDS:
        raise InvalidRequest(
            f"{target.text} is all addresses of this machine; set address to the host:port at which other "
            "processes of the cluster reach it."
        )
    return check_address("address", url.partition("://")[2])
