"""Methods of the services, from their descriptors."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from google.protobuf.message_factory import GetMessageClass

from postroom.adapters.grpc.admin.v1 import control_plane_pb2
from postroom.adapters.grpc.cluster.v1 import cluster_pb2
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb

SERVICES = tuple(pb.DESCRIPTOR.services_by_name.values())
NAMES = tuple(service.full_name for service in SERVICES)
"""Full names of the services, such as `postroom.v1.Mailbox`."""


class Method(NamedTuple):
    """One method: its path on the wire, its messages, and whether the response is a stream."""

    path: str
    request: Any
    response: Any
    is_stream: bool


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def find_methods(services: Iterable[Any]) -> dict[str, Method]:
    """Return the methods of services, by their names in snake case, such as `recv_stream`."""
    return {
        _snake_case(method.name): Method(
            f"/{service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            GetMessageClass(method.output_type),
            method.server_streaming,
        )
        for service in services
        for method in service.methods
    }


METHODS = find_methods(SERVICES)
"""The methods of `postroom.v1`."""
CONTROL_PLANE = find_methods([control_plane_pb2.DESCRIPTOR.services_by_name["ControlPlane"]])
"""The methods of `prism.admin.v1`: leases at admins, and routes at proxies."""
MEMBERSHIP = find_methods([cluster_pb2.DESCRIPTOR.services_by_name["Membership"]])
"""The methods that admins serve besides."""
ROUTING = find_methods([cluster_pb2.DESCRIPTOR.services_by_name["Routing"]])
"""The methods that proxies serve to clients besides."""
