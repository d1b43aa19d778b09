"""`postroom send`, `recv`, `ack`, `nack`, `extend`: the life of a message."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from postroom.adapters.cli.failures import NOTHING, describe, exit_code
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage, parse_duration, parse_pairs, read_words, readable
from postroom.domain.errors import InvalidRequest, Rejected

if TYPE_CHECKING:
    from postroom.adapters.compose import Postroom
    from postroom.application.messages import ReceivedMessage
    from postroom.domain.message import Receipt

Receipts = Annotated[
    list[str], Argument(metavar="RECEIPT...", help="Receipts that recv printed; - reads them from stdin.")
]


async def send(
    session: Session,
    topic: Annotated[str, Argument(help="Topic, such as orders.created.")],
    payload: Annotated[str, Argument(help="Payload as text; - reads it from stdin.")] = "-",
    file: Annotated[str | None, Option(metavar="FILE", help="Read the payload from a file.")] = None,
    key: Annotated[
        str | None, Option(help="Sticky key: messages with the same key keep their order.")
    ] = None,
    idem_key: Annotated[
        str | None, Option(help="Sending again with this key and payload adds nothing.")
    ] = None,
    attr: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="Custom header; may be repeated.")
    ] = None,
    id_: Annotated[str | None, Option("--id", help="Message id of your own, unique for ever.")] = None,
    delay: Annotated[str, Option(metavar="DURATION", help="Hide the message for this long first.")] = "0",
    ttl: Annotated[
        str, Option(metavar="DURATION", help="Dead-letter it when undelivered for this long.")
    ] = "0",
    priority: Annotated[int, Option(min=0, max=10, help="Noted in the envelope for consumers.")] = 5,
    content_type: Annotated[str | None, Option(help="Media type of the payload.")] = None,
    principal: Annotated[str | None, Option(help="Who publishes it.")] = None,
    correlation_id: Annotated[
        str | None, Option(help="Id that ties the messages of one request together.")
    ] = None,
    causality_parent: Annotated[str | None, Option(help="Id of the message that caused this one.")] = None,
    trace_id: Annotated[str | None, Option()] = None,
    span_id: Annotated[str | None, Option()] = None,
    schema_url: Annotated[str | None, Option()] = None,
    schema_version: Annotated[str | None, Option()] = None,
) -> None:
    """Send a message, and print its id once it is durable."""
    from postroom.application.messages import NewMessage

    message = NewMessage(
        topic=topic,
        payload=_payload(payload, file),
        idem_key=idem_key,
        sticky_key=key,
        attrs=parse_pairs(attr or (), "--attr"),
        message_id=id_,
        deliver_after_ms=parse_duration(delay),
        ttl_seconds=_seconds(ttl),
        priority=priority,
        content_type=content_type,
        principal=principal,
        correlation_id=correlation_id,
        causality_parent=causality_parent,
        trace_id=trace_id,
        span_id=span_id,
        schema_url=schema_url,
        schema_version=schema_version,
    )
    async with session.own(create=True) as postroom:
        sent = await postroom.send_message(message)
    if session.out.as_json:
        session.out.json({"msg_id": sent.message_id, "duplicate": sent.duplicate})
    else:
        session.out.line(sent.message_id)
        if sent.duplicate:
            session.out.note("It had been sent before; nothing was added.")


async def recv(
    session: Session,
    topic: Annotated[str, Argument(help="Topic to receive from.")],
    max_messages: Annotated[int, Option("--max", help="Messages at most.")] = 32,
    max_bytes: Annotated[int, Option(help="Payload bytes of all together; one message always fits.")] = 512
    << 10,
    visibility: Annotated[
        str | None,
        Option(metavar="DURATION", help="Hide them for this long; default as the topic's policy says."),
    ] = None,
    wait: Annotated[str, Option(metavar="DURATION", help="Wait this long for a message, up to 60s.")] = "0",
    ack: Annotated[bool, Option("--ack", help="Settle them as soon as they are printed.")] = False,
    consumer: Annotated[str | None, Option(help="Who receives, for the message's history.")] = None,
) -> int | None:
    """Receive messages, oldest first, each with the receipt that settles it.

    The messages stay hidden until they are acked or nacked, or their visibility ends and they come again.
    With --json it prints a JSON object a line.
    """
    async with session.own() as postroom:
        messages = await postroom.receive_messages(
            topic,
            max_messages=max_messages,
            max_bytes=max_bytes,
            visibility_ms=None if visibility is None else parse_duration(visibility),
            wait_ms=parse_duration(wait),
            consumer=consumer,
        )
        for message in messages:
            _show_received(session, message)
        session.out.flush()
        if ack:
            refusals = await postroom.ack_messages([message.receipt for message in messages])
            for refusal in refusals:
                if refusal is not None:
                    raise refusal
    if not messages:
        session.out.note(f"Topic {topic} has nothing to receive now.")
        return NOTHING
    return None


async def ack(session: Session, receipts: Receipts) -> int:
    """Settle received messages for good; settling one again with the same receipt is fine."""
    return await _settle(session, receipts, "acked", lambda postroom, given: postroom.ack_messages(given))


async def nack(
    session: Session,
    receipts: Receipts,
    reason: Annotated[str | None, Option(help="What went wrong; kept with the message.")] = None,
    delay: Annotated[
        str | None, Option(metavar="DURATION", help="Hide them for exactly this long instead of the backoff.")
    ] = None,
) -> int:
    """Give received messages back: they come again later, or are dead letters after their last attempt."""
    delay_ms = None if delay is None else parse_duration(delay)
    return await _settle(
        session,
        receipts,
        "nacked",
        lambda postroom, given: postroom.nack_messages(given, reason=reason, delay_ms=delay_ms),
    )


async def extend(
    session: Session,
    receipts: Receipts,
    visibility: Annotated[str, Option(metavar="DURATION", help="Hide them for this long from now.")],
) -> int:
    """Hide received messages for longer, so that they don't come again while they are worked on."""
    visibility_ms = parse_duration(visibility)
    return await _settle(
        session,
        receipts,
        "extended",
        lambda postroom, given: postroom.extend_visibility(given, visibility_ms),
    )


Settle = Callable[["Postroom", Sequence["Receipt"]], Awaitable[list[Rejected | None]]]


async def _settle(session: Session, tokens: list[str], done: str, settle: Settle) -> int:
    from postroom.application.messages import read_receipt

    tokens = read_words(tokens, sys.stdin.buffer)
    receipts = [read_receipt(token) for token in tokens]
    async with session.own() as postroom:
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


def _show_received(session: Session, message: "ReceivedMessage") -> None:
    text, is_text = readable(message.payload)
    if session.out.as_json:
        facts: dict[str, Any] = message.to_json()
        session.out.json(facts | ({"payload": text} if is_text else {}))
        return
    facts = message.to_json()
    session.out.line(
        f"{message.message_id}  {message.topic}  attempt {message.attempt}  receipt {facts['receipt']}"
    )
    session.out.line(text if is_text else f"base64:{text}")


def _payload(payload: str, file: str | None) -> bytes:
    if file is not None and payload != "-":
        raise WrongUsage("The payload was given both as text and with --file; give it once.")
    if file is None and payload != "-":
        return payload.encode("utf-8", "surrogateescape")
    try:
        with open(file, "rb") if file is not None else nullcontext(sys.stdin.buffer) as source:
            return source.read()
    except OSError as error:
        raise InvalidRequest(
            f"The payload can't be read from {Path(file or '-')}: {error.strerror}."
        ) from error


def _seconds(duration: str) -> int:
    ms = parse_duration(duration)
    if ms % 1_000:
        raise WrongUsage(f"--ttl {duration} is no whole number of seconds; round it.")
    return ms // 1_000
