"""`postroom backlog`, `show`, `verify`: what a store holds, straight from its logs."""

import time
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage, format_duration, readable
from postroom.domain.errors import NotFound

if TYPE_CHECKING:
    from postroom.application.queries.get_message import MessageDetail


def backlog(session: Session, topic: Annotated[str | None, Argument(help="Only this topic.")] = None) -> None:
    """Count what is ready, delayed, in flight and dead, by topic and shard, as of now."""
    found = []
    for name in session.mailboxes():
        with session.read(name) as reader:
            found.append(reader.get_backlog(topic))
    if session.out.as_json:
        session.out.json({"mailboxes": found})
        return
    columns = ("mailbox", "topic", "shard", "ready", "delayed", "in flight", "dead", "oldest")
    session.out.table(
        columns,
        [
            (
                each.mailbox,
                row.topic,
                row.shard,
                row.ready,
                row.delayed,
                row.in_flight,
                row.dead,
                _age(row.oldest_at),
            )
            for each in found
            for row in each.shards
        ],
    )
    for each in found:
        archived = f", {each.archived:,} archived" if each.archived else ""
        session.out.line(
            f"{each.mailbox}: {each.ready:,} ready{archived}, as of log position {each.position:,}"
        )


def show(
    session: Session,
    message_id: Annotated[str, Argument(help="Id of the message.")],
    payload: Annotated[
        bool, Option("--payload", help="Print nothing but the payload, byte for byte.")
    ] = False,
) -> None:
    """Show one message: headers, payload, and all that happened to it."""
    show_detail(session, find_message(session, message_id), only_payload=payload)


def verify(
    session: Session,
    expect: Annotated[
        str | None,
        Option(
            metavar="POSITION:CHAIN",
            help="What an earlier run printed; finds a log cut off or rewritten since.",
        ),
    ] = None,
) -> None:
    """Recompute every hash of every log, and say up to where each is whole."""
    names = session.mailboxes()
    expected_last, expected_chain = _expected(expect)
    if expect is not None and len(names) != 1:
        raise WrongUsage("--expect is about one mailbox; name it with --mailbox.")
    verified = []
    for name in names:
        with session.read(name) as reader, session.out.progress(f"Verifying {name}") as move:
            verified.append(
                reader.verify_log(
                    expected_last=expected_last,
                    expected_chain=expected_chain,
                    progress=lambda position, move=move: move(position, f"position {position:,}"),  # type: ignore[misc]
                )
            )
    if session.out.as_json:
        session.out.json({"mailboxes": verified})
        return
    for each in verified:
        session.out.line(
            f"{each.mailbox}: intact, records {each.first:,} to {each.last:,}, {each.messages:,} messages; "
            f"keep {each.last}:{each.chain} to prove it later"
        )


def find_message(session: Session, message_id: str) -> "MessageDetail":
    """Return a message of whichever mailbox has it.

    Raises: NotFound when none of them has.
    """
    names = session.mailboxes()
    for name in names:
        with session.read(name) as reader:
            try:
                return reader.get_message(message_id)
            except NotFound:
                continue
    where = ", ".join(names) or "no mailbox at all"
    raise NotFound(
        f"The store {session.store} has no message {message_id} (looked at {where}); check the id."
    )


def show_detail(session: Session, detail: "MessageDetail", *, only_payload: bool = False) -> None:
    """Write one message with its history."""
    from postroom.domain.envelope.build import open_envelope

    body = open_envelope(detail.item.envelope_blob).payload
    text, is_text = readable(body)
    if only_payload:
        session.out.bytes(body)
        return
    if session.out.as_json:
        session.out.json(_as_json(detail) | ({"payload": text} if is_text else {"payload_b64": text}))
        return
    item = detail.item
    session.out.facts(
        [
            ("message", detail.message_id),
            ("mailbox", detail.mailbox),
            ("topic", f"{detail.topic} (shard {detail.shard})"),
            ("status", f"{detail.status}, attempt {detail.attempt}"),
            ("reason", detail.reason),
            ("last error", detail.last_error),
            ("intact", "yes" if detail.intact else "NO: the payload does not match its hash"),
            ("principal", item.principal),
            ("content type", item.content_type),
            ("correlation", item.correlation_id),
            ("trace", item.trace_id),
            *((f"  {name}", value) for name, value in item.custom_headers.items()),
        ]
    )
    session.out.table(
        ("position", "at", "event", "facts"),
        [
            (entry.position, entry.at, entry.event, ", ".join(f"{k}={v}" for k, v in entry.facts.items()))
            for entry in detail.history
        ],
    )
    session.out.line(text if is_text else f"base64:{text}")


def _as_json(detail: "MessageDetail") -> dict[str, Any]:
    import msgspec

    facts: dict[str, Any] = msgspec.to_builtins(detail)
    headers = facts.pop("item")
    del headers["envelope_blob"]  # it may carry the publisher's auth token
    return {**facts, "headers": headers}


def _age(since_us: int | None) -> str | None:
    return None if since_us is None else format_duration(max(0, time.time() * 1_000 - since_us / 1_000))


def _expected(text: str | None) -> tuple[int | None, str | None]:
    if text is None:
        return None, None
    position, _, chain = text.partition(":")
    if not position.isdecimal() or not chain:
        raise WrongUsage(f"--expect {text!r} is not what verify prints; write POSITION:CHAIN.")
    return int(position), chain
