"""Tools that find and show messages, with payloads as the console shows them."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from postroom.adapters.mcp.answers import Answer, answer_page, answer_value
from postroom.adapters.mcp.settings import McpSources
from postroom.adapters.mcp.tools import Call, Tool, check_criteria, make_tool, paged
from postroom.application.masking import NO_MASK
from postroom.application.operations import query_contract
from postroom.application.operations.mailbox import OPERATIONS, Position
from postroom.application.operations.operation import arguments_struct
from postroom.application.page import Page
from postroom.application.payload_preview import PayloadPreview, preview_payload, read_envelope, wrap_result
from postroom.application.queries.query_answers import to_filter, to_item
from postroom.application.query_results import MessageDetail, PeekedMessage
from postroom.application.text import visible
from postroom.application.threads import in_query_thread
from postroom.domain.envelope.content import decode_payload
from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope

PAYLOAD_CHARS: Final = 4_000
PEEKED_CHARS: Final = 500
HEX_ROWS: Final = 16
_SHOW: Final = (
    "Return a message with its headers and its state, and its payload from `payload_from` on; "
    "`explain_message` tells its history."
)


def message_tools() -> list[Tool]:
    """Return the tools."""
    search, show, peek = (OPERATIONS[each] for each in ("search_messages", "get_message", "peek_messages"))
    return [
        make_tool(search, _search, paged(query_contract.MessagesQuery)),
        make_tool(show, _show, _MessageRequest)._replace(description=_SHOW),
        make_tool(peek, _peek, paged(arguments_struct(peek), has_cursor=False)),
    ]


async def _search(call: Call, asked: Any) -> Answer:
    fields = {each: getattr(asked, each) for each in asked.__struct_fields__}
    filter_ = to_filter(query_contract.MessagesQuery(**fields), call.session.mailbox.name)
    check_criteria(call, filter_)

    async def ask(limit: int) -> Page[Any]:
        return await call.session.search(msgspec.structs.replace(filter_, limit=limit))

    return await answer_page("items", ask, call.sources.mask, asked.limit, to_item)


class _MessageRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    msg_id: Annotated[str, Meta(min_length=1, max_length=255)]
    payload_from: Annotated[
        Position | None,
        Meta(description="Show the payload, too, from this character on; 0 is its beginning."),
    ] = None


async def _show(call: Call, asked: _MessageRequest) -> Answer:
    session, mask = call.session, call.sources.mask
    if asked.payload_from is None:
        detail = await session.read_headers(asked.msg_id)
    else:
        detail = await session.mailbox.get_message(asked.msg_id)
    left_out = ("item", "history", "result", "traceback")
    facts = {each: getattr(detail, each) for each in detail.__struct_fields__ if each not in left_out}
    facts["headers"] = {
        each: getattr(detail.item, each) for each in MailboxItem.__struct_fields__ if each != "envelope_blob"
    }
    payloads: dict[str, Any] = {}
    if asked.payload_from is not None:
        payloads = await in_query_thread(_payloads, call.sources, detail, asked.payload_from)
    answer = answer_value(facts, mask)
    answer["data"] |= payloads
    return answer


def _payloads(sources: McpSources, detail: MessageDetail, start: int) -> dict[str, Any]:
    """Return a part of the payload of a message, its result, and the traceback of its last failure."""
    parts: dict[str, Any] = {}
    envelope = read_envelope(detail)
    if envelope is not None and not detail.erased:
        preview = preview_payload(envelope, sources.decode or decode_payload, sources.mask)
        parts["payload"] = _part(preview, start, PAYLOAD_CHARS)
    if detail.result is not None:
        preview = preview_payload(wrap_result(detail.result), decode_payload, sources.mask)
        parts["result"] = _part(preview, 0, PAYLOAD_CHARS)
    # Its lines may quote fields of the payload.
    if detail.traceback is not None and sources.mask == NO_MASK:
        parts["traceback"] = visible(detail.traceback[-PAYLOAD_CHARS:])
    return parts


def _part(preview: PayloadPreview, start: int, chars: int) -> dict[str, Any]:
    """Return a part of a payload as it is shown."""
    if preview.format is None:
        return {"bytes": preview.size, "is_masked": True}
    part: dict[str, Any] = {"format": str(preview.format), "bytes": preview.size}
    if preview.text is None:
        part["hex"] = " ".join(each.digits for each in preview.rows[:HEX_ROWS])
    else:
        end = min(start + chars, len(preview.text))
        part["text"] = visible(preview.text[start:end])
        part["is_complete"] = preview.is_complete and end == len(preview.text)
        if end < len(preview.text):
            part["next_payload_from"] = end
    if preview.is_masked:
        part["is_masked"] = True
    return part | ({"problems": list(preview.problems)} if preview.problems else {})


async def _peek(call: Call, asked: Any) -> Answer:
    async def ask(limit: int) -> Page[PeekedMessage]:
        messages = await call.session.mailbox.peek_messages(asked.topic, limit=limit)
        return Page(tuple(messages))

    def show(message: PeekedMessage) -> dict[str, Any]:
        facts: dict[str, Any] = msgspec.structs.asdict(message)
        facts["attrs"] = call.sources.mask.hide_headers(message.attrs)
        if message.payload is not None:
            envelope = PrismEnvelope()
            envelope.payload.value = message.payload
            facts["payload"] = _part(
                preview_payload(envelope, decode_payload, call.sources.mask), 0, PEEKED_CHARS
            )
        return facts

    return await answer_page("messages", ask, NO_MASK, asked.limit, show)
