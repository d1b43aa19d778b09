"""`postroom erase` and `erasure`: create the keys of data subjects, and destroy them."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import REFUSED, WrongUsage
from postroom.application.text import pluralize
from postroom.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from postroom.adapters.compose.erasures import ErasurePreview, Erasures
    from postroom.application.erasure.erase_subject import ErasureRecord, SubjectMessages


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
    yes: Annotated[bool, Option("--yes", help="Do not ask for confirmation.")] = False,
) -> int | None:
    """Erase a data subject: destroy its key, remove what would be delivered, and record that, signed.

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
        if not yes:
            if session.out.as_json or not sys.stdin.isatty():
                raise WrongUsage("An erasure can't be undone; add --yes to confirm.")
            if not typer.confirm("Destroy the key of this subject?", err=True):
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
