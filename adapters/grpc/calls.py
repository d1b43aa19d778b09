"""Parts of a gRPC call besides its messages: its method, metadata, and the status of its error (C-10)."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message_factory import GetMessageClass
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from postroom.adapters.grpc.admin.v1 import control_plane_pb2
from postroom.adapters.grpc.cluster.v1 import cluster_pb2
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.adapters.sockets.tls import explain_tls_failure
from postroom.application.remote_errors import rebuild_error
from postroom.domain.arguments import MAX_INT
from postroom.domain.errors import (
    FrameTooLarge,
    InvalidRequest,
    LeaseLost,
    PostroomError,
    StaleReceipt,
    Unavailable,
)

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "postroom"
TLS = "grpcs:"
MAX_MESSAGE_BYTES = 1_000
"""Maximum size of an error's text: peers refuse trailers above 8 KiB, in which it is contained twice."""
_SIZE_LIMIT = "larger than max"
"""How gRPC describes a message above its limit; servers and proxies refuse calls with the same code."""

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,  # as gRPC itself answers a message above its limit
    421: grpc.StatusCode.FAILED_PRECONDITION,
    422: grpc.StatusCode.DATA_LOSS,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}


def status_code(error: PostroomError) -> grpc.StatusCode:
    """Return the gRPC code of an error."""
    if isinstance(error, StaleReceipt | LeaseLost):
        return grpc.StatusCode.FAILED_PRECONDITION
    return _CODES[error.status]


def status_of(error: PostroomError) -> Status:
    """Return the status of an error: its text, its code as ErrorInfo and its retry time as RetryInfo."""
    status = Status(code=status_code(error).value[0], message=_shorten(str(error)))
    status.details.add().Pack(ErrorInfo(reason=error.code, domain=DOMAIN))
    retry_after_ms = getattr(error, "retry_after_ms", None)
    if retry_after_ms is not None:
        delay = Duration()
        delay.FromMilliseconds(retry_after_ms)
        status.details.add().Pack(RetryInfo(retry_delay=delay))
    return status


def write_error(error: PostroomError, message: pb.Error) -> None:
    """Write the error of one part of a request, or of an item of a stream, into `message`."""
    message.code = error.code
    message.message = str(error)
    retry_after_ms = getattr(error, "retry_after_ms", None)
    if retry_after_ms is not None:
        message.retry_after_ms = retry_after_ms


def read_error(message: pb.Error) -> PostroomError:
    """Return the exception of an error that `write_error` wrote."""
    retry_after_ms = message.retry_after_ms if message.HasField("retry_after_ms") else None
    return rebuild_error(message.code, message.message, retry_after_ms)


def error_of(error: grpc.aio.AioRpcError, where: str) -> PostroomError:
    """Return the exception of a failed call.

    Arguments:
        where: address of the server, for the text.
    """
    return detailed_error(error.trailing_metadata() or ()) or _transport_error(error, where)


def detailed_error(trailers: Iterable[tuple[str, str | bytes]]) -> PostroomError | None:
    """Return the exception that the details in the trailers describe; None without such details."""
    for key, value in trailers:
        if key == DETAILS_KEY and isinstance(value, bytes):
            status = Status.FromString(value)
            code, retry_after_ms = "", None
            for detail in status.details:
                info, retry = ErrorInfo(), RetryInfo()
                if detail.Unpack(info) and info.domain == DOMAIN:
                    code = info.reason
                elif detail.Unpack(retry):
                    retry_after_ms = math.ceil(retry.retry_delay.ToMicroseconds() / 1_000)
            return rebuild_error(code, status.message, retry_after_ms) if code else None
    return None


def _transport_error(error: grpc.aio.AioRpcError, where: str) -> PostroomError:
    """Return the exception of a failure that gRPC itself reports."""
    details = error.details() or error.code().name
    if (text := explain_tls_failure(details, where)) is not None:
        return InvalidRequest(text)
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED if _SIZE_LIMIT not in details:
            return Unavailable(
                f"{where}, or a proxy before it, has no capacity for this call now: {details}; retry shortly."
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return FrameTooLarge(f"The request or its answer is too large for {where}: {details}.")
        case grpc.StatusCode.UNIMPLEMENTED:
            return InvalidRequest(
                f"{where} does not serve this call; it may be older than this client: {details}."
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(
                f"{where} did not answer in time; whether the command took effect is unknown. "
                "Repeat it, or raise timeout_ms."
            )
        case _:
            # gRPC does not show the alert with which a server refuses a client's certificate.
            hint = (
                "it may refuse this client's certificate, or ask for one; " if where.startswith(TLS) else ""
            )
            return Unavailable(
                f"{where} can't be reached, or the call was interrupted ({details}); {hint}"
                "whether the command took effect is unknown."
            )


def _shorten(text: str) -> str:
    return text.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")


MAILBOX_KEY = "postroom-mailbox"
"""The mailbox of a call of `postroom.v1`; without it, the server's only mailbox."""
FORWARDED_KEY = "postroom-forwarded"
"""`1` in a call that a proxy forwarded."""
EPOCH_KEY = "postroom-epoch"
"""The epoch of the lease, in heartbeats and releases, and in the answers to acquisitions and heartbeats."""
ACQUISITION_KEY = "postroom-acquisition"
"""A UUID of the attempt, in an acquisition."""
LOG_EPOCH_KEY = "postroom-log-epoch"
"""The epoch of the last record of the mailbox's log, in an acquisition."""
POSITION_KEY = "postroom-position"
"""The position of the lease event that made the route, in a push of a route."""
PUSH_KEY = "postroom-push-key"
"""The key that the proxy gave the admin when it registered, in a push of a route."""
TTL_KEY = "postroom-ttl-ms"
"""The TTL that was granted, in the answers to acquisitions and heartbeats."""
INTERVAL_KEY = "postroom-heartbeat-interval-ms"
"""The interval at which to renew the lease, in the answers to acquisitions and heartbeats."""
MEMBERS_KEY = "postroom-members"
"""How many mailboxes a client knows in its namespace, in a call of `postroom.v1`."""
RUNNER_KEY = "postroom-runner"
"""The runner that has the lease, in the answer to a refused acquisition."""
REMAINING_KEY = "postroom-remaining-ms"
"""The time until the lease may be acquired if it is not renewed, in the answer to a refused acquisition."""

_SAFE = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")
MAX_DIGITS = 19


def write_text(text: str) -> str:
    """Return text as a value of metadata, which has visible ASCII characters only: others are %-encoded."""
    return quote(text, safe=_SAFE)


def read_text(value: str) -> str:
    """Return the text of a value that `write_text` wrote."""
    return unquote(value, errors="replace")


def read_metadata(pairs: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Return the textual metadata of a call by key; if a key has several values, the last one."""
    return {key: value for key, value in pairs or () if type(value) is str}


def read_number(metadata: Mapping[str, str], key: str) -> int | None:
    """Return a number of the metadata; None if it has none.

    Raises: InvalidRequest unless it is a decimal number from 0 to 2^63 - 1.
    """
    value = metadata.get(key)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS and int(value) <= MAX_INT):
        raise InvalidRequest(f"The metadata {key} must be a number from 0 to {MAX_INT}.")
    return int(value)


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
"""Further methods that admins serve."""
ROUTING = find_methods([cluster_pb2.DESCRIPTOR.services_by_name["Routing"]])
"""Further methods that proxies serve to clients."""
