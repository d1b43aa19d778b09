"""`postroom archive`: what retention stored of the logs before it removed it."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from postroom.adapters.cli.failures import NOTHING
from postroom.adapters.cli.moments import Archive
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage
from postroom.domain.errors import NotFound

if TYPE_CHECKING:
    from postroom.application.ports.log_archive import LogArchive
    from postroom.application.queries.verify_archive import ArchiveVerification


def list_segments(session: Session, archive: Archive = None) -> int | None:
    """List the segments of every mailbox: which positions each holds, and how large it is.

    Segments may overlap: what is in several is read once.
    """
    opened, names = _open(session, archive)
    segments = [
        {
            "mailbox": name,
            "first": segment.first,
            "last": segment.last,
            "records": segment.last - segment.first + 1,
            "bytes": opened.size(segment),
        }
        for name in names
        for segment in opened.segments(name)
    ]
    if session.out.as_json:
        session.out.json({"segments": segments})
    else:
        columns = ("mailbox", "first", "last", "records", "bytes")
        session.out.table(columns, [tuple(segment[name] for name in columns) for segment in segments])
    return None if segments else NOTHING


def verify(session: Session, archive: Archive = None) -> int | None:
    """Recompute every hash of what is archived, and say whether the logs of the store go on where it ends."""
    from postroom.adapters.compose import MEMORY, list_mailboxes, read_mailbox
    from postroom.application.queries.verify_archive import VerifyArchive

    opened, names = _open(session, archive)
    present = [] if session.store == MEMORY else list_mailboxes(session.store)
    found: list[ArchiveVerification] = []
    for name in names:
        log = read_mailbox(session.store, name) if name in present else nullcontext()
        with log as reader, session.out.progress(f"Verifying {name}") as move:
            verified = VerifyArchive(opened)(
                name,
                None if reader is None else reader.log,
                lambda position, move=move: move(position, f"position {position:,}"),  # type: ignore[misc]
            )
            found += [] if verified is None else [verified]
    if session.out.as_json:
        session.out.json({"mailboxes": found})
    else:
        for each in found:
            _tell(session, each)
    return None if found else NOTHING


def _tell(session: Session, each: "ArchiveVerification") -> None:
    out = session.out
    extent = f"records {each.first:,} to {each.last:,}"
    out.line(f"{each.mailbox}: intact, {extent}, {each.records:,} in {each.segments:,} segments")
    for gap in each.gaps:
        out.line(f"  positions {gap.first:,} to {gap.last:,} were removed without being archived")
    if each.log_first is None:
        out.line(f"  the store {session.shown_store} has no log that goes on from there")
    else:
        out.line(f"  its log goes on in {session.shown_store}, which holds it from {each.log_first:,} on")


def _open(session: Session, given: str | None) -> tuple["LogArchive", list[str]]:
    """Return the archive, and which mailboxes to look at: the one that was named, else all of it.

    Raises: WrongUsage when no archive is named, NotFound when it isn't there or lacks the mailbox.
    """
    from postroom.adapters.compose import open_archive

    folder = session.archive(given)
    if folder is None:
        raise WrongUsage("No archive is named; give --archive FOLDER, or [archive] folder in postroom.toml.")
    if not Path(folder).is_dir():
        raise NotFound(f"There is no archive at {folder} yet: retention has stored nothing there.")
    archive = open_archive(folder)
    names = archive.mailboxes()
    asked = session.settings.mailbox
    if asked is None:
        return archive, names
    if asked not in names:
        raise NotFound(f"The archive {folder} has nothing of mailbox {asked}; it has {', '.join(names)}.")
    return archive, [asked]
