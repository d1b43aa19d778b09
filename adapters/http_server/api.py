"""The calls of the HTTP interface (svc-mailbox C-1, RFC-037), in the order of its documentation."""

from collections.abc import Sequence
from typing import Any

from postroom.adapters.http_server import query_schemas, schemas
from postroom.adapters.http_server.handlers import MessageHandlers
from postroom.adapters.http_server.queries import OperatorHandlers, QueryHandlers, StateHandlers
from postroom.adapters.http_server.redrives import redrive_routes
from postroom.adapters.http_server.routes import Route
from postroom.application.query_results import Explanation
from postroom.domain.mailbox.settings_effects import SettingsPreview

_ID = "0199d2c4-6f00-7a10-8c21-3b5b0f6f9e01"
_RECEIPT = "r.AZnSxG8AehCMITtbD2-eAQAAAAIAAAAAAAE"
_SEND = {"topic": "orders", "payload_b64": "eyJvcmRlciI6IDd9", "idem_key": "order-7"}
_SENT = {"message_id": _ID, "duplicate": False, "msg_id": _ID}
_ENVELOPE = {
    "message_id": _ID,
    "msg_id": _ID,
    "topic": "orders",
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
_RESULTS = {"results": [{"ok": True}]}


def make_routes(
    messages: MessageHandlers, queries: QueryHandlers, operators: OperatorHandlers, state: StateHandlers
) -> Sequence[Route]:
    """Return the routes."""
    return (
        Route(
            "POST",
            "/v1/send",
            messages.send,
            "Send a message, a list of messages, or a CloudEvent.",
            (schemas.SendAnswer, schemas.SendAnswers),
            schemas.SendBody,
            refusals=(409,),
            examples=(_SEND, _SENT),
            takes_cloud_events=True,
        ),
        Route(
            "POST",
            "/v1/recv",
            messages.recv,
            "Receive messages, and hide them until they are settled.",
            schemas.Messages,
            schemas.Recv,
            examples=(
                {"topic": "orders", "visibility_ms": 5_000, "max_messages": 10},
                {"messages": [_ENVELOPE]},
            ),
        ),
        Route(
            "POST",
            "/v1/recv/stream",
            messages.recv_stream,
            "Receive messages as lines of JSON, for as long as the client reads.",
            "application/x-ndjson",
            schemas.RecvStream,
            examples=({"topic": "orders", "max_messages": 10}, None),
        ),
        *_settling(messages),
        Route(
            "POST",
            "/v1/dlq/reprocess",
            operators.redrive,
            "Redrive dead letters, oldest first.",
            query_schemas.Redriven,
            query_schemas.Redrive,
            refusals=(404,),
            examples=({"topic": "orders", "limit": 100}, {"redriven": 3}),
        ),
        *_queries(queries),
        *_operators(operators),
        *redrive_routes(),
        *_state(state),
    )


def _settling(messages: MessageHandlers) -> Sequence[Route]:
    one: dict[str, Any] = {"body_is_optional": True, "refusals": (404, 409)}
    return (
        Route(
            "POST",
            "/v1/ack/{msg_id}",
            messages.ack,
            "Settle a delivery; idempotent.",
            schemas.Ok,
            schemas.Ack,
            examples=({"receipt": _RECEIPT}, _OK),
            **one,
        ),
        Route(
            "POST",
            "/v1/nack/{msg_id}",
            messages.nack,
            "Fail a delivery: the message is retried, or dead-lettered after its last attempt.",
            schemas.Ok,
            schemas.Nack,
            examples=({"receipt": _RECEIPT, "reason": "out of stock", "delay_ms": 1_000}, _OK),
            **one,
        ),
        Route(
            "POST",
            "/v1/extend/{msg_id}",
            messages.extend,
            "Hide a received message for longer.",
            schemas.Ok,
            schemas.Extend,
            refusals=(404, 409),
            examples=({"receipt": _RECEIPT, "visibility_ms": 30_000}, _OK),
        ),
        Route(
            "POST",
            "/v1/ack",
            messages.ack_many,
            "Settle deliveries by their receipts.",
            schemas.SettleResults,
            schemas.AckMany,
            examples=({"receipts": [_RECEIPT]}, _RESULTS),
        ),
        Route(
            "POST",
            "/v1/nack",
            messages.nack_many,
            "Fail deliveries by their receipts.",
            schemas.SettleResults,
            schemas.NackMany,
            examples=({"receipts": [_RECEIPT], "reason": "out of stock"}, _RESULTS),
        ),
        Route(
            "POST",
            "/v1/extend",
            messages.extend_many,
            "Hide received messages for longer, by their receipts.",
            schemas.SettleResults,
            schemas.ExtendMany,
            examples=({"receipts": [_RECEIPT], "visibility_ms": 30_000}, _RESULTS),
        ),
    )


def _queries(queries: QueryHandlers) -> Sequence[Route]:
    return (
        Route(
            "GET",
            "/v1/messages",
            queries.search,
            "Search messages in the read models, in pages.",
            query_schemas.Items,
            query=query_schemas.MessagesQuery,
            refusals=(404,),
        ),
        Route(
            "GET",
            "/v1/messages/{msg_id}",
            queries.get_message,
            "Return a message with its headers, envelope, state and history.",
            query_schemas.Detail,
            refusals=(404,),
        ),
        Route(
            "GET",
            "/v1/messages/{msg_id}/explanation",
            queries.explain,
            "Return a message's history as sentences.",
            Explanation,
            refusals=(404,),
        ),
        Route(
            "GET",
            "/v1/backlog",
            queries.backlog,
            "Count unsettled messages by topic and shard, now or at a past moment.",
            query_schemas.Backlog,
            query=query_schemas.BacklogQuery,
            refusals=(404,),
        ),
        Route(
            "GET",
            "/v1/dlq",
            queries.dead_letters,
            "List dead letters, oldest first, in pages.",
            query_schemas.DeadLetters,
            query=query_schemas.DeadLettersQuery,
            refusals=(404,),
        ),
        Route(
            "GET",
            "/v1/dlq/groups",
            queries.dead_letter_groups,
            "Group the dead letters in the read models by error, topic or reason, with trends.",
            query_schemas.DeadLetterGroups,
            query=query_schemas.DeadLetterGroupsQuery,
            refusals=(404,),
        ),
        Route(
            "GET",
            "/v1/topics",
            queries.topics,
            "List the topics with their policies, counts, and whether they are paused.",
            query_schemas.Topics,
        ),
        Route(
            "GET",
            "/v1/peek",
            queries.peek,
            "Return the next ready messages of a topic without receiving them.",
            query_schemas.PeekedMessages,
            query=query_schemas.PeekQuery,
        ),
    )


def _operators(operators: OperatorHandlers) -> Sequence[Route]:
    return (
        Route(
            "GET",
            "/v1/topics/{topic}/policy",
            operators.get_policy,
            "Return the policy set for a topic.",
            query_schemas.Policy,
        ),
        Route(
            "PUT",
            "/v1/topics/{topic}/policy",
            operators.set_policy,
            "Set fields of the policy of a topic; missing ones stay as they are, and null unsets one.",
            schemas.Ok,
            query_schemas.PolicyChanges,
            examples=({"visibility_ms": 30_000, "max_attempts": 10}, _OK),
        ),
        Route(
            "GET",
            "/v1/settings",
            operators.get_settings,
            "Return the settings of the mailbox: limits, default policy, and sections of topics.",
            query_schemas.Settings,
        ),
        Route(
            "PUT",
            "/v1/settings",
            operators.set_settings,
            "Change settings of the mailbox; they stay whoever owns it.",
            query_schemas.Changed,
            query_schemas.ChangeSettings,
            examples=({"changes": {"topics": {"payments.*": {"max_attempts": 3}}}}, {"changed": True}),
        ),
        Route(
            "POST",
            "/v1/settings/preview",
            operators.preview_settings,
            "Return what a change of settings would do at once, without making it.",
            SettingsPreview,
            query_schemas.ChangeSettings,
            examples=({"changes": {"default_policy": {"dead_capacity": 1_000}}}, None),
        ),
        Route(
            "PUT",
            "/v1/topics/{topic}/pause",
            operators.pause,
            "Deliver no more messages of a topic; idempotent.",
            schemas.Ok,
            refusals=(404,),
            examples=(None, _OK),
        ),
        Route(
            "PUT",
            "/v1/topics/{topic}/resume",
            operators.resume,
            "Deliver the messages of a topic again; idempotent.",
            schemas.Ok,
            refusals=(404,),
            examples=(None, _OK),
        ),
        Route(
            "POST",
            "/v1/topics/{topic}/purge",
            operators.purge,
            "Remove the dead letters of a topic, its ready messages, or both.",
            query_schemas.Removed,
            query_schemas.Purge,
            body_is_optional=True,
            refusals=(404,),
            examples=({"dead": True}, {"removed": 3}),
        ),
        Route(
            "POST",
            "/v1/log/delete",
            operators.delete_old_events,
            "Remove settled records that were written before a time.",
            query_schemas.Removed,
            query_schemas.DeleteOldEvents,
            examples=({"older_than_us": 1_700_000_000_000_000}, {"removed": 1_200}),
        ),
    )


def _state(state: StateHandlers) -> Sequence[Route]:
    return (
        Route("GET", "/v1/mailbox", state.info, "Return the mailbox that is served.", query_schemas.Info),
        Route("GET", "/healthz", state.healthz, "Tell that the process answers.", schemas.Ok, is_public=True),
        Route(
            "GET",
            "/readyz",
            state.readyz,
            "Tell whether the mailbox can be used.",
            query_schemas.Ready,
            is_public=True,
        ),
        Route("GET", "/metrics", state.metrics, "Return metrics for Prometheus.", "text/plain"),
        Route(
            "GET",
            "/openapi.json",
            state.openapi,
            "Return this document.",
            "application/json",
            is_public=True,
        ),
    )
