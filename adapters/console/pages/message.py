"""The page of a message: headers, payload, history, hashes and actions."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

import uuid_utils
from starlette.responses import Response, StreamingResponse

from postroom.adapters.console.message_view import (
    MessageView,
    file_suffix,
    hides_headers,
    make_view,
)
from postroom.adapters.console.page import Page, route
from postroom.adapters.console.resend import Draft, draft_of, explain, message_like, read_draft, to_message
from postroom.adapters.console.snippets import Snippet, endpoint_of, read_snippets, send_snippets
from postroom.adapters.console.values import read_due
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
from postroom.application.query_results import LEFT_ALONE, MessageChange, MessageDetail
from postroom.application.reports import RedriveReport
from postroom.domain.capability.rights import Right
from postroom.domain.envelope.content import DecodedPayload, PayloadFormat, decode_payload
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import Forbidden, IdempotencyConflict, NotFound, PostroomError
from postroom.domain.integrity import fingerprint
from postroom.domain.names import check_uuid
from postroom.domain.redrive.spec import RedriveSpec

CHUNK_BYTES = 64 << 10
JOB_POLLS, JOB_SECONDS = 20, 0.05
"""Number and interval of the polls for the end of a job that the page started."""


class _Action(NamedTuple):
    """An action: the right that it needs, its past participle, and the statuses that it is for."""

    right: Right
    done: str
    statuses: tuple[str, ...] = ("dead",)


_ACTIONS = {
    "redrive": _Action(Right.REDRIVE, "redriven"),
    "archive": _Action(Right.ADMIN, "archived"),
    "purge": _Action(Right.ADMIN, "purged"),
    "reschedule": _Action(Right.ADMIN, "rescheduled", ("ready", "delayed")),
    "cancel": _Action(Right.ADMIN, "cancelled", ("ready", "delayed", "in_flight")),
}


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
            name for name, each in _ACTIONS.items() if view.status in each.statuses and page.may(each.right)
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


async def confirm(page: Page) -> Response:
    """Ask whether an action is to be done."""
    return await _ask(page, _action(page), page.query.get("id", ""))


async def act(page: Page) -> Response:
    """Redrive, archive or purge a dead letter, by a job of this one message."""
    action = _action(page)
    detail = await page.session.read_headers(page.field("id"))
    spec = RedriveSpec(
        action=action,  # type: ignore[arg-type]  # one of its literals
        topics=(detail.topic,),
        message_ids=(detail.message_id,),
        # Jobs skip originals that have been replaced by copies, unless they select that reason.
        reasons=("replaced",) if detail.reason == "replaced" else (),
    )
    job_id = check_uuid("The redrive job id", page.field("job_id"))
    report = await page.mailbox.start_redrive(spec, job_id=job_id)
    return redirect_to_message(page, detail.message_id, _describe(await _wait(page, report), action))


async def cancel(page: Page) -> Response:
    """Cancel a message that is ready, delayed or in flight."""
    reason = page.field("reason").strip() or None
    return await _change(page, "cancel", lambda id_: page.mailbox.cancel_messages([id_], reason=reason))


async def reschedule(page: Page) -> Response:
    """Deliver a message that is ready or delayed now, or after a time."""
    due = partial(read_due, "Deliver after", page.field("delay"))
    return await _change(page, "reschedule", lambda id_: page.mailbox.reschedule_messages([id_], **due()))


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
    fields = {name: value for name, value in page.form.items() if isinstance(value, str)}
    draft = read_draft(fields)
    new_id = check_uuid("The id of the new message", page.field("new_id"))
    try:
        message = to_message(draft, envelope, detail.message_id, new_id, page.grant.principal)
        sent = await page.mailbox.send_message(message)
    except IdempotencyConflict:
        notice = (
            "This form was submitted before with other content, so nothing was sent; submit it again to send "
            "the message below."
        )
        return await _render_form(page, detail, draft, error=notice)
    except PostroomError as error:
        return await _render_form(
            page, detail, draft, error=explain(error), status=error.status, new_id=new_id
        )
    done = "It had already been sent" if sent.duplicate else "It was sent"
    return redirect_to_message(
        page, sent.message_id, f"{done}: this is the new message, caused by {detail.message_id}."
    )


def redirect_to_message(page: Page, id_: str, notice: str) -> Response:
    """Return the redirect to a message that answers an action; the page shows the notice."""
    return page.redirect("/messages", notice, id=id_)


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


# -- actions ---


def _action(page: Page) -> str:
    action = page.path["action"]
    if action not in _ACTIONS:
        raise NotFound("This page does not exist.")
    return action


async def _wait(page: Page, report: RedriveReport) -> RedriveReport:
    """Wait until a job has ended, for a second at most; return its latest report."""
    for _ in range(JOB_POLLS):
        if not report.is_active:
            break
        await asyncio.sleep(JOB_SECONDS)
        try:
            report = await page.mailbox.get_redrive(report.job_id)
        except Forbidden:  # the right admin does not include the right redrive, which shows jobs
            break
    return report


def _describe(report: RedriveReport, action: str) -> str:
    """Return the result of a job of one message, as a sentence."""
    done = _ACTIONS[action].done
    if report.moved:
        return f"The message was {done}, by job {report.job_id}."
    if report.status == "completed":
        return f"Nothing was {done}: the message is no longer a dead letter (job {report.job_id})."
    return f"The message is to be {done} by job {report.job_id}, which is {report.status}."


async def _ask(page: Page, action: str, id_: str, error: str = "", status: int = HTTPStatus.OK) -> Response:
    """Ask to confirm an action; after an error, with the values that were entered."""
    return await page.render(
        "message/confirm",
        status,
        id=id_,
        message=await page.session.read_headers(id_),
        action=action,
        facts=_ACTIONS[action],
        may=page.may(_ACTIONS[action].right),
        job_id=str(uuid_utils.uuid7()),
        error=error,
    )


async def _change(
    page: Page, action: str, change: Callable[[str], Awaitable[list[MessageChange]]]
) -> Response:
    """Change the message of a form by its id, and tell the outcome."""
    id_ = page.field("id")
    await page.session.read_headers(id_)  # refuses a message that the caller may not see
    try:
        (result,) = await change(id_)
    except PostroomError as error:
        return await _ask(page, action, id_, str(error), error.status)
    done, outcome = _ACTIONS[action].done, result.outcome
    if outcome == "changed":
        return redirect_to_message(page, id_, f"The message was {done}.")
    notice = f"Nothing was {done}, as the message {LEFT_ALONE[outcome]}."
    if outcome == "expires_first":
        return await _ask(page, action, id_, notice, HTTPStatus.BAD_REQUEST)
    return redirect_to_message(page, id_, notice)


# -- edit and resend ---


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
    route("/message/cancel", cancel, method="POST"),
    route("/message/reschedule", reschedule, method="POST"),
    route("/message/{action}", confirm, query=("id",)),
    route("/message/{action}", act, method="POST"),
]
