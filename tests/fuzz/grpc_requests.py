"""Target: requests of the gRPC services; the first byte chooses the method."""

from contextlib import AsyncExitStack
from typing import Any

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.grpc.calls import METHODS
from postroom.adapters.grpc.messages import read_request
from postroom.adapters.grpc.service import Call, MailboxService
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.domain.errors import InternalError, PostroomError, Unavailable
from tests.fuzz.services import MailboxCalls, stopping_service

_NAMES = [name for name, method in METHODS.items() if not method.is_stream]
_RECEIPT = "r.AZnSxG8AehCMITtbD2-eAQAAAAIAAAAAAAE"
_REQUESTS = {
    "send": pb.SendRequest(
        message=pb.NewMessage(topic="orders", payload=b"x", attrs={"a": b"b"}, ttl_seconds=5)
    ),
    "send_batch": pb.SendBatchRequest(messages=[pb.NewMessage(topic="orders"), pb.NewMessage(priority=11)]),
    "recv": pb.RecvRequest(topics=["orders"], max_messages=2, max_bytes=5, visibility_ms=250, consumer="c"),
    "ack": pb.AckRequest(receipts=[_RECEIPT, ""]),
    "nack": pb.NackRequest(receipts=[_RECEIPT], reason="why", delay_ms=5),
    "extend": pb.ExtendRequest(receipts=["", "r."], visibility_ms=-1),
    "query": pb.QueryRequest(topics=["*"], statuses=["dead"], headers={"a": "b"}, cursor="x", limit=1 << 30),
    "get": pb.GetRequest(message_id="0199d2c4-6f00-7a10-8c21-3b5b0f6f9e01"),
    "backlog": pb.BacklogRequest(topic="orders", at=pb.Moment(time="2026-01-31T12:00:00Z")),
    "list_dead_letters": pb.ListDeadLettersRequest(at=pb.Moment(position=-5), cursor=1 << 62),
    "redrive": pb.RedriveRequest(topic="orders", only=pb.MessageIds(message_ids=[""]), limit=-1),
    "set_topic_policy": pb.SetTopicPolicyRequest(topic="orders", policy=pb.TopicPolicy(shards=1 << 40)),
    "delete_old_events": pb.DeleteOldEventsRequest(older_than_us=-1),
}


def _input(name: str, request: Any) -> bytes:
    encoded: bytes = request.SerializeToString()
    return bytes([_NAMES.index(name)]) + encoded


SEEDS = [_input(*each) for each in _REQUESTS.items()]
BOMBS = [
    _input("send_batch", pb.SendBatchRequest(messages=[pb.NewMessage()] * 100_000)),
    _input("ack", pb.AckRequest(receipts=[""] * 100_000)),
    _input("recv", pb.RecvRequest(topics=["t" * 500_000, "u" * 500_000])),
    bytes([_NAMES.index("query")]) + b"\x0b" * (1 << 20),  # groups in groups
    bytes([_NAMES.index("send")]) + b"\x0a\xff\xff\xff\xff\x0f",
]


class _Context:
    """A call whose deadline is near."""

    def time_remaining(self) -> float:
        return 0.0

    def invocation_metadata(self) -> None:
        return None


class _Calls(MailboxCalls):
    """Requests to a service over a mailbox in memory."""

    def call(self, data: bytes) -> None:
        """Check that a request is answered, or refused by a documented error."""
        name = _NAMES[data[0] % len(_NAMES)] if data else "info"
        kind = METHODS[name].request
        try:
            request = read_request(kind, data[1:])
            assert read_request(kind, request.SerializeToString()) == request
            response = self._runner.run(self._service.answer(name, request, self._call))
        except (InternalError, Unavailable):
            raise
        except PostroomError:
            return
        METHODS[name].response.FromString(response.SerializeToString())

    async def serve(self, mailbox: OwnedMailbox, opened: AsyncExitStack) -> None:
        service = stopping_service(mailbox)
        self._service = MailboxService(service)
        context: Any = _Context()
        self._call = Call(context, {}, await service.open_session(None), lambda: service.open_session(None))


opened = _Calls.opened
