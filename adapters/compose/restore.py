"""Restoring stores from backups."""

import os
import socket
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path

import msgspec

from postroom.adapters.backup import (
    STORE,
    check_files,
    copy_from,
    read_manifest,
    temporary_folder,
    writing,
)
from postroom.adapters.compose.backup import Progress, verify_logs
from postroom.adapters.compose.store import JETSTREAM_SCHEME, Store, open_store, scheme_of
from postroom.adapters.files import sync
from postroom.adapters.postgres.url import is_url
from postroom.adapters.sqlite.backup import STORE_TABLES, SqliteStoreSnapshot
from postroom.adapters.sqlite.restore import check_side_files, finish, log_ends, replace_store
from postroom.adapters.sqlite.store import SqliteStore
from postroom.adapters.sqlite.store_file import has_file
from postroom.adapters.system.clock import SystemClock
from postroom.application.backup.former_records import fencing_commits
from postroom.application.backup.manifest import (
    Loss,
    Manifest,
    check_losses,
    compare,
    copy_store,
    verification_of,
)
from postroom.application.extras import explain_missing_extra
from postroom.domain.commit import Commit
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import is_mailbox

KILLED_OWNER_MS = 5_000
"""How long a restore waits for a mailbox in JetStream, whose killed owner leaves a record (ADR 0148)."""


class Restoration(msgspec.Struct, frozen=True):
    """A restored store.

    Arguments:
        manifest: of the backup.
        epochs: the first epoch of each mailbox after the restore.
        losses: events that the store had and the backup lacks.
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
    """Restore a backup into a store of any kind, after verifying every byte of it.

    Arguments:
        store: address of an empty store, unless `replace` is set.
        replace: replace the contents of the store; no process may use it.
        discard_newer: number of records that the store has and the backup lacks, which the restore removes.

    Raises: InvalidRequest when the store is not empty, has another number of newer records, or can't hold the
        backup's data; MailboxOwned and Unavailable when a process uses it; NotFound and IntegrityFailure as
        `verify_backup`.
    """
    place, manifest, wait_ms = open_store(store), read_manifest(backup), 0
    if isinstance(place, SqliteStore):
        path = Path(place.identity)
        existing = _existing_in_file(path)
        run = partial(_replace_file, path)
    elif is_url(store):
        existing = _existing_in_database(store)
        run = partial(_load_database, store)
    elif scheme_of(store) == JETSTREAM_SCHEME:
        existing, wait_ms = _existing_in_streams(store), KILLED_OWNER_MS
        run = partial(_load_streams, store)
        if existing:
            raise InvalidRequest(
                f"The store {place.where} is not empty (it has {', '.join(existing)}), and streams can't be "
                "replaced at once; restore into another one."
            )
    else:
        raise InvalidRequest(
            f"The store {place.where} ends with the command; name a file, or a postgresql:// or nats:// URL."
        )
    if existing and not replace:
        raise InvalidRequest(
            f"The store {place.where} is not empty (it has {', '.join(existing)}); name another one, or add "
            "--replace."
        )
    async with AsyncExitStack() as opened:
        await _own(place, existing, manifest, wait_ms, opened)
        # Not in a thread: if the command were interrupted, ownership would end before the thread does.
        epochs, losses = run(place, backup, manifest, discard_newer, progress)
    return Restoration(place.where, manifest, epochs, losses)


async def _own(
    place: Store, existing: list[str], manifest: Manifest, wait_ms: int, opened: AsyncExitStack
) -> None:
    """Own the mailboxes of the store and of the backup, so that no other process can open one meanwhile."""
    owner = f"postroom restore, process {os.getpid()} on {socket.gethostname()}"
    for mailbox in sorted({*existing, *(head.mailbox for head in manifest.mailboxes)}):
        if is_mailbox(mailbox):
            await opened.enter_async_context(place.ownership().acquire(mailbox, owner, wait_ms))


# -- into a SQLite file ---


def _existing_in_file(path: Path) -> list[str]:
    """Return the logs of a file, which need not exist."""
    check_side_files(path)
    return SqliteStoreSnapshot(path).mailboxes() if has_file(path) else []


def _replace_file(
    path: Path, place: Store, backup: Path, manifest: Manifest, discard_newer: int, progress: Progress
) -> tuple[dict[str, int], list[Loss]]:
    """Put the file of a backup in the place of `path`; return the new epochs and the lost events."""
    others = [file.name for file in manifest.files if file.name != STORE]
    if others:
        raise InvalidRequest(
            f"The backup {backup} has tables that only PostgreSQL can hold ({', '.join(others)}); restore it "
            "into a postgresql:// URL."
        )
    with writing(path), temporary_folder(path) as folder:
        # Verify the copy: the backup could change between its verification and the copying.
        snapshot = SqliteStoreSnapshot(folder / STORE)
        copy_from(backup, STORE, snapshot.path)
        check_files(backup, manifest, folder)
        verify_logs(snapshot, str(backup), manifest, progress)
        ends = log_ends(path) if has_file(path) else None
        losses = [] if ends is None else _losses(place, SqliteStoreSnapshot(path).mailboxes(), snapshot)
        unsent = 0 if ends is None else _count_unsent(SqliteStoreSnapshot(path), snapshot)
        check_losses(losses, unsent, str(path), discard_newer)
        epochs = _fence_file(snapshot, manifest)
        sync(snapshot.path)
        replace_store(snapshot.path, path, ends)
    return epochs, losses


def _count_unsent(target: SqliteStoreSnapshot, backup: SqliteStoreSnapshot) -> int:
    """Return how many messages that transactions recorded in a file are not in the backup."""
    ids = {(row.mailbox, row.id) for row in backup.recorded_messages()}
    return sum((row.mailbox, row.id) not in ids for row in target.recorded_messages())


def _fence_file(snapshot: SqliteStoreSnapshot, manifest: Manifest) -> dict[str, int]:
    """Begin new epochs in the logs of a file, and return them by mailbox."""
    store, fences = SqliteStore(str(snapshot.path)), _fences(snapshot, manifest)
    for mailbox, commits in fences.items():
        with closing(store.event_log(mailbox, durability="relaxed")) as log:
            log.append(commits)
    finish(snapshot.path)
    return _epochs(fences)


# -- into a PostgreSQL database ---


@explain_missing_extra()
def _existing_in_database(url: str) -> list[str]:
    """Return the logs of a database that was migrated."""
    from postroom.adapters.postgres.backup import reading_store

    with reading_store(url) as snapshot:
        return snapshot.mailboxes()


def _load_database(
    url: str, place: Store, backup: Path, manifest: Manifest, discard_newer: int, progress: Progress
) -> tuple[dict[str, int], list[Loss]]:
    """Replace the contents of a database in one transaction; return the new epochs and the lost events."""
    from postroom.adapters.postgres.backup import loading_store

    snapshot = _checked_logs(backup, manifest, progress)
    fences = _fences(snapshot, manifest)
    with loading_store(url) as loader:
        losses = _losses(place, loader.mailboxes(), snapshot)
        check_losses(losses, 0, place.where, discard_newer)
        loader.clear()  # raises InvalidRequest if the outbox has messages
        copy_store(snapshot, loader, manifest.mailboxes, fences)
        loader.load_tables(backup)
    return _epochs(fences), losses


# -- into JetStream ---


@explain_missing_extra("nats")
def _existing_in_streams(url: str) -> list[str]:
    """Return the logs of a store in JetStream, which need not exist."""
    from postroom.adapters.jetstream.backup import existing_logs

    return existing_logs(url)


def _load_streams(
    url: str, place: Store, backup: Path, manifest: Manifest, discard_newer: int, progress: Progress
) -> tuple[dict[str, int], list[Loss]]:
    """Load an empty store, which can be opened when all of it is verified; return the new epochs."""
    from postroom.adapters.jetstream.backup import loading_store

    snapshot = _checked_logs(backup, manifest, progress)
    others = [file.name for file in manifest.files if file.name != STORE]
    if others or next(snapshot.recorded_messages(), None) is not None:
        what = f"tables ({', '.join(others)})" if others else "messages that transactions recorded"
        raise InvalidRequest(
            f"The backup {backup} has {what} that JetStream can't hold; restore it into a store of the "
            "kind from which it was made."
        )
    check_losses([], 0, place.where, discard_newer)
    fences = _fences(snapshot, manifest)
    with loading_store(url, snapshot.last_events) as loader:
        copy_store(snapshot, loader, manifest.mailboxes, fences)
        for head in manifest.mailboxes:
            verify = verification_of(loader.log(head.mailbox))
            verify(expected_last=head.position, expected_chain=head.chain)
    return _epochs(fences), []


# -- into all ---


def _checked_logs(backup: Path, manifest: Manifest, progress: Progress) -> SqliteStoreSnapshot:
    """Return the logs of a backup, verified; raise InvalidRequest if it has tables of a user."""
    check_files(backup, manifest)
    snapshot = SqliteStoreSnapshot(backup / STORE)
    foreign = [table for table in snapshot.tables() if table not in STORE_TABLES]
    if foreign:
        raise InvalidRequest(
            f"The backup {backup} has tables that are not Postroom's ({', '.join(foreign)}); restore it "
            "into a SQLite file."
        )
    verify_logs(snapshot, str(backup), manifest, progress)
    return snapshot


def _losses(place: Store, existing: list[str], snapshot: SqliteStoreSnapshot) -> list[Loss]:
    """Return the records of a store's logs that the backup lacks."""
    losses: list[Loss | None] = []
    names = snapshot.mailboxes()
    for mailbox in existing:
        with closing(place.existing_log(mailbox)) as log:
            if mailbox in names:
                with closing(snapshot.log(mailbox)) as copy:
                    losses.append(compare(log, copy))
            else:
                losses.append(compare(log, None))
    return [loss for loss in losses if loss is not None]


def _fences(snapshot: SqliteStoreSnapshot, manifest: Manifest) -> dict[str, list[Commit]]:
    """Return the commits that begin new epochs, by mailbox."""
    now_ms = SystemClock().wall() // 1_000
    fences: dict[str, list[Commit]] = {}
    for head in manifest.mailboxes:
        with closing(snapshot.log(head.mailbox)) as log:
            commits = fencing_commits(log, now_ms, "postroom restore")
        if commits:
            fences[head.mailbox] = commits
    return fences


def _epochs(fences: dict[str, list[Commit]]) -> dict[str, int]:
    return {mailbox: commits[-1].epoch for mailbox, commits in fences.items()}
