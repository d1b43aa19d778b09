"""Restoring stores from backups."""

import os
import socket
from contextlib import AsyncExitStack, closing
from pathlib import Path

import msgspec

from postroom.adapters.backup.folder import (
    STORE,
    check_files,
    copy_from,
    read_manifest,
    sync,
    temporary_folder,
    writing,
)
from postroom.adapters.compose.backup import Progress, verify_logs
from postroom.adapters.compose.store import Store, open_store
from postroom.adapters.sqlite.backup import SqliteStoreSnapshot
from postroom.adapters.sqlite.restore import check_side_files, finish, log_ends, replace_store
from postroom.adapters.sqlite.store import SqliteStore
from postroom.adapters.system.clock import SystemClock
from postroom.application.backup.comparison import Loss, check_losses, compare
from postroom.application.backup.fence import fencing_records
from postroom.application.backup.manifest import Manifest
from postroom.domain.errors import InvalidRequest


class Restoration(msgspec.Struct, frozen=True):
    """A restored store.

    Arguments:
        manifest: of the backup.
        epochs: the first epoch of each mailbox after the restore.
        losses: what the store had and the backup has not.
    """

    store: str
    manifest: Manifest
    epochs: dict[str, int]
    losses: list[Loss]


async def restore(
    backup: Path,
    store: str,
    *,
    replace: bool = False,
    discard_newer: int = 0,
    progress: Progress = lambda *_: None,
) -> Restoration:
    """Restore a backup into a store, after verifying every byte of it.

    Arguments:
        store: address of a store without mailboxes, unless `replace` is set.
        replace: replace all mailboxes of the store; no process may use it.
        discard_newer: number of the store's records that the backup lacks, which are given up.

    Raises: InvalidRequest when the store has mailboxes, or another number of newer records; MailboxOwned and
        Unavailable when a process uses it; NotFound and IntegrityFailure as `verify_backup`.
    """
    place, manifest = open_store(store), read_manifest(backup)
    if not isinstance(place, SqliteStore):
        raise InvalidRequest(f"A backup can't be restored into {place.where}; name a SQLite file.")
    path = Path(place.identity)
    existing = _existing(path)
    _check_empty(place, existing, replace)
    async with AsyncExitStack() as opened:
        await _own(place, existing, manifest, opened)
        # Not in a thread: if the command was interrupted, ownership would end before the thread.
        epochs, losses = _replace_file(path, backup, manifest, discard_newer, progress)
    return Restoration(place.where, manifest, epochs, losses)


def _existing(path: Path) -> list[str]:
    """Return the mailboxes of a file, which need not exist."""
    check_side_files(path)
    return SqliteStoreSnapshot(path).mailboxes() if path.exists() else []


def _replace_file(
    path: Path, backup: Path, manifest: Manifest, discard_newer: int, progress: Progress
) -> tuple[dict[str, int], list[Loss]]:
    """Put the file of a backup in the place of `path`; return the new epochs, and what was lost."""
    with writing(path), temporary_folder(path) as folder:
        # What is verified is the copy, not a backup that could change until it is copied.
        snapshot = SqliteStoreSnapshot(folder / STORE)
        copy_from(backup, STORE, snapshot.path)
        check_files(backup, manifest, folder)
        verify_logs(snapshot, str(backup), manifest, progress)
        ends = log_ends(path) if path.exists() else None
        losses = [] if ends is None else _losses(SqliteStoreSnapshot(path), snapshot)
        check_losses(losses, str(path), discard_newer)
        epochs = _fence(snapshot, manifest)
        finish(snapshot.path)
        sync(snapshot.path)
        replace_store(snapshot.path, path, ends)
        sync(path.parent)
    return epochs, losses


def _check_empty(place: Store, existing: list[str], replace: bool) -> None:
    if existing and not replace:
        raise InvalidRequest(
            f"The store {place.where} has mailboxes ({', '.join(existing)}); name another store, or add "
            "--replace."
        )


async def _own(place: Store, existing: list[str], manifest: Manifest, opened: AsyncExitStack) -> None:
    """Own the mailboxes of the store and of the backup, so that no other process opens one meanwhile."""
    owner = f"postroom restore, process {os.getpid()} on {socket.gethostname()}"
    for mailbox in sorted({*existing, *(head.mailbox for head in manifest.mailboxes)}):
        await opened.enter_async_context(place.ownership().acquire(mailbox, owner, 0))


def _losses(target: SqliteStoreSnapshot, backup: SqliteStoreSnapshot) -> list[Loss]:
    """Return what the logs of a store have that those of the backup have not."""
    losses: list[Loss | None] = []
    names = backup.mailboxes()
    for mailbox in target.mailboxes():
        with closing(target.log(mailbox)) as log:
            if mailbox in names:
                with closing(backup.log(mailbox)) as copy:
                    losses.append(compare(log, copy))
            else:
                losses.append(compare(log, None))
    return [loss for loss in losses if loss is not None]


def _fence(snapshot: SqliteStoreSnapshot, manifest: Manifest) -> dict[str, int]:
    """Begin new epochs in the logs of a file, and return them by mailbox."""
    store, now_ms = SqliteStore(str(snapshot.path)), SystemClock().wall() // 1_000
    epochs: dict[str, int] = {}
    for head in manifest.mailboxes:
        with closing(store.event_log(head.mailbox, durability="relaxed")) as log:
            records = fencing_records(log, now_ms, "postroom restore")
            log.append(records)
            for record in records:
                epochs[head.mailbox] = record.epoch
    return epochs
