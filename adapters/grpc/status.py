"""Errors as gRPC statuses with details, and back (svc-mailbox C-10)."""

import math
from collections.abc import Iterable

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.adapters.sockets.client_tls import explain_tls_failure
from postroom.application.remote_errors import rebuild_error
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
