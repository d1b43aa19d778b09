"""`postroom backup` and `restore`: back up a store, verify a backup, and restore it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from postroom.adapters.cli.session import Session
from postroom.application.pluralize import pluralize

if TYPE_CHECKING:
    from postroom.application.backup.manifest import Manifest


def create(
    session: Session,
    folder: Annotated[str, Argument(metavar="FOLDER", help="New folder for the backup.")],
    archive: Annotated[
        str | None,
        Option(metavar="FOLDER", help="Folder of the log archive, to name its segments. [archive.folder]"),
    ] = None,
) -> None:
    """Back up a store to a new folder, while others send and receive.

    The folder appears when the backup is complete. It contains all mailboxes as of one moment, and names the
    end of each log, by which it can be verified. Read models and keys are not part of it, and the segments of
    the log archive are only named.
    """
    from postroom.adapters.compose.backup import back_up

    with session.out.progress("Backing up", 1) as advance:
        manifest = back_up(
            session.existing_store(), Path(folder), archive=session.archive(archive), progress=advance
        )
    _show(session, manifest, folder, f"{folder}: complete")


def verify(
    session: Session,
    folder: Annotated[str, Argument(metavar="FOLDER", help="Folder of the backup.")],
    archive: Annotated[
        str | None,
        Option(metavar="FOLDER", help="Copy of the log archive, to be verified with the backup."),
    ] = None,
) -> None:
    """Verify the files of a backup, and every hash of its logs; needs no store."""
    from postroom.adapters.compose.backup import verify_backup

    with session.out.progress("Verifying", 1) as advance:
        manifest, _ = verify_backup(Path(folder), archive=archive, progress=advance)
    _show(session, manifest, folder, f"{folder}: intact")


def import_store(
    session: Session,
    old: Annotated[str, Argument(metavar="OLD", help="SQLite file or postgresql:// URL of the old store.")],
    new: Annotated[str, Argument(metavar="NEW", help="New SQLite file, or URL of a migrated database.")],
) -> None:
    """Bring over a store of the format before 23 November 2026 into a new one.

    The old store is verified and not changed; no process may write it meanwhile. The new one is verified,
    too. It has no read models yet.
    """
    from postroom.adapters.compose.import_store import import_store as import_

    with session.out.progress("Importing", None) as advance:
        names = import_(old, new, progress=lambda count: advance(0, f"{count:,} events"))
    if session.out.as_json:
        session.out.json({"store": new, "logs": names})
    else:
        session.out.line(f"{new}: {pluralize(len(names), 'log')} imported and verified")


async def restore(
    session: Session,
    folder: Annotated[str, Argument(metavar="FOLDER", help="Folder of the backup.")],
    into: Annotated[str, Option(metavar="STORE", help="SQLite file or postgresql:// URL to restore into.")],
    replace: Annotated[bool, Option("--replace", help="Replace what the store contains.")] = False,
    discard_newer: Annotated[
        int,
        Option(metavar="N", min=0, help="Give up N records of the store that the backup lacks."),
    ] = 0,
) -> None:
    """Restore a backup into an empty store, after verifying it.

    With --replace, what the store contains is replaced; no process may use it. If it has records that the
    backup lacks, such as acknowledged sends, the error names their number for --discard-newer. Owners and
    receipts from after the backup are refused. Rebuild the read models afterwards.
    """
    from postroom.adapters.compose.restore import restore as run

    with session.out.progress("Verifying", 1) as advance:
        restoration = await run(
            Path(folder), into, replace=replace, discard_newer=discard_newer, progress=advance
        )
    if session.out.as_json:
        session.out.json(restoration)
        return
    _show(session, restoration.manifest, folder, f"{restoration.store}: restored from {folder}")
    for loss in restoration.losses:
        records, messages = pluralize(loss.records, "record"), pluralize(loss.messages, "message")
        session.out.line(f"discarded from {loss.mailbox}: {records}, {messages}")
    session.out.line("The store has no read models yet; make them with: postroom project rebuild")


def _show(session: Session, manifest: "Manifest", folder: str, headline: str) -> None:
    if session.out.as_json:
        session.out.json({"folder": folder, "manifest": manifest})
        return
    from postroom.adapters.cli.tables import Time

    session.out.table(
        ("log", "first", "head", "epoch", "recorded"),
        [
            (
                each.mailbox,
                each.first,
                each.position,
                each.epoch,
                Time(each.recorded_at),
            )
            for each in manifest.mailboxes
            if each.position
        ],
    )
    session.out.line()
    records = pluralize(manifest.records, "record")
    session.out.line(headline)
    session.out.line(f"  {records}, {manifest.bytes / 1e6:,.1f} MB, as of {Time(manifest.created_at)}")
