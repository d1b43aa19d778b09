"""`postroom archive`: log segments that retention archived before it removed them."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from postroom.adapters.cli.exit_codes import NOTHING
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.time_arguments import Archive
from postroom.adapters.cli.values import WrongUsage
from postroom.application.pluralize import pluralize
from postroom.domain.errors import NotFound
from postroom.domain.names import describe_choices

if TYPE_CHECKING:
    from postroom.application.ports.log_archive import LogArchive
    from postroom.application.queries.verify_archive import ArchiveVerification


def list_segments(session: Session, archive: Archive = None) -> int | None:
    """List the segments of each mailbox with their log positions and sizes.

    Segments may overlap; readers skip the duplicates.
    """
    log_archive, names = _open(session, archive)
    segments = [
        {
            "mailbox": name,
            "first": segment.first,
            "last": segment.last,
            "records": segment.last - segment.first + 1,
            "bytes": log_archive.size(segment),
        }
        for name in names
        for segment in log_archive.segments(name)
    ]
    if session.out.as_json:
        session.out.json({"segments": segments})
    else:
        columns = ("mailbox", "first", "last", "records", "bytes")
        session.out.table(columns, [tuple(segment[name] for name in columns) for segment in segments])
    return None if segments else NOTHING


def verify(session: Session, archive: Archive = None) -> int | None:
    """Recompute the hashes of all segments, and check that the logs of the store continue them."""
    from postroom.adapters.compose import list_mailboxes
    from postroom.adapters.compose.queries import read_mailbox
    from postroom.adapters.compose.store import MEMORY
    from postroom.application.queries.verify_archive import VerifyArchive

    log_archive, names = _open(session, archive)
    mailboxes = [] if session.store == MEMORY else list_mailboxes(session.store)
    verifications: list[ArchiveVerification] = []
    for name in names:
        log = read_mailbox(session.store, name) if name in mailboxes else nullcontext()
        with log as reader, session.out.progress(f"Verifying {name}") as advance:
            verification = VerifyArchive(log_archive)(
                name,
                None if reader is None else reader.log,
                lambda position, advance=advance: advance(position, f"position {position:,}"),  # type: ignore[misc]
            )
            verifications += [] if verification is None else [verification]
    if session.out.as_json:
        session.out.json({"mailboxes": verifications})
    else:
        for each in verifications:
            _show(session, each)
    return None if verifications else NOTHING


def _show(session: Session, each: "ArchiveVerification") -> None:
    out = session.out
    extent = f"records {each.first:,} to {each.last:,}"
    segments = pluralize(each.segments, "segment")
    out.prose(f"{each.mailbox}: intact, {extent}, {each.records:,} in {segments}")
    for gap in each.gaps:
        out.prose(f"positions {gap.first:,} to {gap.last:,} were removed without being archived", "  ")
    if each.log_first is None:
        out.prose(f"the store {session.shown_store} has no log that continues it", "  ")
    else:
        out.prose(f"the log in {session.shown_store} continues it, from position {each.log_first:,}", "  ")


def _open(session: Session, archive: str | None) -> tuple["LogArchive", list[str]]:
    """Return the archive and the mailboxes to read: the one of `--mailbox`, or all.

    Raises: WrongUsage if no folder is configured, NotFound if the folder or the mailbox does not exist.
    """
    from postroom.adapters.compose import open_archive

    folder = session.archive(archive)
    if folder is None:
        raise WrongUsage(
            "No archive is configured; pass --archive FOLDER, or set folder in [archive] of postroom.toml."
        )
    if not Path(folder).is_dir():
        raise NotFound(f"There is no archive at {folder} yet: retention has archived nothing.")
    log_archive = open_archive(folder)
    names = log_archive.mailboxes()
    mailbox = session.settings.mailbox
    if mailbox is None:
        return log_archive, names
    if mailbox not in names:
        choices = describe_choices(mailbox, names)
        raise NotFound(f"The archive {folder} has no mailbox {mailbox}; {choices}")
    return log_archive, [mailbox]
