"""What is refused over gRPC, and how the refusal is answered."""

from typing import Any

import grpc
import pytest

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.grpc.calls import METHODS
from postroom.adapters.grpc.server import MAX_REQUEST_BYTES
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.domain.policy import TopicPolicy
from tests.support.grpc_callers import Caller, details, new
from tests.support.waiting import SECONDS


@pytest.mark.parametrize(
    ("name", "request_", "code", "reason"),
    [
        ("send", new(topic="no spaces"), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        ("send", pb.SendRequest(), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        ("send", new(b"x" * (1 << 20)), grpc.StatusCode.RESOURCE_EXHAUSTED, "E_FRAME_TOO_LARGE"),
        ("recv", pb.RecvRequest(), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        ("recv", pb.RecvRequest(topics=["a"], wait_ms=-1), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        ("recv_stream", pb.RecvStreamRequest(), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        (
            "recv_stream",
            pb.RecvStreamRequest(topics=["a"], heartbeat_ms=1),
            grpc.StatusCode.INVALID_ARGUMENT,
            "E_SCHEMA",
        ),
        ("get", pb.GetRequest(message_id="nowhere"), grpc.StatusCode.NOT_FOUND, "E_NOT_FOUND"),
        ("purge", pb.PurgeRequest(topic="nowhere"), grpc.StatusCode.NOT_FOUND, "E_NOT_FOUND"),
        ("query", pb.QueryRequest(limit=0), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        ("query", pb.QueryRequest(order="no"), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        ("query", pb.QueryRequest(statuses=["no"]), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        ("query", pb.QueryRequest(), grpc.StatusCode.NOT_FOUND, "E_NOT_FOUND"),
        (
            "backlog",
            pb.BacklogRequest(at=pb.Moment(time="yesterday")),
            grpc.StatusCode.INVALID_ARGUMENT,
            "E_SCHEMA",
        ),
    ],
)
async def test_a_refused_call_has_the_code_of_its_error(
    caller: Caller, name: str, request_: Any, code: grpc.StatusCode, reason: str
) -> None:
    call = getattr(caller, name)(request_, timeout=SECONDS)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (call.read() if METHODS[name].is_stream else call)
    info, retry = details(refused.value)
    assert (refused.value.code(), info.reason, info.domain, retry) == (code, reason, "postroom", None)


async def test_a_refusal_for_now_says_when_to_retry(mailbox: OwnedMailbox, caller: Caller) -> None:
    await mailbox.set_topic_policy("orders", TopicPolicy(shard_capacity=1))
    await caller.send(new())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await caller.send(new())
    info, retry = details(refused.value)
    assert (refused.value.code(), info.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "E_SATURATED")
    assert retry is not None
    assert retry.retry_delay.ToMilliseconds() > 0
    answer = await caller.send_batch(pb.SendBatchRequest(messages=[new().message]))
    assert (answer.results[0].error.code, answer.results[0].error.retry_after_ms > 0) == ("E_SATURATED", True)


async def test_conflicts_have_codes_of_their_own(mailbox: OwnedMailbox, caller: Caller) -> None:
    await caller.send(new(idem_key="key"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await caller.send(new(b"other", idem_key="key"))
    assert refused.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert details(refused.value)[0].reason == "E_DUPLICATE"
    received = (await caller.recv(pb.RecvRequest(topics=["orders"]))).messages[0]
    await caller.nack(pb.NackRequest(receipts=[received.receipt], delay_ms=0))
    answer = await caller.ack(pb.AckRequest(receipts=[received.receipt, "nonsense"]))
    assert [result.error.code for result in answer.results] == ["E_STALE_RECEIPT", "E_SCHEMA"]


async def test_a_request_above_the_limit_is_refused_before_it_is_read(caller: Caller) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await caller.send(new(b"x" * (MAX_REQUEST_BYTES + 1)))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not (await caller.send(new())).duplicate


async def test_fields_that_the_server_does_not_know_are_refused(caller: Caller) -> None:
    unknown = b"\x0a\x0b" + b"\x0a\x06orders\xd8\x3e\x01"  # field 1003 within the message
    raw: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = caller.channel.unary_unary(METHODS["send"].path)
    with pytest.raises(grpc.aio.AioRpcError, match="does not know") as refused:
        await raw(unknown)
    assert details(refused.value)[0].reason == "E_SCHEMA"
    with pytest.raises(
        grpc.aio.AioRpcError, match=r"is not the encoding of a postroom\.v1\.SendRequest"
    ) as malformed:
        await raw(b"\xff\xff")
    assert details(malformed.value)[0].reason == "E_SCHEMA"
    assert not (await caller.send(new())).duplicate


async def test_a_long_error_fits_into_the_trailers(caller: Caller) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await caller.get(pb.GetRequest(message_id="é" * 255))
    assert details(refused.value)[0].reason == "E_NOT_FOUND"


async def test_a_defect_is_an_internal_error_without_its_details(
    mailbox: OwnedMailbox, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(mailbox, "get_backlog", broken)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await caller.backlog(pb.BacklogRequest())
    assert refused.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in str(refused.value)
