"""The page of a message: headers, payload, history and hashes; and the form that sends it again."""

import re
from collections.abc import AsyncIterator
from functools import partial
from http import HTTPStatus

import uuid_utils
from starlette.responses import Response, StreamingResponse

from postroom.adapters.console.message_view import (
    MessageView,
    file_suffix,
    hides_headers,
    make_view,
)
from postroom.adapters.console.page import Page, route
from postroom.adapters.console.pages.message_actions import ACTIONS, redirect_to_message
from postroom.adapters.console.resend import (
    SENT_BEFORE,
    Draft,
    draft_of,
    explain,
    message_like,
    read_draft,
    to_message,
)
from postroom.adapters.console.snippets import Snippet, endpoint_of, read_snippets, send_snippets
from postroom.application.masking import NO_MASK
from postroom.application.payload_preview import (
    Decode,
    PayloadPreview,
    decode_bounded,
    preview_payload,
    read_envelope,
    wrap_result,
)
from postroom.application.queries.get_message import MessageVerification, VerifyMessage
from postroom.application.query_results import MessageDetail
from postroom.domain.capability.rights import Right
from postroom.domain.envelope.content import DecodedPayload, PayloadFormat, decode_payload
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import Forbidden, IdempotencyConflict, NotFound, PostroomError
from postroom.domain.integrity import fingerprint
from postroom.domain.names import check_uuid

CHUNK_BYTES = 64 << 10


async def look_up(page: Page) -> Response:
    """Show the message whose id is in the query, or the form for an id."""
    id_ = page.query.get("id", "")
    return await _show(page, id_) if id_ else await page.render("message/look_up")


async def show(page: Page) -> Response:
    """Show a message."""
    return await _show(page, page.path["id"])


async def _show(page: Page, id_: str) -> Response:
    detail = await read_message(page, id_)
    view = make_view(detail, await page.mailbox.explain_message(id_), page.mask)
    verification: MessageVerification | PostroomError | None = None
    preview: PayloadPreview | None = None
    result: PayloadPreview | None = None
    snippets: list[Snippet] = []
    if reads_payloads(page):
        if view.envelope is not None:
            decode = partial(decode_message, page, view.mailbox)
            preview = await page.blocking(preview_payload, view.envelope, decode, page.mask)
            snippets = await page.blocking(_send_snippets, page, view, view.envelope, preview)
        if detail.result is not None:
            wrapped = wrap_result(detail.result)
            result = await page.blocking(preview_payload, wrapped, decode_payload, page.mask)
        if page.data.log is not None:
            try:
                verification = await page.blocking(VerifyMessage(page.data.log), id_)
            except PostroomError as error:
                verification = error
    return await page.render(
        "message/show",
        id=id_,
        message=view,
        actions=[
            name for name, each in ACTIONS.items() if view.status in each.statuses and page.may(each.right)
        ],
        can_read_payload=reads_payloads(page),
        can_resend=_may_resend(page) and view.envelope is not None,
        preview=preview,
        result=result,
        result_type=None if detail.result is None else detail.result.content_type,
        is_erased=detail.erased,
        traceback=detail.traceback if page.mask == NO_MASK else None,
        verification=verification if isinstance(verification, MessageVerification) else None,
        verification_error=verification if isinstance(verification, PostroomError) else None,
        hides_digests=view.is_masked or (preview is not None and preview.is_masked),
        correlation_id=_correlation_id(view),
        alike=_alike(page, view),
        read_snippets=read_snippets(endpoint_of(page), view.id),
        send_snippets=snippets,
    )


async def download(page: Page) -> Response:
    """Return the payload, or the result, as a file, without the fields that are hidden from the caller."""
    detail = await page.mailbox.get_message(page.query.get("id", ""))
    name = detail.message_id
    decode: Decode = decode_payload
    if page.query.get("part") != "result":
        envelope, decode = _envelope(detail), partial(decode_message, page, detail.mailbox)
    elif detail.result is not None:
        envelope, name = wrap_result(detail.result), f"{name[:73]}-result"
    else:
        raise NotFound(f"Message {name} has no result that can be read.")
    decoded = await page.blocking(decode_bounded, envelope, decode)
    shown = await page.blocking(page.mask.hide_fields, decoded)
    if shown is None:
        raise Forbidden(
            "Payload fields are hidden here, and this payload can't be split into fields; to download it, "
            "use a token with the right admin."
        )
    is_whole = shown is decoded
    data = envelope.payload.value if is_whole else shown.data
    suffix = file_suffix(decoded, envelope) if is_whole else "json"
    name = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:80]
    headers = {
        "content-type": "application/octet-stream",
        "content-length": str(len(data)),
        "content-disposition": f'attachment; filename="{name}.{suffix}"',
    }
    return StreamingResponse(_chunks(data), headers=headers)


async def edit(page: Page) -> Response:
    """Show the form in which a message is edited to be sent as a new one."""
    detail, envelope = await _editable(page, page.query.get("id", ""))
    # Nothing can be sent to the subscription that got a copy.
    topic = detail.topic if detail.copy_of is None else envelope.metadata.topic
    draft = await page.blocking(draft_of, envelope, detail.message_id, topic)
    return await _render_form(page, detail, draft)


async def resend(page: Page) -> Response:
    """Send the edited message as a new one, caused by the original."""
    detail, envelope = await _editable(page, page.field("id"))
    draft = read_draft(page.form)
    new_id = check_uuid("The id of the new message", page.field("new_id"))
    try:
        message = to_message(draft, envelope, detail.message_id, new_id, page.grant.principal)
        sent = await page.mailbox.send_message(message)
    except IdempotencyConflict:
        return await _render_form(page, detail, draft, error=SENT_BEFORE)
    except PostroomError as error:
        return await _render_form(
            page, detail, draft, error=explain(error), status=error.status, new_id=new_id
        )
    done = "It had already been sent" if sent.duplicate else "It was sent"
    return redirect_to_message(
        page, sent.message_id, f"{done}: this is the new message, caused by {detail.message_id}."
    )


async def read_message(page: Page, id_: str) -> MessageDetail:
    """Return a message, with its payload if the caller may read it."""
    if reads_payloads(page):
        return await page.mailbox.get_message(id_)
    return await page.session.read_headers(id_)


def _correlation_id(view: MessageView) -> str:
    """Return the correlation id to link to; empty if the message has none or it is hidden."""
    return next((each.value for each in view.headers if each.parameter == "correlation_id" and each.link), "")


def _alike(page: Page, view: MessageView) -> str | None:
    """Return the link to the dead letters of the topic with the same error."""
    if view.last_dead_lettering is None:
        return None
    own = fingerprint(view.reason, view.last_error or None)
    return page.url("/dead-letters/letters", topics=view.topic, fingerprint=own)


def reads_payloads(page: Page) -> bool:
    """Return whether the caller may read payloads."""
    return Right.READ_PAYLOAD in page.grant.operations


def decode_message(page: Page, mailbox: str, envelope: PrismEnvelope) -> DecodedPayload:
    """Return the payload of a message, by the schemas of its mailbox if there are any."""
    decode = page.data.decode
    return decode_payload(envelope) if decode is None else decode(mailbox, envelope)


def _envelope(detail: MessageDetail) -> PrismEnvelope:
    envelope = read_envelope(detail)
    if envelope is None:
        raise NotFound(
            f"The stored envelope of message {detail.message_id} was altered and can't be parsed; restore "
            "the store from a backup."
        )
    return envelope


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _may_resend(page: Page) -> bool:
    return page.may(Right.SEND) and page.may(Right.READ_PAYLOAD)


async def _editable(page: Page, id_: str) -> tuple[MessageDetail, PrismEnvelope]:
    """Return a message to edit, with its envelope.

    Raises: Forbidden if parts of it are hidden from the caller, as the new message would lack them.
    """
    detail = await page.mailbox.get_message(id_)
    envelope = _envelope(detail)
    mask = page.mask
    if mask != NO_MASK:
        decoded = await page.blocking(decode_bounded, envelope, partial(decode_message, page, detail.mailbox))
        if hides_headers(detail, envelope, mask) or mask.hide_fields(decoded) is not decoded:
            raise Forbidden(
                "Headers or fields of this message are hidden from you and would be lost; to edit it, use a "
                "token with the right admin."
            )
    return detail, envelope


async def _render_form(
    page: Page,
    detail: MessageDetail,
    draft: Draft,
    *,
    error: str = "",
    status: int = HTTPStatus.OK,
    new_id: str = "",
) -> Response:
    return await page.render(
        "message/resend",
        status,
        message=detail,
        draft=draft,
        error=error,
        new_id=new_id or str(uuid_utils.uuid7()),
    )


def _send_snippets(
    page: Page, view: MessageView, envelope: PrismEnvelope, preview: PayloadPreview
) -> list[Snippet]:
    """Return snippets that send a message like this one; none if parts of it are hidden or encrypted."""
    if preview.is_masked or view.is_masked or preview.format == PayloadFormat.ENCRYPTED:
        return []
    try:
        message = message_like(envelope, view.id, view.topic)
    except PostroomError as error:
        return [Snippet("Send it again", None, str(error))]
    return send_snippets(endpoint_of(page), message)


ROUTES = [
    route("/messages", look_up, query=("id",)),
    route("/messages/{id:path}", show),
    route("/message/payload", download, query=("id", "part")),
    route("/message/resend", edit, query=("id",)),
    route("/message/resend", resend, method="POST"),
]
