"""Methods of the services, from their descriptors."""

import re
from typing import Any, NamedTuple

from google.protobuf.message_factory import GetMessageClass

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


METHODS = {
    _snake_case(method.name): Method(
        f"/{service.full_name}/{method.name}",
        GetMessageClass(method.input_type),
        GetMessageClass(method.output_type),
        method.server_streaming,
    )
    for service in SERVICES
    for method in service.methods
}
"""Every method by its name in snake case, such as `recv_stream`."""
