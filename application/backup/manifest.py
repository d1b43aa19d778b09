"""Backups: a manifest with the contents of each and the hashes that prove them, copying, and verification."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import NamedTuple, TypeVar

import msgspec
from blake3 import blake3

from postroom.application.access.audit_log import verify_audit
from postroom.application.ports.backup import MailboxHead, StoreLoader, StoreSnapshot
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.verify import Verification, VerifyLog
from postroom.application.text import pluralize
from postroom.domain.commit import Commit
from postroom.domain.errors import BrokenLog, IntegrityFailure, InvalidRequest
from postroom.domain.message import MessageSent
from postroom.domain.names import AUDIT_LOG

FORMAT = 1
_encode = msgspec.json.Encoder().encode


class BackupFile(msgspec.Struct, frozen=True):
    """A file of a backup, with its size in bytes and the BLAKE3 hash of its content in hex."""

    name: str
    bytes: int
    blake3: str


class ArchivedSegment(msgspec.Struct, frozen=True):
    """A segment of the log archive, which the backup names and does not copy; `chain` in hex."""

    mailbox: str
    first: int
    last: int
    chain: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a backup.

    Arguments:
        format: version of the backup's format.
        store: kind of the store that was backed up, `sqlite` or `postgresql`.
        created_at: when the backup was started, µs since 1970 UTC.
        checksum: BLAKE3 of the manifest without this field, in hex.
    """

    format: int
    store: str
    created_at: int
    mailboxes: list[MailboxHead]
    files: list[BackupFile]
    archive: list[ArchivedSegment] = []
    checksum: str = ""

    @property
    def records(self) -> int:
        """Return the number of events in the backup."""
        return sum(each.position - each.first + 1 for each in self.mailboxes if each.first)

    @property
    def bytes(self) -> int:
        """Return the size of the backup's files."""
        return sum(file.bytes for file in self.files)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as indented JSON, with its checksum."""
    signed = msgspec.structs.replace(manifest, checksum=_checksum(manifest))
    return msgspec.json.format(_encode(signed)) + b"\n"


def decode_manifest(text: bytes, where: str) -> Manifest:
    """Parse a manifest that `encode_manifest` wrote, and verify its checksum.

    Arguments:
        where: the backup, for messages.

    Raises: IntegrityFailure when it was altered, InvalidRequest when it has a later format.
    """
    try:
        version = msgspec.json.decode(text, type=_Version).format
        if version > FORMAT:
            raise InvalidRequest(
                f"The backup {where} has format {version}, and this version of Postroom reads up to "
                f"{FORMAT}; install the version that wrote it, or a later one."
            )
        manifest = msgspec.json.decode(text, type=Manifest)
        is_intact = encode_manifest(manifest) == text  # its checksum and every other byte
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise _altered_manifest(where) from error
    if not is_intact:
        raise _altered_manifest(where)
    return manifest


class _Version(msgspec.Struct):
    format: int


def _checksum(manifest: Manifest) -> str:
    return blake3(_encode(msgspec.structs.replace(manifest, checksum=""))).hexdigest()


def _altered_manifest(where: str) -> IntegrityFailure:
    return IntegrityFailure(f"The manifest of the backup {where} was altered; use another backup.")


T = TypeVar("T")

BATCH_ROWS = 5_000
BATCH_COMMITS, BATCH_BYTES = 500, 16 << 20
"""Bounds of the commits that are in memory at a time; one may be larger."""


def copy_store(
    snapshot: StoreSnapshot,
    loader: StoreLoader,
    heads: Sequence[MailboxHead],
    added: Mapping[str, Sequence[Commit]] = {},
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Copy all logs, with their indexes, snapshots and seals, and the recorded messages.

    Arguments:
        heads: the ends of the logs of the snapshot.
        added: commits to append after a mailbox's own.
        progress: called with the number of events copied.
    """
    count = 0
    for head in heads:
        name = head.mailbox
        more = added.get(name, ())
        loader.add_mailbox(name, max(head.first, 1), more[-1].last if more else head.position)
        for commits in _commits(snapshot.commits(name)):
            loader.append(name, commits)
            count += sum(commit.event_count for commit in commits)
            progress(count)
        for entries in _batches(snapshot.entries(name), BATCH_ROWS):
            loader.add_entries(name, entries)
        if more:
            loader.append(name, more)
            count += sum(commit.event_count for commit in more)
            progress(count)
        loader.save_snapshots(name, snapshot.snapshots(name))
        seal = snapshot.seal(name)
        if seal is not None:
            loader.save_seal(name, seal)
    for rows in _batches(snapshot.recorded_messages(), BATCH_ROWS):
        loader.record_messages(rows)


def _commits(commits: Iterable[Commit]) -> Iterator[list[Commit]]:
    batch: list[Commit] = []
    size = 0
    for commit in commits:
        batch.append(commit)
        size += len(commit.events) + len(commit.envelopes)
        if len(batch) >= BATCH_COMMITS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _batches(rows: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, size)):
        yield batch


class Loss(NamedTuple):
    """Events of a mailbox that the backup lacks.

    Arguments:
        common: last position through which both logs have the same commits; 0 for none.
        records, messages: number of the mailbox's events after it, and of the messages sent by them.
        is_diverged: whether the backup has other events after it; otherwise the mailbox only goes further.
    """

    mailbox: str
    common: int
    records: int
    messages: int
    is_diverged: bool


def compare(target: EventLogReader, backup: EventLogReader | None) -> Loss | None:
    """Return the loss if the backup's log replaced `target`, or None.

    Arguments:
        backup: None when the backup does not contain the mailbox.
    """
    head = target.head()
    if head is None:
        return None
    end = None if backup is None else backup.head()
    common = 0 if backup is None or end is None else _common(target, backup, head.position, end.position)
    if common == head.position:
        return None
    messages = sum(isinstance(event, MessageSent) for _, event in target.replay(common))
    is_diverged = end is not None and common < end.position
    return Loss(target.mailbox, common, head.position - common, messages, is_diverged)


def _common(target: EventLogReader, backup: EventLogReader, last: int, end: int) -> int:
    """Return the last position at which both logs have the same chain hash, by a binary search.

    A chain hash covers all commits before it, so the logs are the same up to there, the end of a commit.
    """
    first = max(target.first_position() or 1, backup.first_position() or 1)
    high = min(last, end)
    if first > high:  # retention removed every position that both have had
        return high
    low = first - 1
    while low < high:
        middle = (low + high + 1) // 2
        commit, copy = (log.commits_of([middle], envelopes=False) for log in (target, backup))
        if commit and copy and commit[0].chain == copy[0].chain:
            low = middle
        else:
            high = middle - 1
    return low if low >= first else 0


def check_losses(losses: Sequence[Loss], unsent: int, store: str, discard_newer: int) -> None:
    """Check that the operator knows which records a restore discards.

    Arguments:
        unsent: number of messages that transactions recorded in the store and that were not sent yet.
        discard_newer: exact number of records and unsent messages that may be lost.

    Raises: InvalidRequest naming what would be lost, when that is another number of records.
    """
    count = sum(loss.records for loss in losses) + unsent
    if count == discard_newer:
        return
    if not count:
        raise InvalidRequest(
            f"The store {store} has no records that the backup lacks, not {discard_newer:,}; omit "
            "--discard-newer."
        )
    outbox = [f"the outbox has {pluralize(unsent, 'unsent message')}"] if unsent else []
    text = "; ".join([*map(_describe, losses), *outbox])
    raise InvalidRequest(
        f"The store {store} has records that the backup lacks: {text}. Restoring discards them, acknowledged "
        f"sends included; to do so, add --discard-newer {count}."
    )


def _describe(loss: Loss) -> str:
    records, messages = pluralize(loss.records, "record"), pluralize(loss.messages, "message")
    where = f"after position {loss.common:,}" if loss.common else "that the backup has nothing of"
    also = ", where the backup goes on with other records" if loss.is_diverged else ""
    return f"mailbox {loss.mailbox} has {records} with {messages} {where}{also}"


class VerifyBackup:
    """A verification of every hash of every log of a backup; does not need the store or its server.

    Arguments:
        open_log: opens the log of a mailbox in the backup.
    """

    def __init__(self, where: str, open_log: Callable[[str], EventLogReader]) -> None:
        self._where = where
        self._open_log = open_log

    def __call__(
        self, manifest: Manifest, progress: Callable[[int], None] = lambda _: None
    ) -> list[Verification]:
        """Return the verification of each log.

        Arguments:
            progress: called with the number of records that were verified.

        Raises: BrokenLog when a log is not the one that the manifest describes.
        """
        verifications: list[Verification] = []
        done = 0
        for head in manifest.mailboxes:
            with closing(self._open_log(head.mailbox)) as log:
                try:
                    verification = verification_of(log)(
                        expected_last=head.position,
                        expected_chain=head.chain,
                        progress=lambda position, start=done - head.first: progress(start + position),  # type: ignore[misc]
                    )
                except BrokenLog as error:
                    message = f"The backup {self._where} is not intact; use another one. {error}"
                    raise BrokenLog(message, error.position) from error
            if (verification.last, verification.chain) != (head.position, head.chain):
                raise BrokenLog(
                    f"The backup {self._where} is not intact; use another one. Its log of mailbox "
                    f"{head.mailbox} ends at position {verification.last}, not at {head.position}.",
                    head.position,
                )
            done += head.position - head.first + 1 if head.first else 0
            verifications.append(verification)
        return verifications


def verification_of(log: EventLogReader) -> VerifyLog:
    """Return the verification of a log, according to how retention records the removed commits."""
    return verify_audit(log) if log.mailbox == AUDIT_LOG else VerifyLog(log)
