"""The comparison of two messages: headers, histories and payloads side by side."""

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from starlette.responses import Response

from postroom.adapters.console.comparison import (
    Comparison,
    compare_headers,
    compare_histories,
    compare_payloads,
)
from postroom.adapters.console.message_view import make_view
from postroom.adapters.console.page import Page, route
from postroom.adapters.console.pages.message import decode_message, read_message, reads_payloads
from postroom.application.payload_preview import decode_bounded
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope

TEXTS: Final = {
    "differs": "differs",
    "first": "only in the first",
    "second": "only in the second",
    "hidden": "hidden",
    "same": "same",
}
KINDS: Final = {"differs": "warn", "first": "bad", "second": "good"}


class Payloads(NamedTuple):
    """The payloads of two messages, compared.

    Arguments:
        comparison: None if one of the payloads is hidden as a whole, or can't be read.
        are_equal: whether the bytes are equal; None if the reader may not know.
    """

    sizes: tuple[int, ...]
    formats: tuple[str, ...]
    comparison: Comparison | None
    is_masked: bool
    are_equal: bool | None


async def show(page: Page) -> Response:
    """Show the two messages of the URL, or the form for their ids."""
    ids = [each for each in page.query.getlist("id") if each.strip()]
    if len(ids) != 2:
        error = f"Choose two messages; {len(ids)} are chosen." if len(ids) > 2 or page.query else ""
        return await page.render("compare/choose", ids=[*ids[:2], "", ""][:2], error=error)
    details = [await read_message(page, each) for each in ids]
    first, second = [
        make_view(each, await page.mailbox.explain_message(id_), page.mask)
        for id_, each in zip(ids, details, strict=True)
    ]
    headers = compare_headers(first, second)
    payloads = None
    envelopes = [each.envelope for each in (first, second) if each.envelope is not None]
    if reads_payloads(page) and len(envelopes) == 2:
        payloads = await page.blocking(_compare_payloads, page, envelopes, first.mailbox)
    return await page.render(
        "compare/show",
        ids=ids,
        messages=(first, second),
        headers=[each for each in headers if each.kind != "same"],
        same=[each for each in headers if each.kind == "same"],
        steps=compare_histories(first.timeline, second.timeline),
        omitted=first.omitted or second.omitted,
        payloads=payloads,
        can_read_payload=reads_payloads(page),
        texts=TEXTS,
        kinds=KINDS,
    )


def _compare_payloads(page: Page, envelopes: Sequence[PrismEnvelope], mailbox: str) -> Payloads:
    payloads = [decode_bounded(each, partial(decode_message, page, mailbox)) for each in envelopes]
    shown = [page.mask.hide_fields(each) for each in payloads]
    visible = [each for each in shown if each is not None]
    is_masked = any(one is not other for one, other in zip(payloads, shown, strict=True))
    first, second = (each.payload.value for each in envelopes)
    return Payloads(
        (len(first), len(second)),
        tuple("hidden" if each is None else str(each.format) for each in shown),
        compare_payloads(visible[0], visible[1]) if len(visible) == 2 else None,
        is_masked,
        None if is_masked else first == second,
    )


ROUTES: Final = [route("/compare", show, query=("id",), lists=("id",))]
