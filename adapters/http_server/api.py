"""The calls of the HTTP interface (svc-mailbox C-1, RFC-037), in the order of its documentation."""

from collections.abc import Sequence
from typing import Any

from postroom.adapters.http_server.handlers import MessageHandlers
from postroom.adapters.http_server.operations import derive_routes, query_struct
from postroom.adapters.http_server.queries import Backlog, QueryHandlers, StateHandlers
from postroom.adapters.http_server.routes import HttpRoute
from postroom.application.operations import contract, query_contract
from postroom.application.operations.mailbox import OPERATIONS
from postroom.application.query_results import MessageOutcome

_ID = "0199d2c4-6f00-7a10-8c21-3b5b0f6f9e01"
_RECEIPT = "r.AZnSxG8AehCMITtbD2-eAQAAAAIAAAAAAAE"
_SEND = {"topic": "orders", "payload_b64": "eyJvcmRlciI6IDd9", "idem_key": "order-7"}
_SENT = {"message_id": _ID, "duplicate": False, "msg_id": _ID}
_ENVELOPE = {
    "message_id": _ID,
    "msg_id": _ID,
    "topic": "orders",
    "published_topic": "orders",
    "timestamp": 1_795_348_800_000,
    "ts": "2026-11-22T12:00:00.000000Z",
    "idem_key": "order-7",
    "payload_hash": "b3:" + "5a" * 32,
    "attrs": {"tenant": "acme"},
    "correlation_id": "0199d2c4-6f00-7a10-8c21-3b5b0f6f9e02",
    "corr_id": "0199d2c4-6f00-7a10-8c21-3b5b0f6f9e02",
    "shard": 3,
    "attempt": 1,
    "hash_chain": "b3:" + "c4" * 32,
    "receipt": _RECEIPT,
    "visible_at": "2026-11-22T12:00:05.000000Z",
    "payload_b64": "eyJvcmRlciI6IDd9",
}
_OK = {"ok": True}
_WAIT = OPERATIONS["wait_for_result"]
_RESULTS = {"results": [{"ok": True}]}


def make_routes(
    messages: MessageHandlers, queries: QueryHandlers, state: StateHandlers
) -> Sequence[HttpRoute]:
    """Return the routes: those written here, and derived ones for all other operations."""
    written = (
        HttpRoute(
            "POST",
            "/v1/send",
            messages.send,
            "Send a message, a list of messages, or a CloudEvent.",
            (contract.SendAnswer, contract.SendAnswers),
            contract.SendBody,
            refusals=(409,),
            examples=(_SEND, _SENT),
            takes_cloud_events=True,
        ),
        HttpRoute(
            "POST",
            "/v1/recv",
            messages.recv,
            "Receive messages, and hide them until they are settled.",
            contract.Messages,
            contract.Recv,
            examples=(
                {"topic": "orders", "visibility_ms": 5_000, "max_messages": 10},
                {"messages": [_ENVELOPE]},
            ),
        ),
        HttpRoute(
            "POST",
            "/v1/recv/stream",
            messages.recv_stream,
            "Receive messages as lines of JSON, for as long as the client reads.",
            "application/x-ndjson",
            contract.RecvStream,
            examples=({"topic": "orders", "max_messages": 10}, None),
        ),
        *_settling(messages),
        *_queries(messages, queries),
        *_state(state),
    )
    return (*written, *derive_routes(written))


def _settling(messages: MessageHandlers) -> Sequence[HttpRoute]:
    one: dict[str, Any] = {"body_is_optional": True, "refusals": (404, 409)}
    return (
        HttpRoute(
            "POST",
            "/v1/ack/{msg_id}",
            messages.ack,
            "Settle a delivery; idempotent.",
            contract.Ok,
            contract.Ack,
            examples=({"receipt": _RECEIPT}, _OK),
            **one,
        ),
        HttpRoute(
            "POST",
            "/v1/nack/{msg_id}",
            messages.nack,
            "Fail a delivery: the message is retried, or dead-lettered after its last attempt.",
            contract.Ok,
            contract.Nack,
            examples=({"receipt": _RECEIPT, "reason": "out of stock", "delay_ms": 1_000}, _OK),
            **one,
        ),
        HttpRoute(
            "POST",
            "/v1/extend/{msg_id}",
            messages.extend,
            "Hide a received message for longer.",
            contract.Ok,
            contract.Extend,
            refusals=(404, 409),
            examples=({"receipt": _RECEIPT, "visibility_ms": 30_000}, _OK),
        ),
        HttpRoute(
            "POST",
            "/v1/ack",
            messages.ack_many,
            "Settle deliveries by their receipts.",
            contract.SettleResults,
            contract.AckMany,
            examples=({"receipts": [_RECEIPT]}, _RESULTS),
        ),
        HttpRoute(
            "POST",
            "/v1/nack",
            messages.nack_many,
            "Fail deliveries by their receipts.",
            contract.SettleResults,
            contract.NackMany,
            examples=({"receipts": [_RECEIPT], "reason": "out of stock"}, _RESULTS),
        ),
        HttpRoute(
            "POST",
            "/v1/extend",
            messages.extend_many,
            "Hide received messages for longer, by their receipts.",
            contract.SettleResults,
            contract.ExtendMany,
            examples=({"receipts": [_RECEIPT], "visibility_ms": 30_000}, _RESULTS),
        ),
    )


def _queries(messages: MessageHandlers, queries: QueryHandlers) -> Sequence[HttpRoute]:
    return (
        HttpRoute(
            "GET",
            "/v1/messages",
            queries.search,
            "Search messages in the read models, in pages.",
            query_contract.Items,
            query=query_contract.MessagesQuery,
            refusals=(404,),
        ),
        HttpRoute(
            "GET",
            "/v1/messages/{msg_id}",
            queries.get_message,
            "Return a message with its headers, envelope, state and history.",
            query_contract.Detail,
            refusals=(404,),
        ),
        HttpRoute(
            "GET",
            "/v1/messages/{msg_id}/result",
            messages.wait_for_result,
            _WAIT.summary,
            MessageOutcome,
            query=query_struct("wait_for_result", 1),
            refusals=(404,),
        ),
        HttpRoute(
            "GET",
            "/v1/backlog",
            queries.backlog,
            "Count unsettled messages by topic and shard, now or at a past moment.",
            Backlog,
            query=query_struct("get_backlog"),
            refusals=(404,),
        ),
        HttpRoute(
            "GET",
            "/v1/dlq",
            queries.dead_letters,
            "List dead letters, oldest first, in pages.",
            query_contract.DeadLetters,
            query=query_struct("list_dead_letters"),
            refusals=(404,),
        ),
        HttpRoute(
            "GET",
            "/v1/dlq/groups",
            queries.dead_letter_groups,
            "Group the dead letters in the read models by error, topic or reason, with trends.",
            query_contract.DeadLetterGroups,
            query=query_contract.DeadLetterGroupsQuery,
            refusals=(404,),
        ),
        HttpRoute(
            "GET",
            "/v1/topics",
            queries.topics,
            "List the topics with their policies, counts, and whether they are paused.",
            query_contract.Topics,
        ),
    )


def _state(state: StateHandlers) -> Sequence[HttpRoute]:
    return (
        HttpRoute(
            "GET", "/v1/mailbox", state.info, "Return the mailbox that is served.", query_contract.Info
        ),
        HttpRoute(
            "GET", "/healthz", state.healthz, "Tell that the process answers.", contract.Ok, is_public=True
        ),
        HttpRoute(
            "GET",
            "/readyz",
            state.readyz,
            "Tell whether the mailbox can be used.",
            query_contract.Ready,
            is_public=True,
        ),
        HttpRoute("GET", "/metrics", state.metrics, "Return metrics for Prometheus.", "text/plain"),
        HttpRoute(
            "GET",
            "/openapi.json",
            state.openapi,
            "Return this document.",
            "application/json",
            is_public=True,
        ),
        HttpRoute(
            "GET",
            "/v1/errors/{code}",
            state.error,
            "Explain an error code: cause, example and remedy.",
            "text/plain",
            refusals=(404,),
            is_public=True,
        ),
    )
