"""`postroom backlog`, `show` and `verify`: queries on the logs of a store."""

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.filters import From
from postroom.adapters.cli.output import Id, Prose, Time
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.topic import note_unknown_topic
from postroom.adapters.cli.values import INTEGRITY, Archive, At, Outboxes, WrongUsage, parse_moment, readable
from postroom.adapters.cli.verification import (
    Anchors,
    Expect,
    TimestampCa,
    load_anchors,
    parse_expectation,
    show_anchors,
    show_erasures,
    show_verifications,
    verify_erasures,
)
from postroom.domain.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from postroom.adapters.compose.queries import Reader
    from postroom.application.queries.browse_log import MessageCandidate
    from postroom.application.queries.redrive_lineage import Lineage
    from postroom.application.query_results import Explanation, MessageDetail

T = TypeVar("T")

BACKLOG_COLUMNS = ("mailbox", "topic", "shard", "ready", "delayed", "in flight", "dead", "oldest")
MAX_CANDIDATES = 10


def backlog(
    session: Session,
    topic: Annotated[str | None, Argument(help="Only this topic.")] = None,
    at: At = None,
    archive: Archive = None,
    source: From = None,
    outbox: Outboxes = None,
) -> None:
    """Count ready, delayed, in-flight and dead messages by topic and shard, now or at an earlier time.

    A log position is exact to the event; a time is log time and includes every event up to it. Both are
    computed from the log and its archive. With --from, the read models answer, as of their last update.

    Messages that transactions recorded with MailboxOutbox and that no owner has sent follow: of the store, of
    the databases of [relay] and [messaging], and of --outbox.
    """
    if source is not None:
        if at is not None or archive is not None:
            raise WrongUsage("--from reads the current backlog of read models; omit --at and --archive.")
        _show_stored_backlog(session, topic, source)
        return
    moment = None if at is None else parse_moment(at, datetime.now(UTC))
    names = session.mailboxes()
    if isinstance(moment, int) and len(names) != 1:
        raise WrongUsage("--at POSITION refers to the log of one mailbox; name it with --mailbox.")
    backlogs, topics = [], []
    for name in names:
        with session.read(name, archive) as reader:
            backlogs.append(reader.get_backlog(topic, at=moment))
            if topic is not None and not backlogs[-1].shards:
                topics += reader.list_topics()
    recorded = [] if at is not None else session.outbox_databases(outbox or ()).count_messages()
    if session.out.as_json:
        waiting = [each for each in recorded if each.mailbox or each.problem]
        session.out.json({"mailboxes": backlogs} | ({} if at is not None else {"outboxes": waiting}))
        return
    session.out.table(
        BACKLOG_COLUMNS,
        [
            (
                each.mailbox,
                row.topic,
                row.shard,
                row.ready,
                row.delayed,
                row.in_flight,
                row.dead,
                None if row.oldest_at is None else Time(row.oldest_at, each.as_of),
            )
            for each in backlogs
            for row in each.shards
        ],
    )
    if not any(each.shards for each in backlogs):
        note_unknown_topic(session, topic, topics)
    session.out.line()
    for each in backlogs:
        archived_text = f", {each.archived:,} archived" if each.archived else ""
        session.out.prose(
            f"{each.mailbox}: {each.ready:,} ready{archived_text}, as of log position {each.position:,}"
            + (f", {each.as_of}" if at is not None else "")
        )
        if each.paused_topics:
            session.out.prose(", ".join(each.paused_topics), "  paused: ")
    for count in recorded:
        parts = [f"outbox {count.database}"]
        if count.mailbox:
            age = "" if count.oldest_at is None else f", the oldest {Time(count.oldest_at).age} old"
            parts.append(f"{count.count_text} for {count.mailbox}{age}")
        if count.problem:
            parts.append(f"{count.problem}. {count.advice}")
        if len(parts) > 1:
            session.out.prose(": ".join(parts))


def _show_stored_backlog(session: Session, topic: str | None, source: str) -> None:
    from postroom.adapters.compose.queries import open_read_models
    from postroom.application.ports.read_models import BacklogFilter, ShardBacklog
    from postroom.domain.arguments import MAX_PAGE

    criteria = BacklogFilter(
        mailbox=session.settings.mailbox, topics=() if topic is None else (topic,), limit=MAX_PAGE
    )
    shards: list[ShardBacklog] = []
    with closing(open_read_models(session.existing_store(), source)) as models:
        while True:
            page = models.backlog(criteria)
            shards += page.items
            if page.next_cursor is None:
                break
            criteria = msgspec.structs.replace(criteria, cursor=page.next_cursor)
    session.out.records(
        {"shards": shards},
        BACKLOG_COLUMNS,
        shards,
        lambda each: (
            *(each.mailbox, each.topic, each.shard),
            *(each.ready, each.delayed, each.in_flight, each.dead),
            None if each.oldest_at is None else Time(each.oldest_at),
        ),
    )


def show(
    session: Session,
    message_id: Annotated[str, Argument(help="Message id, or the beginning of one.")],
    payload: Annotated[bool, Option("--payload", help="Write only the payload, byte for byte.")] = False,
    why: Annotated[
        bool, Option("--why", help="Explain its history and its current state in sentences.")
    ] = False,
    archive: Archive = None,
) -> int | None:
    """Show a message: headers, history and payload."""
    if why and payload:
        raise WrongUsage("--payload and --why exclude each other; omit one.")
    if why:
        explanation = _find(session, message_id, lambda reader, id_: reader.explain_message(id_), archive)
        _show_explanation(session, explanation)
        return None
    detail = find_message(session, message_id, archive)
    show_detail(session, detail, only_payload=payload)
    return None if detail.intact else INTEGRITY


def verify(
    session: Session,
    expect: Expect = None,
    anchor: Anchors = None,
    timestamp_ca: TimestampCa = None,
    archive: Archive = None,
) -> None:
    """Recompute the hashes of all logs, check their events and indexes, and report the range that is intact.

    Without --mailbox, the logs of audited accesses and of capabilities are verified as well. With settings of
    erasure, so are the signed records of erasures.
    """
    names = session.mailboxes()
    # Load the anchors before reading the logs, which must contain everything that was anchored by now.
    anchors = load_anchors(session, anchor, timestamp_ca)
    expected_last, expected_chain = parse_expectation(expect)
    if expect is not None and len(names) != 1:
        raise WrongUsage("--expect refers to one mailbox; name it with --mailbox.")
    from postroom.application.queries.find_subject import CountEncrypted

    verifications, encrypted = [], CountEncrypted()
    for name in names:
        with session.read(name, archive) as reader, session.out.progress(f"Verifying {name}") as advance:
            verifications.append(
                reader.verify_log(
                    expected_last=expected_last,
                    expected_chain=expected_chain,
                    anchors=anchors.anchors,
                    progress=lambda position, advance=advance: advance(position, f"position {position:,}"),  # type: ignore[misc]
                    observe=encrypted.add,
                )
            )
    others = []
    if session.settings.mailbox is None and expect is None:
        from postroom.adapters.compose.access import verify_reserved_logs

        others = verify_reserved_logs(session.existing_store(), anchors.anchors)
    if not any(each.last for each in (*verifications, *others)):
        raise NotFound(
            f"The store {session.shown_store} has no log with a record, so nothing was verified; name "
            "another store, or restore this one from a backup."
        )
    erasures = verify_erasures(session, encrypted)
    if session.out.as_json:
        facts = {"mailboxes": verifications, "logs": others, "timestamps": anchors.times}
        session.out.json(facts | ({} if erasures is None else {"erasures": erasures._asdict()}))
    else:
        show_verifications(session, [*verifications, *others])
        show_anchors(session, anchors, [*verifications, *others])
        show_erasures(session, erasures)


def find_message(session: Session, message_id: str, archive: str | None = None) -> "MessageDetail":
    """Return a message from the first mailbox that has it.

    Arguments:
        message_id: or the beginning of one.

    Raises: NotFound if no mailbox has it, WrongUsage if several ids begin with `message_id`.
    """
    return _find(session, message_id, lambda reader, id_: reader.get_message(id_), archive)


def _find(session: Session, message_id: str, query: Callable[["Reader", str], T], archive: str | None) -> T:
    names = session.mailboxes()
    for name in names:
        with session.read(name, archive) as reader:
            try:
                return query(reader, message_id)
            except NotFound:
                continue
    candidates: list[tuple[str, MessageCandidate]] = []
    for name in names:
        with session.read(name, archive) as reader:
            room = MAX_CANDIDATES + 1 - len(candidates)
            candidates += [(name, each) for each in reader.find_message_ids(message_id, room)]
    if len(candidates) == 1:
        ((name, candidate),) = candidates
        with session.read(name, archive) as reader:
            return query(reader, candidate.message_id)
    if candidates:
        raise _ambiguous(session, message_id, [each for _, each in candidates])
    where = f"mailbox {', '.join(names)}" if names else "no mailbox"
    raise NotFound(
        f"The store {session.shown_store} has no message {message_id} (searched {where}); check the id, or "
        "give at least four digits of a UUID."
    )


def _ambiguous(session: Session, prefix: str, candidates: "list[MessageCandidate]") -> WrongUsage:
    shown = candidates[:MAX_CANDIDATES]
    count = f"more than {MAX_CANDIDATES}" if len(candidates) > len(shown) else f"{len(shown)}"
    ids = f": {', '.join(each.message_id for each in shown)}" if session.out.as_json else ""
    for each in shown:
        session.out.note(f"{each.message_id}  {each.topic}  {Time(each.sent_at).age} ago")
    return WrongUsage(f"{prefix} is the beginning of {count} message ids{ids}; add digits.")


def show_detail(
    session: Session,
    detail: "MessageDetail",
    *,
    only_payload: bool = False,
    lineage: "Lineage | None" = None,
) -> None:
    """Write a message with its history and, for a dead letter, its lineage."""
    from postroom.domain.envelope.build import open_envelope

    if detail.erased and only_payload:
        raise NotFound(f"The payload of message {detail.message_id} was erased with the key of its subject.")
    try:
        payload = b"" if detail.erased else open_envelope(detail.item.envelope_blob).payload
    except InvalidRequest:  # altered on disk; the detail reports it, so show the history
        payload = b""
    text, is_text = readable(payload)
    if only_payload:
        session.out.bytes(payload)
        return
    if session.out.as_json:
        dead_letterings = {} if lineage is None else msgspec.to_builtins(lineage)
        session.out.json(
            _as_json(detail) | dead_letterings | _payload_as_json(None if detail.erased else text, is_text)
        )
        return
    item = detail.item
    answer = detail.result
    session.out.facts(
        [
            ("message", Id(detail.message_id)),
            ("mailbox", detail.mailbox),
            ("topic", f"{detail.topic} (shard {detail.shard})"),
            ("copy of", detail.copy_of and Id(detail.copy_of)),
            ("status", f"{detail.status}, attempt {detail.attempt}"),
            ("reason", detail.reason),
            ("last error", detail.last_error),
            ("result", None if answer is None else answer.content_type or f"{len(answer.payload):,} bytes"),
            ("erased", "yes: the key of its subject was destroyed" if detail.erased else None),
            ("intact", "yes" if detail.intact else "NO: it was altered on disk"),
            ("principal", item.principal),
            ("content type", item.content_type),
            ("correlation", item.correlation_id and Id(item.correlation_id)),
            ("trace", item.trace_id and Id(item.trace_id)),
            *((f"  {name}", value) for name, value in item.custom_headers.items()),
            *(() if lineage is None else _lineage_facts(lineage)),
        ]
    )
    _show_history(session, detail)
    if not detail.erased:
        session.out.line()
        session.out.payload(text, is_text)
    if answer is not None:
        session.out.line()
        session.out.line("result:")
        session.out.payload(*readable(answer.payload))
    if detail.traceback is not None:
        session.out.line()
        session.out.payload(detail.traceback, is_text=True)


def _show_history(session: Session, detail: "MessageDetail") -> None:
    session.out.line()
    session.out.table(
        ("position", "age", "event", "facts"),
        [
            (
                entry.position,
                Time(entry.at),
                entry.event,
                Prose(", ".join(f"{name}={value}" for name, value in entry.facts.items())),
            )
            for entry in detail.history
        ],
    )


def _lineage_facts(lineage: "Lineage") -> Iterator[tuple[str, str]]:
    yield "original subject", lineage.original_subject
    for each in lineage.dead_letterings:
        redrive_text = "" if each.redriven_at is None else f", redriven {each.redriven_at}"
        error = "" if each.last_error is None else f": {each.last_error}"
        yield "dead-lettered", f"{each.at} {each.reason} at attempt {each.attempt}{error}{redrive_text}"


def _show_explanation(session: Session, explanation: "Explanation") -> None:
    if session.out.as_json:
        session.out.json(explanation)
        return
    out = session.out
    out.facts(
        [
            ("message", Id(explanation.message_id)),
            ("mailbox", explanation.mailbox),
            ("topic", f"{explanation.topic} (shard {explanation.shard})"),
        ]
    )
    out.prose(explanation.now)
    out.line()
    out.table(
        ("position", "age", "event"),
        [(each.position, Time(each.at), Prose(each.text)) for each in explanation.story],
    )
    if len(explanation.deliveries) > 1:
        out.line()
        out.line(f"Why it was delivered {len(explanation.deliveries)} times:")
        for each in explanation.deliveries:
            out.prose(f"at position {each.position}, {each.at}: {each.why}", f"  {each.number}. ")


def _payload_as_json(text: str | None, is_text: bool) -> dict[str, str | None]:
    return {"payload": text} if is_text else {"payload_b64": text}


def _as_json(detail: "MessageDetail") -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(detail)
    headers = facts.pop("item")
    del headers["envelope_blob"]  # it may carry the publisher's auth token
    if detail.result is not None:
        shown = _payload_as_json(*readable(detail.result.payload))
        facts["result"] = {**shown, "content_type": detail.result.content_type}
    return {**facts, "headers": headers}
