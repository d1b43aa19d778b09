"""Wiring of backups and anchors."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from postroom.adapters.anchors.file import AnchorFile, check_repository, commit
from postroom.adapters.backup import (
    STORE,
    check_files,
    complete,
    describe_files,
    new_backup,
    read_manifest,
)
from postroom.adapters.compose import list_mailboxes
from postroom.adapters.compose.archive import open_archive
from postroom.adapters.compose.store import JETSTREAM_SCHEME, Store, open_store, scheme_of
from postroom.adapters.postgres.url import is_url
from postroom.adapters.sqlite.backup import SqliteStoreSnapshot, copy_file, loading
from postroom.adapters.sqlite.store import SqliteStore
from postroom.adapters.system.clock import SystemClock
from postroom.application.anchors import Anchor, check_logs, next_anchor
from postroom.application.backup.manifest import FORMAT, ArchivedSegment, Manifest, VerifyBackup, copy_store
from postroom.application.extras import explain_missing_extra
from postroom.application.ports.backup import StoreLoader, StoreSnapshot
from postroom.application.ports.event_log import LogArchive
from postroom.application.queries.verify import Verification
from postroom.application.queries.verify_archive import VerifyArchive
from postroom.application.text import pluralize
from postroom.domain.errors import IntegrityFailure, InvalidRequest, NotFound
from postroom.domain.names import AUDIT_LOG, CAPABILITY_LOG

Progress = Callable[[float, str], None]
"""Called with a growing number and its unit."""


@explain_missing_extra()
def back_up(
    store: str, target: Path, *, archive: str | Path | None = None, progress: Progress = lambda *_: None
) -> Manifest:
    """Write a backup of a store to a new folder while others read and write the store.

    Arguments:
        store: its address.
        target: the folder; it appears when the backup is complete.
        archive: folder of the log archive, whose segments the backup names and does not copy.

    Raises: NotFound when there is no store, InvalidRequest when the target exists, Unavailable when the store
        can't be read or the backup can't be written.
    """
    place, created_at = open_store(store), SystemClock().wall()
    with new_backup(target) as folder:
        file = folder / STORE
        kind = _copy(place, store, file, progress)
        heads = SqliteStoreSnapshot(file).heads()
        # List the segments after the copy: by then, the archive has what retention removed before the copy.
        segments = _segments(archive)
        manifest = Manifest(FORMAT, kind, created_at, heads, describe_files(folder), segments)
        complete(folder, target, manifest)
    return read_manifest(target)


def verify_backup(
    backup: Path, *, archive: str | Path | None = None, progress: Progress = lambda *_: None
) -> tuple[Manifest, list[Verification]]:
    """Verify every byte of a backup: its files, and the chain of each log up to the head it names.

    Arguments:
        archive: folder with a copy of the log archive, which must contain the segments that the backup
            names, unaltered and continued by its logs.

    Raises: NotFound when there is no backup, IntegrityFailure when it was altered.
    """
    manifest = read_manifest(backup)
    check_files(backup, manifest)
    snapshot = SqliteStoreSnapshot(backup / STORE)
    if archive is not None:
        _verify_archive(snapshot, archive, manifest)
    return manifest, verify_logs(snapshot, str(backup), manifest, progress)


def verify_logs(
    snapshot: SqliteStoreSnapshot, where: str, manifest: Manifest, progress: Progress
) -> list[Verification]:
    """Verify the logs in the file of a backup.

    Arguments:
        where: the backup, for messages.
    """
    total = max(manifest.records, 1)
    verify = VerifyBackup(where, snapshot.log)
    return verify(manifest, lambda count: progress(count / total, f"{count:,} of {total:,} records"))


def _copy(place: Store, address: str, file: Path, progress: Progress) -> str:
    """Copy a store to a file, and data that the file can't hold to other files beside it; return its kind."""
    if isinstance(place, SqliteStore):
        copy_file(Path(place.identity), file, lambda done, total: progress(done / total, f"{total:,} pages"))
        return "sqlite"
    if scheme_of(address) == JETSTREAM_SCHEME:
        return _copy_streams(address, file, progress)
    if not is_url(address):
        raise InvalidRequest(
            f"The store {place.where} ends with its process; name a file or a postgresql:// URL."
        )
    from postroom.adapters.postgres.backup import reading_store  # psycopg is slow to import

    with reading_store(address) as snapshot, loading(file) as loader:
        _load(snapshot, loader, progress)
        snapshot.copy_tables(file.parent)
    return "postgresql"


@explain_missing_extra("nats")
def _copy_streams(address: str, file: Path, progress: Progress) -> str:
    """Copy the logs of a store in JetStream to a file; return its kind."""
    from postroom.adapters.jetstream.backup import reading_store

    with reading_store(address) as snapshot, loading(file) as loader:
        _load(snapshot, loader, progress)
    return "jetstream"


def _load(snapshot: StoreSnapshot, loader: StoreLoader, progress: Progress) -> None:
    heads = snapshot.heads()
    total = max(sum(head.position - head.first + 1 for head in heads if head.first), 1)
    copy_store(
        snapshot,
        loader,
        heads,
        progress=lambda count: progress(count / total, f"{count:,} of {total:,} records"),
    )


def _segments(archive: str | Path | None) -> list[ArchivedSegment]:
    if archive is None:
        return []
    log_archive = open_archive(archive)
    return [
        ArchivedSegment(mailbox, segment.first, segment.last, segment.chain.hex())
        for mailbox in log_archive.mailboxes()
        for segment in log_archive.segments(mailbox)
    ]


def _verify_archive(snapshot: SqliteStoreSnapshot, archive: str | Path, manifest: Manifest) -> None:
    segments, log_archive = _segments(archive), open_archive(archive)
    missing = [
        each for each in manifest.archive if each not in segments and not _is_merged(log_archive, each)
    ]
    if missing:
        raise IntegrityFailure(
            f"The archive {archive} lacks positions {missing[0].first} to {missing[0].last} of mailbox "
            f"{missing[0].mailbox} as the backup names them, or they were altered; use another copy of it."
        )
    for head in manifest.mailboxes:
        lasts = [each.last for each in segments if each.mailbox == head.mailbox]
        # A later copy of the archive may contain records that the backup has, and that were removed since.
        is_older = max(lasts, default=0) <= head.position
        with closing(snapshot.log(head.mailbox)) if is_older else nullcontext() as log:
            VerifyArchive(log_archive)(head.mailbox, log)


def _is_merged(archive: LogArchive, segment: ArchivedSegment) -> bool:
    """Return whether other segments have the commits of a segment, after compaction."""
    commits = archive.commits_of(segment.mailbox, [segment.first, segment.last], envelopes=False)
    ends = [(commit.last, commit.chain.hex()) for commit in commits]
    return bool(commits) and commits[0].first == segment.first and (segment.last, segment.chain) in ends


RESERVED_LOGS = (AUDIT_LOG, CAPABILITY_LOG)


class Anchoring(NamedTuple):
    """Result of `anchor_store`: the new anchors, and the number of unchanged logs."""

    added: list[Anchor]
    unchanged: int


def anchor_store(
    store: str, file: Path, *, mailbox: str | None = None, git: bool = False, timestamp_url: str | None = None
) -> Anchoring:
    """Append the ends of a store's logs to an anchor file, except those of unchanged logs.

    Arguments:
        mailbox: the mailbox whose log is anchored; None for all logs, including the audit log and the log of
            capabilities.
        git: commit the file to the git repository that contains it.
        timestamp_url: an RFC 3161 authority that certifies when each anchor existed.

    Raises: BrokenLog if a log was truncated or rewritten since its last anchor; InvalidRequest if the file is
        not an anchor file; Unavailable if a step fails. The file is then unchanged, unless the commit to git
        failed.
    """
    if timestamp_url is not None and not timestamp_url.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"{timestamp_url!r} is not the URL of a time stamp authority; give http(s)://..."
        )
    if git:
        check_repository(file)
    names = _logs(store) if mailbox is None else [mailbox]
    with AnchorFile(file).locked() as anchors:
        if mailbox is None:
            check_logs(anchors.anchors, names, store)
        place = open_store(store)
        added = []
        for name in names:
            with closing(place.existing_log(name)) as log:
                anchor = next_anchor(log, anchors.anchors, time.time_ns() // 1_000)
            if anchor is not None:
                added.append(anchor)
        if timestamp_url is not None:
            added = asyncio.run(_timestamp(timestamp_url, added))
        anchors.append(added)
    if git:
        commit(file, f"Anchor {pluralize(len(added), 'log')}" if added else "Add anchors")
    return Anchoring(added, len(names) - len(added))


def read_anchors(file: Path, store: str, mailbox: str | None = None) -> list[Anchor]:
    """Return the anchors of a file, oldest first, after checking that the store has the logs.

    Arguments:
        mailbox: the mailbox whose anchors are returned; None for all.

    Raises: the errors of `AnchorFile.read`; InvalidRequest without anchors; BrokenLog if a log is missing.
    """
    anchors = [each for each in AnchorFile(file).read() if mailbox in (None, each.log)]
    if not anchors:
        raise InvalidRequest(
            f"The file {file} has no anchor of {mailbox}, so its log can't be compared; anchor it first, or "
            "name another file."
        )
    check_logs(anchors, _logs(store), store)
    return anchors


@explain_missing_extra("anchors")
def verify_timestamps(anchors: Iterable[Anchor], certificates: Path) -> list[datetime]:
    """Return the certified times of the anchors with time stamps.

    Arguments:
        certificates: PEM file with the root certificates of the authorities.

    Raises: IntegrityFailure for a time stamp that is not valid, InvalidRequest for an unusable file.
    """
    from postroom.adapters.anchors.timestamp import load_certificates, verify_timestamp

    roots = load_certificates(certificates)
    times = [verify_timestamp(each, roots) for each in anchors]
    return [each for each in times if each is not None]


async def _timestamp(url: str, anchors: Sequence[Anchor]) -> list[Anchor]:
    with explain_missing_extra("anchors"):
        from postroom.adapters.anchors.timestamp import request_timestamp
    return [msgspec.structs.replace(each, timestamp=await request_timestamp(url, each)) for each in anchors]


def _logs(store: str) -> list[str]:
    """Return the names of a store's logs: its mailboxes, and the reserved logs that exist."""
    names = list(list_mailboxes(store))
    for name in RESERVED_LOGS:
        try:
            open_store(store).existing_log(name).close()
        except NotFound:
            continue
        names.append(name)
    return names
