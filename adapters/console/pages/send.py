"""The page that sends a message: a form with a check of the payload, and code that sends the same."""

from contextlib import suppress
from http import HTTPStatus
from typing import Final

import uuid_utils
from msgspec.structs import replace
from starlette.responses import Response

from postroom.adapters.console.page import NavEntry, Page, route
from postroom.adapters.console.pages.message_actions import redirect_to_message
from postroom.adapters.console.resend import SENT_BEFORE, Draft, explain, read_draft, to_message
from postroom.adapters.console.snippets import Snippet, endpoint_of, send_snippets
from postroom.application.messages import NewMessage
from postroom.domain.capability.rights import Right
from postroom.domain.envelope.content import DecodedPayload, decode_payload
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import IdempotencyConflict, PostroomError
from postroom.domain.names import check_uuid

NAV: Final = NavEntry("Send", "/send", 10, operation=Right.SEND, group="Operations", key="n")
JSON: Final = "application/json"
MAX_TOPICS: Final = 500


async def edit(page: Page) -> Response:
    """Show the form of a message."""
    await page.check(Right.SEND)
    return await _form(page, Draft(page.query.get("topic", ""), "", content_type=JSON))


async def send(page: Page) -> Response:
    """Send the message of the form; or only check it, and show code that sends it."""
    await page.check(Right.SEND)
    draft = read_draft(page.form)
    new_id = check_uuid("The id of the new message", page.field("new_id"))
    try:
        message = to_message(draft, None, None, new_id, page.grant.principal)
        problems = (await page.blocking(_decode, page, message)).problems
        if page.field("code"):
            other = replace(message, message_id=None, principal=None)  # each run sends another message
            snippets = await page.blocking(send_snippets, endpoint_of(page), other)
            return await _form(
                page, draft, new_id=new_id, problems=problems, snippets=snippets, is_checked=True
            )
        if problems and page.field("anyway") != "1":
            return await _form(
                page, draft, new_id=new_id, problems=problems, status=HTTPStatus.UNPROCESSABLE_ENTITY
            )
        sent = await page.mailbox.send_message(message)
    except IdempotencyConflict:
        return await _form(page, draft, error=SENT_BEFORE)
    except PostroomError as error:
        return await _form(page, draft, new_id=new_id, error=explain(error), status=error.status)
    notice = f"Message {sent.message_id} {'had already been sent' if sent.duplicate else 'was sent'}."
    if page.may(Right.READ_HEADERS):
        return redirect_to_message(page, sent.message_id, notice)
    return page.redirect("/send", notice, topic=draft.topic)


def _decode(page: Page, message: NewMessage) -> DecodedPayload:
    """Return the payload, decoded by its content type, or by the schema of the mailbox's namespace."""
    envelope = PrismEnvelope()
    envelope.metadata.topic = message.topic
    envelope.metadata.content_type = message.content_type or ""
    envelope.payload.value = message.payload
    decode = page.data.decode
    return decode_payload(envelope) if decode is None else decode(page.mailbox.name, envelope)


async def _form(
    page: Page,
    draft: Draft,
    *,
    new_id: str = "",
    error: str = "",
    problems: tuple[str, ...] = (),
    snippets: list[Snippet] | None = None,
    is_checked: bool = False,
    status: int = HTTPStatus.OK,
) -> Response:
    topics: list[str] = []
    # Topics are suggestions only, and an owner that did not answer is not asked again.
    if page.may(Right.READ_HEADERS) and status < HTTPStatus.INTERNAL_SERVER_ERROR:
        with suppress(PostroomError):
            topics = [each.topic for each in await page.mailbox.list_topics()][:MAX_TOPICS]
    return await page.render(
        "send/form",
        status,
        draft=draft,
        new_id=new_id or str(uuid_utils.uuid7()),
        error=error,
        problems=problems,
        snippets=snippets or [],
        is_checked=is_checked,
        topics=topics,
        has_schemas=page.data.decode is not None,
    )


ROUTES: Final = [route("/send", edit, query=("topic",)), route("/send", send, method="POST")]
