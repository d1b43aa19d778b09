"""Any bytes as a gRPC request are answered or refused, never by an internal error."""

import asyncio
from random import Random

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.serve import open_grpc_surface, serve_mailbox, unrestricted
from postroom.adapters.grpc.calls import METHODS
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from tests.support.examples import examples
from tests.support.stores import MAILBOX
from tests.support.waiting import SECONDS

UNARY = {name: method for name, method in METHODS.items() if not method.is_stream}
SEEDS = [
    pb.SendRequest(message=pb.NewMessage(topic="orders", payload=b"x", attrs={"a": b"b"}, ttl_seconds=5)),
    pb.SendBatchRequest(messages=[pb.NewMessage(topic="orders"), pb.NewMessage(priority=11)]),
    pb.RecvRequest(topics=["orders"], max_messages=2, max_bytes=5, visibility_ms=250, consumer="c"),
    pb.NackRequest(receipts=["r.AZnSxG8AehCMITtbD2-eAQAAAAIAAAAAAAE"], reason="why", delay_ms=5),
    pb.ExtendRequest(receipts=["", "r."], visibility_ms=-1),
    pb.QueryRequest(topics=["*"], statuses=["dead"], headers={"a": "b"}, cursor="x", limit=1 << 30),
    pb.BacklogRequest(topic="orders", at=pb.Moment(time="2026-01-31T12:00:00Z")),
    pb.ListDeadLettersRequest(at=pb.Moment(position=-5), cursor=1 << 62),
    pb.RedriveRequest(topic="orders", only=pb.MessageIds(message_ids=[""]), limit=-1),
    pb.SetTopicPolicyRequest(topic="orders", policy=pb.TopicPolicy(shards=1 << 40)),
    pb.DeleteOldEventsRequest(older_than_us=-1),
]


def mutated(seed: int) -> bytes:
    """Return the encoding of a request with some bytes replaced, removed or added."""
    random = Random(seed)
    data = bytearray(random.choice(SEEDS).SerializeToString())
    for _ in range(random.randrange(4)):
        at = random.randrange(len(data) + 1)
        data[at : at + random.randrange(3)] = random.randbytes(random.randrange(3))
    return bytes(data)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.one_of(st.binary(max_size=40), st.integers(0, 1 << 32).map(mutated)), min_size=1, max_size=8)
)
def test_any_bytes_are_answered_or_refused(requests: list[bytes]) -> None:
    asyncio.run(check(requests))


async def check(requests: list[bytes]) -> None:
    async with (
        open_mailbox("memory:", MAILBOX) as mailbox,
        serve_mailbox("memory:", mailbox, [open_grpc_surface("127.0.0.1:0")], access=unrestricted) as (url,),
        grpc.aio.insecure_channel(url.removeprefix("grpc://")) as channel,
        asyncio.timeout(SECONDS),
    ):
        for request in requests:
            for method in UNARY.values():
                call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method.path)
                try:
                    method.response.FromString(await call(request, timeout=5))
                except grpc.aio.AioRpcError as error:
                    if code(error) in ("E_INTERNAL", "E_UNAVAILABLE"):
                        pytest.fail(f"{method.path} {request!r}: {error}")
        assert (await mailbox.get_backlog()).mailbox == MAILBOX


def code(error: grpc.aio.AioRpcError) -> str:
    """Return the code of an error; an error without one is the transport's own."""
    trailers = dict(error.trailing_metadata() or ())
    info = ErrorInfo()
    if not Status.FromString(trailers["grpc-status-details-bin"]).details[0].Unpack(info):
        pytest.fail(f"No code in {error}")
    return str(info.reason)
