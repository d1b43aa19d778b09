"""What clients make of the failures that gRPC itself reports."""

import grpc
import pytest

from postroom.adapters.grpc.calls import error_of, read_error, status_code, write_error
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.domain.errors import FrameTooLarge, PostroomError, Unavailable, WrongOwner


@pytest.mark.parametrize(
    ("details", "error"),
    [
        ("SERVER: Received message larger than max (5000000 vs. 4194304)", FrameTooLarge),
        ("CLIENT: Sent message larger than max (5000000 vs. 4194304)", FrameTooLarge),
        ("Concurrent RPC limit exceeded!", Unavailable),
        ("Bandwidth exhausted or memory limit exceeded", Unavailable),
        ("", Unavailable),
    ],
)
def test_only_a_message_above_the_limit_is_too_large_and_other_exhaustion_may_be_retried(
    details: str, error: type[PostroomError]
) -> None:
    none = grpc.aio.Metadata()
    failure = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, none, none, details)
    assert type(error_of(failure, "grpc://127.0.0.1:5000")) is error


def test_a_client_recognises_a_call_to_a_process_that_does_not_own_the_mailbox() -> None:
    error, message = WrongOwner("orders@proxy-1"), pb.Error()
    write_error(error, message)
    answer = read_error(message)
    assert (type(answer), str(answer)) == (WrongOwner, str(error))
    assert "does not own mailbox orders@proxy-1" in str(answer)
    assert status_code(error) == grpc.StatusCode.FAILED_PRECONDITION
