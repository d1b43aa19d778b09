"""Routes of operations, derived from the table of operations: the body or the parameters, and the answer."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from postroom.adapters.http_server.routes import Call, HttpRoute, Reply, json_reply
from postroom.application.operations.contract import MAX_BATCH, Name, Ok
from postroom.application.operations.mailbox import OPERATIONS, Position, Text
from postroom.application.operations.operation import Operation, arguments_struct
from postroom.application.page import Page
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.spec import JOB_ACTIONS, JobAction

PolicyChanges = msgspec.defstruct(
    "PolicyChanges",
    [
        (each.name, each.type | None | msgspec.UnsetType, msgspec.UNSET)
        for each in msgspec.structs.fields(TopicPolicy)
    ],
    frozen=True,
    forbid_unknown_fields=True,
    namespace={"__doc__": "Fields of the policy of a topic; null for one that follows the default again."},
)
_BODIES = {"set_topic_policy": "policy", "preview_redrive": "spec"}
"""Arguments that are the body, by operation."""
_TYPES: dict[str, dict[str, Any]] = {
    "redrive_dead_letters": {
        "limit": Annotated[int, Meta(ge=1, le=1_000_000)],
        "message_ids": Annotated[list[Name], Meta(max_length=MAX_BATCH)] | None,
    },
    "get_backlog": {"topic": Name | None},
    "list_dead_letters": {
        "topic": Name | None,
        "cursor": Annotated[Position | None, Meta(description="next_cursor of the previous page.")],
    },
    "list_redrive_messages": {
        "cursor": Annotated[Text | None, Meta(description="next_cursor of the previous page.")]
    },
    "peek_messages": {"topic": Name},
    "set_topic_policy": {"policy": PolicyChanges},
}
"""Types of arguments with other bounds in the contract, by operation."""
_STATUSES = {"NotFound": 404, "IdempotencyConflict": 409}
_JOB = "01890a5d-ac96-774b-bcce-b302099a8057"
_SPEC: dict[str, Any] = {"topics": ["orders.*"], "reasons": ["max_attempts"], "rate": 100}
_OK = {"ok": True}
_CHANGED = {"messages": [{"message_id": _JOB, "outcome": "changed"}]}
_EXAMPLES: dict[str, tuple[Any, Any]] = {
    "redrive_dead_letters": ({"topic": "orders", "limit": 100}, {"redriven": 3}),
    "set_topic_policy": ({"visibility_ms": 30_000, "max_attempts": 10}, _OK),
    "set_settings": ({"changes": {"topics": {"payments.*": {"max_attempts": 3}}}}, {"changed": True}),
    "preview_settings": ({"changes": {"default_policy": {"dead_capacity": 1_000}}}, None),
    "pause_topic": (None, _OK),
    "resume_topic": (None, _OK),
    "set_subscription": ({"filter": {"topics": ["orders.*"], "headers": {"region": "eu"}}, "start": 0}, None),
    "rewind_subscription": (
        {"start": "2026-01-31T12:00:00Z"},
        {"name": "mail", "position": 1_200, "removed": 3, "copied": 40},
    ),
    "delete_subscription": (
        None,
        {"name": "mail", "left": 3, "ready": 1, "in_flight": 0, "dead": 2, "behind": 0},
    ),
    "set_schedule": (
        {"schedule": {"topic": "reports", "cron": "0 3 * * *", "timezone": "Europe/Madrid"}},
        None,
    ),
    "run_schedule": (None, {"message_id": _JOB, "duplicate": False}),
    "delete_schedule": (None, _OK),
    "save_search": (
        {"name": "Failed refunds", "query": "topics=orders&statuses=dead&match=refund*"},
        None,
    ),
    "delete_search": (None, _OK),
    "purge_topic": ({"dead": True}, {"removed": 3}),
    "delete_old_events": ({"older_than_us": 1_700_000_000_000_000}, {"removed": 1_200}),
    "cancel_messages": ({"ids": [_JOB], "reason": "ordered twice"}, _CHANGED),
    "reschedule_messages": ({"ids": [_JOB], "deliver_after_ms": 3_600_000}, _CHANGED),
    "preview_redrive": (_SPEC, None),
    "start_redrive": ({"job_id": _JOB, "spec": _SPEC}, None),
}
"""Examples of body and answer."""
_ACTIONS: dict[JobAction, str] = {
    "pause": "Pause a redrive job; idempotent.",
    "resume": "Resume a redrive job; idempotent.",
    "cancel": "Cancel a redrive job; what it did stays done. Idempotent.",
    "undo": "Make the messages of a redrive job dead letters again if nobody received them; idempotent.",
}


def derive_routes(written: Sequence[HttpRoute] = ()) -> Sequence[HttpRoute]:
    """Return the routes of the operations that have no hand-written route."""
    taken = {(each.method, each.path) for each in written}
    rest = [each for each in OPERATIONS.values() if (each.verb, each.path) not in taken]
    return [route for operation in rest for route in _derive_all(operation)]


def _derive_all(operation: Operation) -> list[HttpRoute]:
    """Return the route of an operation, or one for each action on redrive jobs."""
    if operation.name != "change_redrive":
        return [_derive(operation)]
    return [
        _derive(operation, {"action": action})._replace(
            path=operation.path.replace("{action}", action), summary=_ACTIONS[action]
        )
        for action in JOB_ACTIONS
    ]


def _derive(operation: Operation, fixed: dict[str, Any] | None = None) -> HttpRoute:
    """Return the route of an operation.

    Arguments:
        fixed: arguments that are parts of the path.
    """
    names = {each.sent_as: each.name for each in operation.parameters}
    rest = [
        each
        for each in operation.parameters
        if each.is_sent and f"{{{each.sent_as}}}" not in operation.path and each.name not in (fixed or {})
    ]
    answer = _answer_type(operation)
    own = _BODIES.get(operation.name)

    async def handle(call: Call) -> Reply:
        sent = call.body if call.query is None else call.query
        values: dict[str, Any] = {} if fixed is None else dict(fixed)
        values |= {names[name]: value for name, value in call.path.items()}
        if own is not None:
            values[own] = msgspec.to_builtins(sent) if isinstance(sent, PolicyChanges) else sent
        elif sent is not None:
            values |= {names[name]: getattr(sent, name) for name in sent.__struct_fields__}
        result = await operation.ask(call.mailbox, values)
        if isinstance(result, Page):
            return json_reply(answer(result.items, result.next_cursor))
        return json_reply(Ok() if result is None else answer(result) if operation.answer else result)

    handle.__name__ = operation.name if fixed is None else operation.name.replace("change", *fixed.values())
    types = _TYPES.get(operation.name, {})
    fields = arguments_struct(operation, rest, types) if own is None and rest else None
    body = types.get(own, rest[0].kind) if own else fields
    is_query = operation.verb in ("GET", "DELETE")  # a proxy may drop the body of these methods
    return HttpRoute(
        operation.verb,
        operation.path,
        handle,
        operation.summary,
        answer,
        None if is_query else body,
        fields if is_query else None,
        body_is_optional=own is None and not any(each.is_required for each in rest),
        refusals=tuple(status for name, status in _STATUSES.items() if name in operation.raised),
        examples=_EXAMPLES.get(operation.name, (None, None)),
    )


def _answer_type(operation: Operation) -> Any:
    if operation.result is type(None):
        return Ok
    if not operation.answer:
        return operation.result
    fields: list[Any] = [(operation.answer, operation.items or operation.result)]
    if operation.items is not None:
        fields.append(("next_cursor", str | None, None))
    return msgspec.defstruct(
        f"{_title(operation)}Answer",
        fields,
        frozen=True,
        namespace={"__doc__": f"Answer of {operation.name}."},
    )


def query_struct(name: str, first: int = 0) -> Any:
    """Return the type of the query parameters of an operation, from its `first` argument on."""
    operation = OPERATIONS[name]
    return arguments_struct(operation, operation.parameters[first:], _TYPES.get(name, {}))


def _title(operation: Operation) -> str:
    return re.sub(r"(?:^|_)(\w)", lambda match: match[1].upper(), operation.name)
