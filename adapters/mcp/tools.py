"""Tools of agents, derived from the table of operations.

No text of a tool depends on the contents of a mailbox.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple, get_origin

import msgspec
from msgspec import Meta

from postroom.adapters.mcp.answers import (
    MAX_ROWS,
    ROWS,
    Answer,
    answer_page,
    answer_rows,
    answer_value,
)
from postroom.adapters.mcp.settings import McpSources
from postroom.application.operations.mailbox import OPERATIONS, Text
from postroom.application.operations.operation import Operation, arguments_struct
from postroom.application.page import Page
from postroom.application.query_results import Explanation
from postroom.application.service import Service, Session
from postroom.domain.capability.rights import Right
from postroom.domain.search import EventFilter

READS: Final = (
    "explain_message",
    "list_dead_letters",
    "get_backlog",
    "list_topics",
    "describe_topic",
    "get_topic_policy",
    "list_consumers",
    "list_workers",
    "list_subscriptions",
    "list_schedules",
    "list_redrives",
    "get_redrive",
    "list_redrive_messages",
)
"""Operations that are tools as they are."""
_ROWS: Final = {"explain_message": "story", "get_backlog": "shards", "describe_topic": "consumers"}
"""Fields whose items are the rows of an answer, by operation."""
Limit = Annotated[int, Meta(ge=1, le=MAX_ROWS, description="Maximum number of rows.")]
Cursor = Annotated[Text | None, Meta(description="`next_cursor` of the previous answer.")]


class Call(NamedTuple):
    """A call of a tool: the caller's session, and the data sources of tools."""

    session: Session
    service: Service
    sources: McpSources


class Tool(NamedTuple):
    """A tool.

    Arguments:
        name, description: name and description for agents.
        right: right that a caller needs for the tool to be listed; the mailbox checks each call.
        request: struct of the arguments.
        run: answers a call.
        command: name of the permission of a command, or of its preview; empty for a read.
        changes: whether it changes anything.
    """

    name: str
    right: Right
    description: str
    request: Any
    run: Callable[[Call, Any], Awaitable[Answer]]
    command: str = ""
    changes: bool = False


def describe(operation: Operation) -> str:
    """Return the documentation of an operation, without the errors and the clauses that it quotes."""
    text = (inspect.getdoc(operation.method) or "").partition("\nRaises: ")[0]
    return re.sub(r" \((?:svc-mailbox|RFC|SDS)[^)]*\)", "", text).strip()


def paged(kind: Any, *, has_cursor: bool = True, **defaults: Any) -> Any:
    """Return the type of a request whose rows are limited.

    Arguments:
        kind: struct of the other arguments; its own paging is left out.
        defaults: defaults of arguments that differ from those of `kind`.
    """
    fields: list[Any] = []
    for each in msgspec.structs.fields(kind):
        if each.name in ("limit", "cursor", "offset"):
            continue
        if each.name in defaults:
            fields.append((each.name, each.type, defaults[each.name]))
        elif each.default_factory is not msgspec.NODEFAULT:
            fields.append((each.name, each.type, msgspec.field(default_factory=each.default_factory)))
        else:
            fields.append((each.name, each.type, *(() if each.required else (each.default,))))
    fields.append(("limit", Limit, ROWS))
    if has_cursor:
        fields.append(("cursor", Cursor, None))
    return msgspec.defstruct(kind.__name__, fields, frozen=True, forbid_unknown_fields=True, kw_only=True)


def make_tool(operation: Operation, run: Callable[[Call, Any], Awaitable[Answer]], request: Any) -> Tool:
    """Return the tool of an operation that reads."""
    return Tool(operation.name, operation.right, describe(operation), request, run)


def derive(name: str) -> Tool:
    """Return the tool of an operation that is a tool as it is."""
    operation = OPERATIONS[name]
    request = arguments_struct(operation)
    is_list = get_origin(operation.result) is list
    names = {each.sent_as: each.name for each in operation.parameters if each.is_sent}
    has_pages = operation.items is not None
    if has_pages or is_list or name in _ROWS:
        request = paged(request)
    field = operation.answer if has_pages or is_list else _ROWS.get(name, "")

    async def run(call: Call, asked: Any) -> Answer:
        values = {name: getattr(asked, sent_as) for sent_as, name in names.items()}
        mask = call.sources.mask
        if has_pages:

            async def ask(limit: int) -> Page[Any]:
                page: Page[Any] = await operation.ask(call.session.mailbox, {**values, "limit": limit})
                return page

            return await answer_page(field, ask, mask, asked.limit)
        result = await operation.ask(call.session.mailbox, values)
        if isinstance(result, Explanation):
            result = await _without_sender(call, result)
        if field:
            return answer_rows(field, result, mask, asked.limit, asked.cursor)
        return answer_value({operation.answer: result} if operation.answer else result, mask)

    return make_tool(operation, run, request)


async def _without_sender(call: Call, explanation: Explanation) -> Explanation:
    """Return an explanation whose sentences do not name the sender, if senders are hidden."""
    mask = call.sources.mask
    if not mask.covers_header("principal"):
        return explanation
    sender = (await call.session.read_headers(explanation.message_id)).item.principal
    story = [
        msgspec.structs.replace(each, text=mask.hide_sender(each.text, sender)) for each in explanation.story
    ]
    return msgspec.structs.replace(explanation, story=story)


def check_criteria(call: Call, filter_: EventFilter) -> None:
    """Raise Forbidden for a criterion whose matches would disclose hidden values."""
    call.sources.mask.check_criteria(filter_, "leave it out")


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """Return the JSON schema of the arguments of a tool."""
    schema = msgspec.json.schema(tool.request)
    components = schema.pop("$defs")
    own = components.pop(tool.request.__name__)
    own.pop("title", None)
    own.pop("description", None)
    for each in components.values():
        if "description" in each:  # Python removes the indentation from 3.13 on
            each["description"] = inspect.cleandoc(each["description"])
    return {**own, **({"$defs": components} if components else {})}
