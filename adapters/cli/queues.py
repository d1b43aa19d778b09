"""`postroom backlog`, `show`, `verify`: what a store holds, straight from its logs."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.moments import Archive, At, parse_moment
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage, format_duration, readable
from postroom.domain.errors import NotFound

if TYPE_CHECKING:
    from postroom.adapters.compose import Reader
    from postroom.application.queries.explain_message import Account
    from postroom.application.queries.get_message import MessageDetail
    from postroom.application.queries.lineage import Lineage

T = TypeVar("T")


def backlog(
    session: Session,
    topic: Annotated[str | None, Argument(help="Only this topic.")] = None,
    at: At = None,
    archive: Archive = None,
) -> None:
    """Count what is ready, delayed, in flight and dead, by topic and shard, now or at any moment before.

    A position of the log is exact to the event; a time is the log's own and means after all that happened up
    to it. Both are folded from the log, and from its archive.
    """
    moment = None if at is None else parse_moment(at, datetime.now(UTC))
    names = session.mailboxes()
    if isinstance(moment, int) and len(names) != 1:
        raise WrongUsage("--at POSITION is about one mailbox's log; name the mailbox with --mailbox.")
    found = []
    for name in names:
        with session.read(name, archive) as reader:
            found.append(reader.get_backlog(topic, at=moment))
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
                _age(row.oldest_at, each.as_of),
            )
            for each in found
            for row in each.shards
        ],
    )
    for each in found:
        archived = f", {each.archived:,} archived" if each.archived else ""
        session.out.line(
            f"{each.mailbox}: {each.ready:,} ready{archived}, as of log position {each.position:,}"
            + (f", {each.as_of}" if at is not None else "")
        )


def show(
    session: Session,
    message_id: Annotated[str, Argument(help="Id of the message.")],
    payload: Annotated[
        bool, Option("--payload", help="Print nothing but the payload, byte for byte.")
    ] = False,
    why: Annotated[
        bool, Option("--why", help="Tell in plain words what happened to it, and why it is where it is.")
    ] = False,
    archive: Archive = None,
) -> None:
    """Show one message: headers, payload, and all that happened to it."""
    if why and payload:
        raise WrongUsage("--payload prints nothing but the payload; leave it or --why out.")
    if why:
        account = _find(session, message_id, lambda reader: reader.explain_message(message_id), archive)
        _show_account(session, account)
        return
    show_detail(session, find_message(session, message_id, archive), only_payload=payload)


def verify(
    session: Session,
    expect: Annotated[
        str | None,
        Option(
            metavar="POSITION:CHAIN",
            help="What an earlier run printed; finds a log cut off or rewritten since.",
        ),
    ] = None,
    archive: Archive = None,
) -> None:
    """Recompute every hash of every log, and say up to where each is whole."""
    names = session.mailboxes()
    expected_last, expected_chain = _expected(expect)
    if expect is not None and len(names) != 1:
        raise WrongUsage("--expect is about one mailbox; name it with --mailbox.")
    verified = []
    for name in names:
        with session.read(name, archive) as reader, session.out.progress(f"Verifying {name}") as move:
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


def find_message(session: Session, message_id: str, archive: str | None = None) -> "MessageDetail":
    """Return a message of whichever mailbox has it.

    Raises: NotFound when none of them has.
    """
    return _find(session, message_id, lambda reader: reader.get_message(message_id), archive)


def _find(session: Session, message_id: str, ask: Callable[["Reader"], T], archive: str | None) -> T:
    names = session.mailboxes()
    for name in names:
        with session.read(name, archive) as reader:
            try:
                return ask(reader)
            except NotFound:
                continue
    where = ", ".join(names) or "no mailbox at all"
    raise NotFound(
        f"The store {session.shown_store} has no message {message_id} (looked at {where}); check the id."
    )


def show_detail(
    session: Session,
    detail: "MessageDetail",
    *,
    only_payload: bool = False,
    lineage: "Lineage | None" = None,
) -> None:
    """Write one message with its history, and with its lineage where that is given."""
    from postroom.domain.envelope.build import open_envelope

    body = open_envelope(detail.item.envelope_blob).payload
    text, is_text = readable(body)
    if only_payload:
        session.out.bytes(body)
        return
    if session.out.as_json:
        told = {} if lineage is None else msgspec.to_builtins(lineage)
        session.out.json(_as_json(detail) | told | ({"payload": text} if is_text else {"payload_b64": text}))
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
            *(() if lineage is None else _lineage_facts(lineage)),
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


def _lineage_facts(lineage: "Lineage") -> Iterator[tuple[str, str]]:
    yield "original subject", lineage.original_subject
    for number, death in enumerate(lineage.deaths, 1):
        back = "" if death.redriven_at is None else f", put back {death.redriven_at}"
        error = "" if death.last_error is None else f": {death.last_error}"
        yield f"death {number}", f"{death.at} {death.reason} at attempt {death.attempt}{error}{back}"


def _show_account(session: Session, account: "Account") -> None:
    if session.out.as_json:
        session.out.json(account)
        return
    out = session.out
    out.line(f"{account.message_id} on {account.topic}, shard {account.shard}, mailbox {account.mailbox}")
    out.line(account.now)
    out.table(
        ("position", "at", "what happened"),
        [(each.position, each.at, each.text) for each in account.story],
    )
    if len(account.deliveries) > 1:
        out.line(f"Why it was delivered {len(account.deliveries)} times:")
        for each in account.deliveries:
            out.line(f"  {each.number}. at position {each.position}, {each.at}: {each.why}")


def _as_json(detail: "MessageDetail") -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(detail)
    headers = facts.pop("item")
    del headers["envelope_blob"]  # it may carry the publisher's auth token
    return {**facts, "headers": headers}


def _age(since_us: int | None, as_of: str) -> str | None:
    if since_us is None:
        return None
    return format_duration(max(0, datetime.fromisoformat(as_of).timestamp() * 1_000 - since_us / 1_000))


def _expected(text: str | None) -> tuple[int | None, str | None]:
    if text is None:
        return None, None
    position, _, chain = text.partition(":")
    if not position.isdecimal() or not chain:
        raise WrongUsage(f"--expect {text!r} is not what verify prints; write POSITION:CHAIN.")
    return int(position), chain
