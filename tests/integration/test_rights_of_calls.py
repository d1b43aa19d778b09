"""Every call of HTTP and gRPC needs its right, and no other right replaces it."""

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession

from postroom.adapters.compose.testing import ManualClock, MemoryMailbox
from postroom.adapters.grpc.calls import METHODS
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.application.messages import write_receipt
from postroom.application.operations.mailbox import Mailbox
from postroom.application.service import OpenSession, Search
from postroom.domain.capability.rights import Right
from postroom.domain.message import Receipt
from postroom.domain.names import message_stream
from tests.support.access import Controlled, controlled_mailbox
from tests.support.surfaces import served

CONTRACT = json.loads((Path(__file__).parents[2] / "docs/reference/openapi.json").read_text())
SECONDS = 30
HEADERS, PAYLOADS = Right.READ_HEADERS, Right.READ_PAYLOAD
SCOPES = [*([each] for each in Right), [HEADERS, PAYLOADS], [HEADERS, Right.REDRIVE]]
RECEIPT = write_receipt(Receipt(message_stream("acme@one", "unknown"), 2, 1))
ONE = {"receipts": [RECEIPT]}
JOB = "01890a5d-ac96-774b-bcce-b302099a8057"
WORKER = {"name": "shop"}
FILTER = pb.SubscriptionFilter(topics=["orders"])

HTTP: Mapping[str, tuple[set[Right], Any]] = {
    "POST /v1/send": ({Right.SEND}, {"topic": "orders", "payload_b64": ""}),
    "POST /v1/recv": ({Right.RECV}, {"topic": "orders"}),
    "POST /v1/recv/stream": ({Right.RECV}, {"topic": "orders", "wait_ms": 1}),
    "POST /v1/ack/{msg_id}": ({Right.ACK}, {}),
    "POST /v1/nack/{msg_id}": ({Right.NACK}, {}),
    "POST /v1/extend/{msg_id}": ({Right.EXTEND}, {"visibility_ms": 1_000}),
    "POST /v1/ack": ({Right.ACK}, ONE),
    "POST /v1/nack": ({Right.NACK}, ONE),
    "POST /v1/extend": ({Right.EXTEND}, ONE | {"visibility_ms": 1_000}),
    "POST /v1/dlq/reprocess": ({Right.REDRIVE}, {"topic": "orders"}),
    "GET /v1/messages": ({HEADERS}, None),
    "GET /v1/messages/{msg_id}": ({HEADERS, PAYLOADS}, None),
    "GET /v1/messages/{msg_id}/result": ({HEADERS, PAYLOADS}, None),
    "GET /v1/messages/{msg_id}/explanation": ({HEADERS}, None),
    "GET /v1/backlog": ({HEADERS}, None),
    "GET /v1/dlq": ({HEADERS}, None),
    "GET /v1/dlq/groups": ({HEADERS}, None),
    "GET /v1/topics": ({HEADERS}, None),
    "GET /v1/topics/{topic}/report": ({HEADERS}, None),
    "GET /v1/consumers": ({HEADERS}, None),
    "GET /v1/workers": ({HEADERS}, None),
    "PUT /v1/workers/{id}": ({Right.RECV}, {"worker": WORKER}),
    "GET /v1/peek": ({HEADERS, PAYLOADS}, None),
    "GET /v1/topics/{topic}/policy": ({HEADERS}, None),
    "PUT /v1/topics/{topic}/policy": ({Right.ADMIN}, {}),
    "GET /v1/settings": ({HEADERS}, None),
    "PUT /v1/settings": ({Right.ADMIN}, {"changes": {}}),
    "POST /v1/settings/preview": ({Right.ADMIN}, {"changes": {}}),
    "PUT /v1/topics/{topic}/pause": ({Right.ADMIN}, None),
    "PUT /v1/topics/{topic}/resume": ({Right.ADMIN}, None),
    "POST /v1/cancel": ({Right.ADMIN}, {"ids": ["unknown"]}),
    "POST /v1/reschedule": ({Right.ADMIN}, {"ids": ["unknown"], "deliver_after_ms": 0}),
    "GET /v1/schedules": ({HEADERS}, None),
    "PUT /v1/schedules/{name}": ({Right.ADMIN}, {"schedule": {"topic": "orders", "every_ms": 86_400_000}}),
    "PUT /v1/schedules/{name}/pause": ({Right.ADMIN}, None),
    "PUT /v1/schedules/{name}/resume": ({Right.ADMIN}, None),
    "POST /v1/schedules/{name}/run": ({Right.ADMIN}, None),
    "DELETE /v1/schedules/{name}": ({Right.ADMIN}, None),
    "POST /v1/searches": ({Right.REDRIVE}, {"name": "dead", "query": "topics=orders"}),
    "GET /v1/searches": ({HEADERS}, None),
    "DELETE /v1/searches/{search_id}": ({Right.REDRIVE}, None),
    "GET /v1/subscriptions": ({HEADERS}, None),
    "PUT /v1/subscriptions/{name}": ({Right.ADMIN}, {"filter": {"topics": ["orders"]}}),
    "POST /v1/subscriptions/{name}/rewind": ({Right.ADMIN}, {"start": 0}),
    "DELETE /v1/subscriptions/{name}": ({Right.ADMIN}, None),
    "POST /v1/topics/{topic}/purge": ({Right.ADMIN}, {}),
    "POST /v1/log/delete": ({Right.ADMIN}, {"older_than_us": 1}),
    "POST /v1/redrives/preview": ({HEADERS, Right.REDRIVE}, {}),
    "POST /v1/redrives": ({Right.REDRIVE}, {"spec": {}}),
    "GET /v1/redrives": ({Right.REDRIVE}, None),
    "GET /v1/redrives/{job_id}": ({Right.REDRIVE}, None),
    "GET /v1/redrives/{job_id}/messages": ({Right.REDRIVE}, None),
    "PUT /v1/redrives/{job_id}/pause": ({Right.REDRIVE}, None),
    "PUT /v1/redrives/{job_id}/resume": ({Right.REDRIVE}, None),
    "PUT /v1/redrives/{job_id}/cancel": ({Right.REDRIVE}, None),
    "PUT /v1/redrives/{job_id}/undo": ({Right.REDRIVE}, None),
    "GET /v1/mailbox": (set(), None),
    "GET /metrics": ({HEADERS}, None),
}
"""The rights that each call needs, and a body."""

GRPC: Mapping[str, tuple[set[Right], Any]] = {
    "send": ({Right.SEND}, pb.SendRequest(message=pb.NewMessage(topic="orders", payload=b"x"))),
    "send_batch": ({Right.SEND}, pb.SendBatchRequest()),
    "recv": ({Right.RECV}, pb.RecvRequest(topics=["orders"])),
    "recv_stream": ({Right.RECV}, pb.RecvStreamRequest(topics=["orders"], heartbeat_ms=250)),
    "ack": ({Right.ACK}, pb.AckRequest(receipts=[RECEIPT])),
    "nack": ({Right.NACK}, pb.NackRequest(receipts=[RECEIPT])),
    "extend": ({Right.EXTEND}, pb.ExtendRequest(visibility_ms=1_000, **ONE)),
    "query": ({HEADERS}, pb.QueryRequest()),
    "get": ({HEADERS, PAYLOADS}, pb.GetRequest(message_id="unknown")),
    "wait_for_result": ({HEADERS, PAYLOADS}, pb.WaitForResultRequest(message_id="unknown")),
    "backlog": ({HEADERS}, pb.BacklogRequest()),
    "info": (set(), pb.InfoRequest()),
    "redrive": ({Right.REDRIVE}, pb.RedriveRequest(topic="orders")),
    "cancel_messages": ({Right.ADMIN}, pb.CancelMessagesRequest(ids=["unknown"])),
    "reschedule_messages": ({Right.ADMIN}, pb.RescheduleMessagesRequest(ids=["unknown"], deliver_after_ms=0)),
    "purge": ({Right.ADMIN}, pb.PurgeRequest(topic="orders")),
    "list_dead_letters": ({HEADERS}, pb.ListDeadLettersRequest()),
    "peek": ({HEADERS, PAYLOADS}, pb.PeekRequest(topic="orders")),
    "explain": ({HEADERS}, pb.ExplainRequest(message_id="unknown")),
    "get_topic_policy": ({HEADERS}, pb.GetTopicPolicyRequest(topic="orders")),
    "get_settings": ({HEADERS}, pb.GetSettingsRequest()),
    "set_settings": ({Right.ADMIN}, pb.SetSettingsRequest()),
    "preview_settings": ({Right.ADMIN}, pb.PreviewSettingsRequest()),
    "set_topic_policy": ({Right.ADMIN}, pb.SetTopicPolicyRequest(topic="orders")),
    "list_topics": ({HEADERS}, pb.ListTopicsRequest()),
    "describe_topic": ({HEADERS}, pb.DescribeTopicRequest(topic="orders")),
    "list_consumers": ({HEADERS}, pb.ListConsumersRequest()),
    "list_workers": ({HEADERS}, pb.ListWorkersRequest()),
    "report_worker": ({Right.RECV}, pb.ReportWorkerRequest(id=JOB, worker=pb.WorkerState(name="shop"))),
    "pause_topic": ({Right.ADMIN}, pb.PauseTopicRequest(topic="orders")),
    "resume_topic": ({Right.ADMIN}, pb.ResumeTopicRequest(topic="orders")),
    "set_subscription": ({Right.ADMIN}, pb.SetSubscriptionRequest(name="mail", filter=FILTER)),
    "set_schedule": (
        {Right.ADMIN},
        pb.SetScheduleRequest(name="nightly", schedule=pb.ScheduleSpec(topic="orders", every_ms=86_400_000)),
    ),
    "list_schedules": ({HEADERS}, pb.ListSchedulesRequest()),
    "pause_schedule": ({Right.ADMIN}, pb.PauseScheduleRequest(name="nightly")),
    "resume_schedule": ({Right.ADMIN}, pb.ResumeScheduleRequest(name="nightly")),
    "run_schedule": ({Right.ADMIN}, pb.RunScheduleRequest(name="nightly")),
    "delete_schedule": ({Right.ADMIN}, pb.DeleteScheduleRequest(name="nightly")),
    "save_search": ({Right.REDRIVE}, pb.SaveSearchRequest(name="dead", query="topics=orders")),
    "list_searches": ({HEADERS}, pb.ListSearchesRequest()),
    "delete_search": ({Right.REDRIVE}, pb.DeleteSearchRequest(search_id=JOB)),
    "list_subscriptions": ({HEADERS}, pb.ListSubscriptionsRequest()),
    "rewind_subscription": (
        {Right.ADMIN},
        pb.RewindSubscriptionRequest(name="mail", start=pb.Moment(position=0)),
    ),
    "delete_subscription": ({Right.ADMIN}, pb.DeleteSubscriptionRequest(name="mail")),
    "preview_redrive": ({HEADERS, Right.REDRIVE}, pb.PreviewRedriveRequest()),
    "start_redrive": ({Right.REDRIVE}, pb.StartRedriveRequest()),
    "list_redrives": ({Right.REDRIVE}, pb.ListRedrivesRequest()),
    "get_redrive": ({Right.REDRIVE}, pb.GetRedriveRequest(job_id=JOB)),
    "list_redrive_messages": ({Right.REDRIVE}, pb.ListRedriveMessagesRequest(job_id=JOB)),
    "change_redrive": ({Right.REDRIVE}, pb.ChangeRedriveRequest(job_id=JOB, action="undo")),
    "delete_old_events": ({Right.ADMIN}, pb.DeleteOldEventsRequest(older_than_us=1)),
}


@pytest.fixture
async def controlled() -> AsyncIterator["Controlled[MemoryMailbox, ManualClock]"]:
    async with controlled_mailbox() as opened:
        yield opened


def access_of(controlled: "Controlled[MemoryMailbox, ManualClock]") -> Any:
    def access(mailbox: Mailbox, search: Search) -> OpenSession:
        return controlled.control.open_session

    return access


def test_the_tables_have_every_call() -> None:
    calls = {
        f"{method.upper()} {path}"
        for path, operations in CONTRACT["paths"].items()
        for method, operation in operations.items()
        if operation.get("security") != []
    }
    assert calls == HTTP.keys()
    assert METHODS.keys() == GRPC.keys()


async def test_a_call_over_http_needs_its_right(controlled: "Controlled[MemoryMailbox, ManualClock]") -> None:
    async with (
        served(controlled.mailbox, "http", access=access_of(controlled)) as url,
        ClientSession(url) as session,
    ):
        for scope in SCOPES:
            headers = {"Authorization": f"Bearer {controlled.issue(operations=scope)}"}
            for call, (rights, body) in HTTP.items():
                method, _, path = call.partition(" ")
                target = path.replace("{msg_id}", "unknown").replace("{topic}", "orders")
                target = target.replace("{job_id}", JOB).replace("{name}", "mail").replace("{id}", JOB)
                target = target.replace("{search_id}", JOB)
                query = "?topic=orders" if path == "/v1/peek" else ""
                async with session.request(method, target + query, json=body, headers=headers) as answer:
                    text = await answer.text()
                    assert answer.status in (200, 403, 404, 409), (call, scope, text)
                is_refused = '"code":"E_CAP_SCOPE"' in text
                assert is_refused == (not rights <= set(scope)), (call, scope, text)


async def test_a_call_over_grpc_needs_its_right(controlled: "Controlled[MemoryMailbox, ManualClock]") -> None:
    async with (
        served(controlled.mailbox, "grpc", access=access_of(controlled)) as url,
        grpc.aio.insecure_channel(url.removeprefix("grpc://")) as channel,
    ):
        for scope in SCOPES:
            metadata = [("authorization", f"Bearer {controlled.issue(operations=scope)}")]
            for name, (rights, request) in GRPC.items():
                method = METHODS[name]
                make: Any = channel.unary_stream if method.is_stream else channel.unary_unary
                calling = make(method.path, method.request.SerializeToString, method.response.FromString)
                running = calling(request, metadata=metadata, timeout=SECONDS)
                try:
                    text, code = str(await (running.read() if method.is_stream else running)), "OK"
                except grpc.aio.AioRpcError as error:
                    text, code = str(error.details()), error.code().name
                running.cancel()
                assert code in ("OK", "PERMISSION_DENIED", "NOT_FOUND", "FAILED_PRECONDITION"), (
                    name,
                    scope,
                    text,
                )
                is_refused = code == "PERMISSION_DENIED" or "E_CAP_SCOPE" in text
                assert is_refused == (not rights <= set(scope)), (name, scope, text)
