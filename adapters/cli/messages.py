"""`postroom send`, `peek`, `recv`, `cancel` and `reschedule`: sending, receiving and changing messages."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from postroom.adapters.cli.output import Id, Time
from postroom.adapters.cli.remote import read_store, use_mailbox
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import (
    NOTHING,
    WrongUsage,
    format_duration,
    parse_due,
    parse_duration,
    parse_pairs,
    read_payload,
    read_words,
    readable,
)
from postroom.application.text import pluralize
from postroom.domain.errors import Forbidden
from postroom.domain.message import OnConflict
from postroom.domain.policy import DEFAULT_MAX_BYTES, DEFAULT_MAX_MESSAGES

if TYPE_CHECKING:
    from postroom.application.operations.mailbox import Mailbox
    from postroom.application.query_results import MessageChange, PeekedMessage
    from postroom.application.received_messages import ReceivedMessage


async def send(
    session: Session,
    topic: Annotated[str, Argument(help="Topic, such as orders.created.")],
    payload: Annotated[str, Argument(help="Payload as text; - reads it from stdin.")] = "-",
    file: Annotated[str | None, Option(metavar="FILE", help="Read the payload from a file.")] = None,
    key: Annotated[
        str | None, Option(help="Sticky key: messages with the same key keep their order.")
    ] = None,
    idem_key: Annotated[
        str | None, Option(help="Idempotency key: sending the same payload with it again adds nothing.")
    ] = None,
    attr: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="Custom header; may be repeated.")
    ] = None,
    id_: Annotated[
        str | None,
        Option(
            "--id",
            help="Message id; default: a new UUIDv7. Sending it again with the same payload adds nothing.",
        ),
    ] = None,
    delay: Annotated[
        str, Option(metavar="DURATION", help="Deliver it after this time at the earliest.")
    ] = "0",
    ttl: Annotated[
        str, Option(metavar="DURATION", help="Dead-letter it if it is not delivered within this time.")
    ] = "0",
    priority: Annotated[
        int,
        Option(
            min=0, max=10, help="10 is the most urgent; obeyed if the topic's policy has priorities=true."
        ),
    ] = 5,
    content_type: Annotated[str | None, Option(help="Media type of the payload.")] = None,
    principal: Annotated[str | None, Option(help="Publisher.")] = None,
    correlation_id: Annotated[str | None, Option(help="Id shared by all messages of one request.")] = None,
    causality_parent: Annotated[str | None, Option(help="Id of the message that caused this one.")] = None,
    trace_id: Annotated[str | None, Option(help="Trace id, for distributed tracing.")] = None,
    span_id: Annotated[str | None, Option(help="Span id, for distributed tracing.")] = None,
    schema_url: Annotated[str | None, Option(help="Schema of the payload.")] = None,
    schema_version: Annotated[str | None, Option(help="Version of that schema.")] = None,
    unique_key: Annotated[
        str | None, Option(help="While an unsettled message of the topic has this key, add nothing.")
    ] = None,
    on_conflict: Annotated[
        OnConflict, Option(help="What happens to the message that has the unique key.")
    ] = "keep",
) -> None:
    """Send a message, and print its id when it is durable."""
    from postroom.application.messages import NewMessage

    ttl_ms = parse_duration(ttl)
    if ttl_ms % 1_000:
        raise WrongUsage(f"--ttl {ttl} is not a whole number of seconds; round it.")
    message = NewMessage(
        topic=topic,
        payload=read_payload(payload, file),
        idem_key=idem_key,
        sticky_key=key,
        attrs=parse_pairs(attr or (), "--attr"),
        message_id=id_,
        deliver_after_ms=parse_duration(delay),
        ttl_seconds=ttl_ms // 1_000,
        priority=priority,
        content_type=content_type,
        principal=principal,
        correlation_id=correlation_id,
        causality_parent=causality_parent,
        trace_id=trace_id,
        span_id=span_id,
        schema_url=schema_url,
        schema_version=schema_version,
        unique_key=unique_key,
        on_conflict=on_conflict,
    )
    async with use_mailbox(session, create=True) as postroom:
        result = await postroom.send_message(message)
    if session.out.as_json:
        session.out.json({"message_id": result.message_id, "duplicate": result.duplicate})
    else:
        session.out.line(result.message_id)
        if result.duplicate:
            session.out.note("Duplicate of the message with this id; nothing was added.")


def peek(
    session: Session,
    topic: Annotated[str, Argument(help="Topic.")],
    limit: Annotated[int, Option("--max", help="Maximum number of messages.")] = 10,
) -> int | None:
    """Show the next ready messages without receiving them.

    Nothing is hidden, counted as an attempt or written to the log, and it works while another process owns
    the mailbox. With --json it prints one JSON object a line.
    """
    messages = read_store(session, lambda mailbox: mailbox.peek_messages(topic, limit=limit))
    reason = None if messages else session.why_empty(topic)
    for number, message in enumerate(messages):
        _show_peeked_message(session, message, first=not number)
    if not messages:
        session.out.note(reason or f"Topic {topic} has no ready messages.")
        return NOTHING
    return None


async def recv(
    session: Session,
    topic: Annotated[str, Argument(help="Topic.")],
    max_messages: Annotated[int, Option("--max", help="Maximum number of messages.")] = DEFAULT_MAX_MESSAGES,
    max_bytes: Annotated[
        int, Option(help="Maximum total of payload bytes; the first message is always delivered.")
    ] = DEFAULT_MAX_BYTES,
    visibility: Annotated[
        str | None,
        Option(
            metavar="DURATION",
            help="Time to hide them; default: the topic's policy, 30s unless changed.",
        ),
    ] = None,
    wait: Annotated[
        str, Option(metavar="DURATION", help="Wait up to this long, at most 60s, for a message.")
    ] = "0",
    ack: Annotated[bool, Option("--ack", help="Acknowledge them as soon as they are printed.")] = False,
    consumer: Annotated[str | None, Option(help="Name of the consumer, for the message's history.")] = None,
) -> int | None:
    """Receive messages, oldest first, each with a receipt to acknowledge it.

    A message stays hidden until it is acked or nacked, or its visibility ends and it is delivered again.
    With --json it prints one JSON object a line. postroom peek shows messages without receiving them.
    """
    from postroom.application.mailbox.receive import make_receive

    wait_ms, visibility_ms = parse_duration(wait), None if visibility is None else parse_duration(visibility)
    make_receive([topic], max_messages, max_bytes, visibility_ms, consumer)  # validates the arguments
    # Owning a mailbox appends a record to its log; an empty topic is only read.
    if not wait_ms and not session.is_remote and (reason := session.why_empty(topic)) is not None:
        session.out.note(reason)
        return NOTHING
    async with use_mailbox(session) as postroom:
        messages = await postroom.receive_messages(
            topic,
            max_messages=max_messages,
            max_bytes=max_bytes,
            visibility_ms=visibility_ms,
            wait_ms=wait_ms,
            consumer=consumer,
        )
        for number, message in enumerate(messages):
            _show_received_message(session, message, with_receipt=not ack, first=not number)
        session.out.flush()
        if ack:
            refusals = await postroom.ack_messages([message.receipt for message in messages])
            for refusal in refusals:
                if refusal is not None:
                    raise refusal
        note = await _describe_receive(session, postroom, topic, bool(messages), visibility)
    if not messages:
        session.out.note(note)
        return NOTHING
    if not ack:
        session.out.note(note)
    return None


async def _describe_receive(
    session: Session, postroom: "Mailbox", topic: str, has_messages: bool, visibility: str | None
) -> str:
    """Return the reason for an empty receive, or how long the messages are hidden and what to do next."""
    from postroom.application.queries.message_lists import explain_empty

    try:
        policy = await postroom.get_topic_policy(topic)
        if not has_messages:
            subscriptions = await postroom.list_subscriptions()
            return explain_empty(topic, await postroom.list_topics(), postroom.name, policy, subscriptions)
        hidden_for = visibility or format_duration(policy.visibility_ms)
    except Forbidden:  # a token may allow receiving only
        return "Acknowledge with: postroom ack RECEIPT" if has_messages else f"{topic} has no ready messages."
    return f"Hidden for {hidden_for}; acknowledge with: postroom ack RECEIPT"


Change = Callable[["Mailbox", Sequence[str]], Awaitable[list["MessageChange"]]]


Ids = Annotated[list[str], Argument(metavar="ID...", help="Message ids; - reads them from stdin.")]


async def cancel(
    session: Session,
    ids: Ids,
    reason: Annotated[str | None, Option(help="Why, for the messages' history.")] = None,
) -> int:
    """Remove messages that are ready, delayed or in flight, for good; their receipts are stale then.

    Dead letters are left alone: postroom dlq purge removes them. To remove the messages of a query, see
    postroom redrive start --action cancel.
    """
    return await _change(
        session, ids, "cancelled", lambda postroom, some: postroom.cancel_messages(some, reason=reason)
    )


async def reschedule(
    session: Session,
    ids: Ids,
    delay: Annotated[
        str | None,
        Option(metavar="DURATION", help="Deliver them not before this time has passed; 0 is now."),
    ] = None,
    at: Annotated[
        str | None,
        Option(metavar="TIME", help="Deliver them not before this time, such as 2026-12-01T08:00Z."),
    ] = None,
) -> int:
    """Deliver waiting messages after a delay from now, or at a time; a time in the past is now.

    For the messages of a query, see postroom redrive start --action reschedule.
    """
    if (delay is None) == (at is None):
        raise WrongUsage("Pass either --delay or --at; --delay 0 delivers the messages now.")
    deliver_after_ms = None if delay is None else parse_duration(delay)
    time = None if at is None else parse_due("--at", at)
    return await _change(
        session,
        ids,
        "rescheduled",
        lambda postroom, some: postroom.reschedule_messages(some, deliver_after_ms=deliver_after_ms, at=time),
    )


async def _change(session: Session, ids: list[str], done: str, change: Change) -> int:
    """Change messages; return the exit code for an unknown message unless all were changed."""
    from postroom.application.query_results import LEFT_ALONE

    async with use_mailbox(session) as postroom:
        changes = await change(postroom, read_words(ids, sys.stdin.buffer))
    rest = [each for each in changes if each.outcome != "changed"]
    if session.out.as_json:
        session.out.json(changes)
    else:
        session.out.line(f"{pluralize(len(changes) - len(rest), 'message')} {done}")
        for each in rest:
            session.out.error({"message": f"Message {each.message_id} {LEFT_ALONE[each.outcome]}."})
    return NOTHING if rest else 0


def _show_received_message(
    session: Session, message: "ReceivedMessage", *, with_receipt: bool, first: bool
) -> None:
    text, is_text = readable(message.payload)
    if session.out.as_json:
        facts: dict[str, Any] = message.to_json()
        session.out.json(facts | ({"payload": text} if is_text else {}))
        return
    if not first:
        session.out.line()
    receipt = message.to_json()["receipt"] if with_receipt else None
    session.out.facts(
        [
            ("message", Id(message.message_id)),
            ("sent to", None if message.published_topic == message.topic else message.published_topic),
            ("attempt", message.attempt),
            ("receipt", None if receipt is None else Id(receipt)),
        ]
    )
    session.out.payload(text, is_text)


def _show_peeked_message(session: Session, message: "PeekedMessage", *, first: bool) -> None:
    text, is_text = (None, True) if message.payload is None else readable(message.payload)
    if session.out.as_json:
        facts = {name: getattr(message, name) for name in message.__struct_fields__ if name != "payload"}
        session.out.json(facts | ({"payload": text} if is_text else {"payload_b64": text}))
        return
    if not first:
        session.out.line()
    session.out.facts(
        [
            ("message", Id(message.message_id)),
            ("sent", f"{Time(message.sent_at).age} ago, {pluralize(message.attempts, 'attempt')}"),
        ]
    )
    if text is None:
        session.out.line("(not intact: the stored bytes do not match their hash)")
    else:
        session.out.payload(text, is_text)
