"""`postroom segments`: copies of the log in Parquet, which remain as its archive after retention."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated

from typer import Option

from postroom.adapters.cli.session import ArchiveSettings, Session
from postroom.adapters.cli.values import NOTHING, Archive, WrongUsage
from postroom.application.text import pluralize
from postroom.application.threads import repeating
from postroom.domain.errors import NotFound
from postroom.domain.names import describe_choices

if TYPE_CHECKING:
    from postroom.application.ports.event_log import LogArchive
    from postroom.application.queries.verify_archive import ArchiveVerification


AHEAD_SECONDS = 30.0
"""How often the follower looks for records that fill a segment."""


def build(
    session: Session,
    archive: Archive = None,
    all_: Annotated[
        bool, Option("--all", help="Also close the last segment, which is smaller than the others.")
    ] = False,
) -> None:
    """Copy the closed part of each log, 50,000 records or 64 MiB at a time, to segments in Parquet.

    Rebuilds, reports and Spark read segments instead of the log, and retention removes the records of
    segments from the log without writing them again. Nothing is written twice: run it as often as you like.
    """
    from postroom.adapters.compose.archive import build_segments, open_archive

    log_archive = open_archive(_folder(session, archive))
    built = []
    for name in session.mailboxes():
        with session.out.progress(f"Building {name}") as advance:
            built.append(
                build_segments(
                    session.store,
                    name,
                    log_archive,
                    is_whole=all_,
                    progress=_report_position(advance),
                )
            )
    if session.out.as_json:
        session.out.json({"mailboxes": built})
        return
    for each in built:
        through = f", through position {each.last:,}" if each.last else ""
        rest = pluralize(each.remaining, "record")
        added = pluralize(each.added, "segment")
        hint = "" if each.last else ", which do not fill a segment; --all copies them"
        session.out.prose(f"{each.mailbox}: {added} added{through}; {rest} only in the log{hint}")


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
    """Verify all files, hashes and columns of the segments, and that the logs of the store continue them."""
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
                _report_position(advance),
            )
            verifications += [] if verification is None else [verification]
    if session.out.as_json:
        session.out.json({"mailboxes": verifications})
    else:
        for each in verifications:
            _show_verification(session, each)
    return None if verifications else NOTHING


def compact(session: Session, archive: Archive = None) -> int | None:
    """Merge small neighbouring segments, and rewrite segments that have a former format.

    A segment then has at most 500,000 records and 128 MiB. Readers may be at work: merged files remain for an
    hour, until a later `segments build` or `compact`.
    """
    from postroom.adapters.compose import list_mailboxes
    from postroom.adapters.compose.queries import read_mailbox
    from postroom.adapters.compose.store import MEMORY
    from postroom.application.mailbox.archived_log import check_history

    log_archive, names = _open(session, archive)
    mailboxes = [] if session.store == MEMORY else list_mailboxes(session.store)
    compacted = []
    for name in names:
        if name in mailboxes:
            # A segment that the log does not continue is not merged, so that it can be removed.
            with read_mailbox(session.store, name) as reader:
                check_history(reader.log, log_archive)
        with session.out.progress(f"Compacting {name}") as advance:
            count = log_archive.compact(
                name,
                _report_position(advance),
            )
        compacted.append({"mailbox": name, "merged": count, "segments": len(log_archive.segments(name))})
    if session.out.as_json:
        session.out.json({"mailboxes": compacted})
    else:
        session.out.table(("mailbox", "merged", "segments"), [tuple(each.values()) for each in compacted])
    return None if compacted else NOTHING


@contextmanager
def building_ahead(session: Session, store: str) -> Iterator[None]:
    """Build segments as the logs of a store grow while the context lasts, if the settings say so."""
    settings = session.settings.section("archive", ArchiveSettings)
    folder = settings.folder
    if folder is None or not settings.ahead:
        yield
        return
    from postroom.adapters.compose import list_mailboxes
    from postroom.adapters.compose.archive import build_segments, open_archive

    def build_all() -> None:
        for name in list_mailboxes(store):
            build_segments(store, name, open_archive(folder))

    with repeating("postroom segments", build_all, AHEAD_SECONDS, "archive.not_built", archive=folder):
        yield


def _show_verification(session: Session, each: "ArchiveVerification") -> None:
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


def _report_position(advance: Callable[[float, str], None]) -> Callable[[int], None]:
    """Return a function that reports the progress at a position."""
    return lambda position: advance(position, f"position {position:,}")


def _open(session: Session, archive: str | None) -> tuple["LogArchive", list[str]]:
    """Return the archive and the mailboxes to read: the one of `--mailbox`, or all.

    Raises: WrongUsage if no folder is configured, NotFound if the folder or the mailbox does not exist.
    """
    from postroom.adapters.compose.archive import has_archive, open_archive

    folder = _folder(session, archive)
    if not has_archive(folder):
        raise NotFound(
            f"There is no archive at {folder} yet. `postroom segments build` creates it when the log fills a "
            "segment, or with --all."
        )
    log_archive = open_archive(folder)
    names = log_archive.mailboxes()
    mailbox = session.settings.mailbox
    if mailbox is None:
        return log_archive, names
    if mailbox not in names:
        choices = describe_choices(mailbox, names)
        raise NotFound(f"The archive {folder} has no mailbox {mailbox}; {choices}")
    return log_archive, [mailbox]


def _folder(session: Session, archive: str | None) -> str:
    folder = session.archive() if archive is None else archive
    if not folder:
        raise WrongUsage(
            "No archive is configured; pass --archive FOLDER, or set folder in [archive] of postroom.toml."
        )
    return folder
