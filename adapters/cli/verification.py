"""Commands that verify logs: `postroom audit`, `erase` and `erasure`, and their common output."""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from typer import Option

from postroom.adapters.cli.filters import Cursor
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import REFUSED, WrongUsage, Yes, parse_position, parse_time
from postroom.application.text import pluralize
from postroom.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from postroom.adapters.compose.erasures import ErasurePreview, Erasures, ErasureVerification
    from postroom.application.access.audit import AuditEntry
    from postroom.application.anchors import Anchor
    from postroom.application.erasure.erase_subject import ErasureRecord, SubjectMessages
    from postroom.application.queries.find_subject import CountEncrypted
    from postroom.application.queries.verify import Verification


Expect = Annotated[
    str | None,
    Option(
        metavar="POSITION:CHAIN",
        help="Result of an earlier run: detects a log that was truncated or rewritten since.",
    ),
]
Anchors = Annotated[
    str | None,
    Option(
        "--anchor",
        metavar="FILE",
        help="Anchors that postroom anchor wrote: detects a log that was truncated or rewritten since any.",
    ),
]
TimestampCa = Annotated[
    str | None,
    Option(metavar="FILE", help="Root certificates in PEM, to verify the time stamps of the anchors."),
]
_CHAIN = re.compile("[0-9a-f]{64}")


class LoadedAnchors(NamedTuple):
    """Anchors of a file, and the times that their time stamps certify; `times` is None if not verified."""

    file: str | None
    anchors: Sequence["Anchor"]
    times: Sequence["datetime"] | None


def load_anchors(session: Session, file: str | None, timestamp_ca: str | None) -> LoadedAnchors:
    """Return the anchors of `--anchor`, whose time stamps are verified if `--timestamp-ca` is given."""
    if file is None:
        if timestamp_ca is not None:
            raise WrongUsage("--timestamp-ca verifies the time stamps of anchors; name them with --anchor.")
        return LoadedAnchors(None, (), None)
    from postroom.adapters.compose.backup import read_anchors, verify_timestamps

    anchors = read_anchors(Path(file), session.existing_store(), session.settings.mailbox)
    times = None if timestamp_ca is None else verify_timestamps(anchors, Path(timestamp_ca))
    return LoadedAnchors(file, anchors, times)


def show_anchors(session: Session, anchors: LoadedAnchors, verifications: Sequence["Verification"]) -> None:
    """Write for people how many anchors the logs were compared with."""
    if anchors.file is None:
        return
    older = sum(each.older_anchors for each in verifications)
    held = sum(each.anchors for each in verifications)
    text = f"{anchors.file}: {pluralize(held, 'anchor')} compared with the logs"
    if older:
        text += f", {older:,} older than what retention left"
    if anchors.times is not None:
        text += f", {pluralize(len(anchors.times), 'time stamp')} verified"
    session.out.line(text)


def verify_erasures(session: Session, count: "CountEncrypted") -> "ErasureVerification | None":
    """Return the result of verifying the records of erasures, or None without settings of erasure.

    Arguments:
        count: count of the encrypted messages of the mailboxes.
    """
    if session.erasure_settings() is None:
        return None

    return open_erasures(session).verify(count)


def show_erasures(session: Session, erasures: "ErasureVerification | None") -> None:
    """Write for people how many messages are erased, and whether records of the erasures exist."""
    if erasures is None:
        return
    session.out.line(
        f"{pluralize(erasures.encrypted, 'message')} encrypted, {erasures.erased:,} of them erased; "
        f"{pluralize(erasures.records, 'record')} of erasures signed by {erasures.public_key}"
    )
    if erasures.ends:
        session.out.line(
            f"  {erasures.ends_in_logs} of {erasures.ends} log ends of the records are in the logs"
        )


def parse_expectation(text: str | None) -> tuple[int | None, str | None]:
    """Return the position and the chain hash of `--expect`; raise WrongUsage for anything else."""
    if text is None:
        return None, None
    digits, _, chain = text.partition(":")
    position = parse_position(digits)
    if position is None or not _CHAIN.fullmatch(chain):
        raise WrongUsage(f"--expect {text!r} is not POSITION:CHAIN, as postroom verify prints it.")
    return position, chain


def show_verifications(session: Session, verifications: "Iterable[Verification]") -> None:
    """Write for people which records of each log are intact, and how to detect later changes."""
    for each in verifications:
        messages = f", {pluralize(each.messages, 'message')}" if "@" in each.mailbox else ""
        session.out.line(f"{each.mailbox}: intact, records {each.first:,} to {each.last:,}{messages}")
        session.out.line(f"  detect later changes with: --expect {each.last}:{each.chain}")


TARGET_CHARS = 36
"""Width of the column of message ids and topics: the length of a UUID."""


def audit(
    session: Session,
    since: Annotated[
        str | None,
        Option(metavar="TIME", help="At or after: RFC 3339, ms since 1970, or an age such as 2h."),
    ] = None,
    until: Annotated[str | None, Option(metavar="TIME", help="Before, in the same format.")] = None,
    principal: Annotated[str | None, Option(help="Only of this principal.")] = None,
    capability: Annotated[
        str | None, Option(metavar="NONCE", help="Only by tokens of this capability.")
    ] = None,
    operation: Annotated[str | None, Option(help="Only this operation, such as read-payload.")] = None,
    outcome: Annotated[
        str | None,
        Option(help="Only this outcome: allowed, cancelled, or an error code such as E_CAP_SCOPE."),
    ] = None,
    topic: Annotated[
        str | None, Option(help="Only accesses to this topic, or to topics of a glob such as orders.*.")
    ] = None,
    id_: Annotated[str | None, Option("--id", help="Only accesses to this message.")] = None,
    limit: Annotated[int, Option(help="Entries per page, up to 1000.")] = 100,
    cursor: Cursor = None,
) -> None:
    """List searches and payload reads over network surfaces, newest first, with principal and outcome."""
    from postroom.adapters.compose.access import read_audit_log
    from postroom.application.access.audit_log import AuditFilter
    from postroom.application.page import Page

    now = datetime.now(UTC)
    criteria = AuditFilter(
        since=None if since is None else parse_time(since, now) * 1_000,
        until=None if until is None else parse_time(until, now) * 1_000,
        principal=principal,
        capability=capability,
        operation=operation,
        outcome=outcome,
        topic=topic,
        target=id_,
    )
    with read_audit_log(session.existing_store()) as log:
        page = Page(()) if log is None else log.read(criteria, limit=limit, cursor=cursor)
    if session.out.as_json:
        session.out.json({"entries": [*map(_as_json, page.items)], "next_cursor": page.next_cursor})
        return
    _show_table(session, page.items)
    session.out.note_more(page.next_cursor)


def verify(session: Session, expect: Expect = None) -> None:
    """Recompute the hashes of the audit log, and report the range that is intact."""
    from postroom.adapters.compose.access import read_audit_log

    expected_last, expected_chain = parse_expectation(expect)
    with read_audit_log(session.existing_store()) as log, session.out.progress("Verifying") as advance:
        verification = (
            None
            if log is None
            else log.verify(
                expected_last=expected_last,
                expected_chain=expected_chain,
                progress=lambda position: advance(position, f"position {position:,}"),
            )
        )
    if session.out.as_json:
        session.out.json({"log": verification})
    elif verification is None:
        session.out.line("Nothing was audited yet.")
    else:
        show_verifications(session, [verification])


def _show_table(session: Session, entries: "Sequence[AuditEntry]") -> None:
    from postroom.adapters.cli.output import Id, Time

    session.out.table(
        ("age", "principal", "operation", "of", "matches", "outcome", "mailbox", "criteria", "capability"),
        [
            (
                Time(each.at),
                each.principal,
                Id(each.operation),
                Id(_target(each, full=session.out.wide)),
                each.matches,
                Id(each.outcome),
                each.mailbox,
                ", ".join(each.criteria),
                each.capability,
            )
            for each in entries
        ],
        only_wide=("matches", "mailbox", "criteria", "capability"),
    )


def _target(entry: "AuditEntry", *, full: bool) -> str:
    text = entry.target or ", ".join(entry.topics) or "all topics"
    return text if full or len(text) <= TARGET_CHARS else f"{text[: TARGET_CHARS - 1]}…"


def _as_json(entry: "AuditEntry") -> dict[str, Any]:
    from postroom.adapters.cli.output import Time

    facts: dict[str, Any] = msgspec.to_builtins(entry)
    return facts | {"at": str(Time(entry.at))}


async def erase(
    session: Session,
    subject: Annotated[str | None, Option(metavar="NAME", help="Erase this subject.")] = None,
    pending: Annotated[
        bool,
        Option(
            "--pending", help="Complete erasures that were interrupted, or undone by a restored key store."
        ),
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Only show what would become unreadable.")] = False,
    yes: Yes = False,
) -> int | None:
    """Erase a data subject: destroy its key, remove its undelivered messages, and sign a record of that.

    Every copy of its encrypted messages becomes unreadable: in all stores that use the key store, and in
    their archives, exports and backups. It can't be undone. Run it again to complete an interrupted one.
    """
    if (subject is None) == (not pending):
        raise WrongUsage("Name one subject with --subject, or complete erasures with --pending.")
    erasures = open_erasures(session)
    if subject is None:
        subjects = erasures.list_pending()
        if session.out.as_json and dry_run:
            session.out.json({"pending": subjects})
        elif dry_run:
            session.out.line(f"{pluralize(len(subjects), 'erasure')} to be completed")
        if dry_run:
            return None
    else:
        preview = erasures.preview(subject)
        if dry_run or not session.out.as_json:
            _show_preview(session, preview)
        if dry_run:
            return None
        refusal = WrongUsage("An erasure can't be undone; add --yes to confirm.")
        if not yes and not session.out.confirm("Destroy the key of this subject?", refusal):
            return REFUSED
        subjects = [preview.subject]
    _show_records(session, [await erasures.erase(each) for each in subjects])
    return None


def open_erasures(session: Session) -> "Erasures":
    """Return the erasures in the store of a session.

    Raises: InvalidRequest without settings of erasure; otherwise as `Session.mailboxes`.
    """
    from postroom.adapters.compose.erasures import Erasures

    settings = session.erasure_settings()
    if settings is None:
        raise InvalidRequest(
            "The settings have no section [erasure]; add the one with which messages were encrypted."
        )
    names = [each for each in session.mailboxes() if "@" in each]
    return Erasures(session.store, names, settings, session.owner_settings(), session.archive())


def _show_preview(session: Session, preview: "ErasurePreview") -> None:
    if session.out.as_json:
        session.out.json(preview._asdict() | {"subject": preview.subject._asdict()})
        return
    session.out.line(f"{preview.subject.pseudonym}:")
    _show_messages(session, preview.messages)
    if preview.plaintext:
        session.out.note(
            f"{pluralize(preview.plaintext, 'message')} of the subject were stored before a policy encrypted "
            "them, and stay readable."
        )


def _show_messages(session: Session, messages: "Sequence[SubjectMessages]") -> None:
    session.out.table(
        ("mailbox", "topic", "status", "messages"),
        [(each.mailbox, each.topic, each.status, each.messages) for each in messages],
    )


def _show_records(session: Session, records: "Sequence[ErasureRecord]") -> None:
    if session.out.as_json:
        session.out.json({"erasures": records})
        return
    for each in records:
        count = sum(those.messages for those in each.messages)
        session.out.line(
            f"{each.pseudonym}: erased, {pluralize(count, 'message')} unreadable, {each.removed:,} of them "
            "removed from queues and dead letters"
        )


def init(session: Session) -> None:
    """Create the key store of [erasure], and the file of its master key unless it exists.

    A key store in PostgreSQL needs its tables first: postroom migrate --keys URL.

    Keep both outside the backups of the store, and apart from each other: who has both can read every message
    whose key was not destroyed.
    """
    from postroom.adapters.compose import shown_store
    from postroom.adapters.compose.store import create_key_store

    settings = session.erasure_settings()
    if settings is None:
        raise InvalidRequest(
            "The settings have no section [erasure]; add one with keys, master_key_file and topics."
        )
    master_key, keys = create_key_store(settings), shown_store(settings.keys)
    if session.out.as_json:
        session.out.json(
            {
                "keys": keys,
                "master_key": master_key.key_id,
                "master_key_file": settings.master_key_file,
                "public_key": master_key.public_key.hex(),
            }
        )
        return
    session.out.facts(
        [
            ("key store", keys),
            ("master key", master_key.key_id),
            ("file", settings.master_key_file),
            ("public key", master_key.public_key.hex()),
        ]
    )
