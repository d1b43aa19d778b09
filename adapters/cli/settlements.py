"""`postroom ack`, `nack`, `extend` and `result`: settling deliveries, and their results."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from postroom.adapters.cli.remote import use_mailbox
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import (
    NOTHING,
    WrongUsage,
    describe,
    exit_code,
    parse_duration,
    read_payload,
    read_words,
    readable,
)
from postroom.domain.errors import Rejected
from postroom.domain.message import NackAction

if TYPE_CHECKING:
    from postroom.application.operations.mailbox import Mailbox
    from postroom.domain.message import Receipt

Receipts = Annotated[
    list[str], Argument(metavar="RECEIPT...", help="Receipts from recv; - reads them from stdin.")
]


Settle = Callable[["Mailbox", Sequence["Receipt"]], Awaitable[list[Rejected | None]]]


async def ack(
    session: Session,
    receipts: Receipts,
    result: Annotated[
        str | None, Option(help="Result for the sender, see postroom result; - reads it from stdin.")
    ] = None,
    result_file: Annotated[str | None, Option(metavar="FILE", help="Read the result from a file.")] = None,
    content_type: Annotated[str | None, Option(help="Media type of the result.")] = None,
) -> int:
    """Acknowledge received messages, so that they are not delivered again; idempotent."""
    if result is None and result_file is None:
        if content_type is not None:
            raise WrongUsage("--content-type needs --result or --result-file.")
        return await _settle(
            session, receipts, "acked", lambda postroom, receipts: postroom.ack_messages(receipts)
        )
    from postroom.application.messages import MessageResult

    if result is not None and result_file is not None:
        raise WrongUsage("--result and --result-file exclude each other; omit one.")
    if result == "-" and "-" in receipts:
        raise WrongUsage("Receipts and result can't both be read from stdin; use --result-file.")
    answer = MessageResult(read_payload("-" if result is None else result, result_file), content_type)
    return await _settle(
        session,
        receipts,
        "acked",
        lambda postroom, receipts: postroom.ack_messages(receipts, results=[answer] * len(receipts)),
    )


async def result(
    session: Session,
    message_id: Annotated[str, Argument(help="Message id.")],
    wait: Annotated[
        str, Option(metavar="DURATION", help="Wait up to this long, at most 60s, for the result.")
    ] = "0",
) -> int | None:
    """Show the result of a message, which its consumer gave with the ack.

    Ends with exit code 3 if the message is not acked, dead-lettered or removed yet.
    """
    wait_ms = parse_duration(wait)
    async with use_mailbox(session) as postroom:
        outcome = await postroom.wait_for_result(message_id, wait_ms=wait_ms)
    answer = outcome.result
    text, is_text = (None, True) if answer is None else readable(answer.payload)
    if session.out.as_json:
        facts = {name: getattr(outcome, name) for name in outcome.__struct_fields__ if name != "result"}
        shown = {"payload" if is_text else "payload_b64": text}
        session.out.json(facts | shown | {"content_type": None if answer is None else answer.content_type})
    elif text is not None:
        session.out.payload(text, is_text)
    elif not outcome.is_final:
        session.out.note(f"Message {message_id} is {outcome.status.replace('_', ' ')}; wait with --wait 30s.")
    elif outcome.status == "acked" and not outcome.erased:
        session.out.note(f"Message {message_id} was acked without a result.")
    else:
        _ = outcome.payload  # raises NotFound with the reason
    return None if outcome.is_final else NOTHING


async def nack(
    session: Session,
    receipts: Receipts,
    reason: Annotated[
        str | None, Option(help="What went wrong; recorded as the message's last error.")
    ] = None,
    delay: Annotated[
        str | None, Option(metavar="DURATION", help="Redeliver after exactly this time; default: backoff.")
    ] = None,
    action: Annotated[
        NackAction,
        Option(help="retry; reject: dead-letter them at once; release: requeue them, no attempt counted."),
    ] = "retry",
) -> int:
    """Return received messages for redelivery; after their last attempt they become dead letters."""
    from postroom.application.mailbox.settle import check_nack

    options = check_nack(reason, None if delay is None else parse_duration(delay), action)._asdict()
    return await _settle(
        session,
        receipts,
        {"retry": "nacked", "reject": "rejected", "release": "released"}[action],
        lambda postroom, receipts: postroom.nack_messages(receipts, **options),
    )


async def extend(
    session: Session,
    receipts: Receipts,
    visibility: Annotated[str, Option(metavar="DURATION", help="Time to hide them, from now.")],
) -> int:
    """Extend the visibility of received messages that are still being processed."""
    visibility_ms = parse_duration(visibility)
    return await _settle(
        session,
        receipts,
        "extended",
        lambda postroom, receipts: postroom.extend_visibility(receipts, visibility_ms),
    )


async def _settle(session: Session, tokens: list[str], done: str, settle: Settle) -> int:
    from postroom.application.messages import read_receipt

    tokens = read_words(tokens, sys.stdin.buffer)
    receipts = [read_receipt(token) for token in tokens]
    async with use_mailbox(session) as postroom:
        refusals = await settle(postroom, receipts)
    if session.out.as_json:
        session.out.json(
            [
                {"receipt": token, "ok": refusal is None} | ({} if refusal is None else describe(refusal))
                for token, refusal in zip(tokens, refusals, strict=True)
            ]
        )
    else:
        session.out.line(f"{refusals.count(None)} {done}")
        for refusal in filter(None, refusals):
            session.out.error(describe(refusal))
    return max((exit_code(refusal) for refusal in refusals if refusal is not None), default=0)
