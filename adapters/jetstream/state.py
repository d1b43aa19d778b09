"""Records of a store beside its logs: names of mailboxes, ends of retention, seals and blobs (ADR 0147)."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from postroom.adapters.jetstream.client import StoredMessage, StreamClient, SubjectChanged
from postroom.adapters.jetstream.frames import FRAME_BYTES, seal, unseal
from postroom.adapters.jetstream.store_streams import WRITE_SECONDS, OpenStreams, token_of
from postroom.application.mailbox.codec import FORMAT, check_format
from postroom.application.ports.event_log import Seal, StoredSnapshot
from postroom.application.telemetry import logger
from postroom.application.version import own_version
from postroom.domain.errors import BrokenLog, InvalidRequest, Unavailable, UnusableStore

T = TypeVar("T")
UNFINISHED = 1 << 16
"""Format of a store while it is restored: versions that don't know `Mailboxes.restoration` refuse it, too."""
TRIES = 20
"""Maximum number of attempts to change a record that other processes change, too."""


class Mailboxes(msgspec.Struct, frozen=True, array_like=True):
    """The names of all logs of a store with their ids, and the format of the store (ADR 0101).

    Arguments:
        version: of Postroom, which wrote the store first in that format.
        restoration: token of a restore that has not ended, until which nobody else opens the store.
    """

    format: int = FORMAT
    version: str = ""
    ids: dict[str, int] = {}
    restoration: str = ""


class LogState(msgspec.Struct, frozen=True, array_like=True):
    """The end of retention and the seal of a log.

    Arguments:
        removed: last position that retention removed, or 0.
        removed_bytes: estimated size of all commits that it removed.
        sealed, chain: see `Seal`; 0 before the first one.
    """

    removed: int = 0
    removed_bytes: int = 0
    sealed: int = 0
    chain: bytes = b""


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """A part of a blob; `digest` is the BLAKE3 hash of the whole."""

    part: int
    parts: int
    digest: bytes
    content: bytes


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    position: int
    chain: bytes
    state: bytes


_encode = msgspec.msgpack.Encoder().encode


class StoreState:
    """The records and blobs of a store; calls block, and raise Unavailable when the stream can't be used.

    Arguments:
        restoration: token of the restore that this process runs; empty for none.
    """

    def __init__(self, streams: OpenStreams, restoration: str = "") -> None:
        self._streams = streams
        self._restoration = restoration
        self._stream: StreamClient = streams.state
        self._root = streams.settings.state_stream

    # -- records ---

    def mailboxes(self) -> dict[str, int]:
        """Return the ids of all logs, by name, in the order of ids.

        Raises: UnusableStore when the store has the format of a later version, or its restore has not ended.
        """
        return dict(sorted(self._mailboxes().ids.items(), key=lambda item: item[1]))

    def add_mailbox(self, mailbox: str) -> None:
        """Add a log to the names, unless it is there."""

        def add(record: Mailboxes) -> Mailboxes:
            self._check(record)
            ids = record.ids
            if mailbox not in ids:
                ids = ids | {mailbox: max(ids.values(), default=0) + 1}
            if record.restoration:
                return replace(record, ids=ids)
            # The first owner of a later version begins its format: former versions refuse the store then.
            is_current = record.format == FORMAT and record.version
            return replace(
                record, format=FORMAT, version=record.version if is_current else own_version(), ids=ids
            )

        self._change(f"{self._root}.mailboxes", Mailboxes, add)

    def is_restoring(self) -> bool:
        """Return whether a restore of the store has begun and not ended."""
        return bool(self._read(f"{self._root}.mailboxes", Mailboxes)[0].restoration)

    def begin_restoration(self) -> None:
        """Take an empty store for a restore, and remove what an interrupted restore has left in it.

        Raises: InvalidRequest when the store is not empty.
        """
        log = self._streams.log
        messages = self._streams.call(log.info)["state"]["messages"]

        def begin(record: Mailboxes) -> Mailboxes:
            if (record.ids or messages) and not record.restoration:
                raise InvalidRequest(
                    f"The store {self._streams.settings.where} is not empty; restore into another one."
                )
            return Mailboxes(UNFINISHED, own_version(), restoration=self._restoration)

        self._change(f"{self._root}.mailboxes", Mailboxes, begin)
        self._streams.call(partial(log.purge, f"{log.stream}.*", None), WRITE_SECONDS)
        for kind in ("log", "snapshot", "index", "keys"):
            self._streams.call(partial(self._stream.purge, f"{self._root}.{kind}.>", None), WRITE_SECONDS)

    def end_restoration(self) -> None:
        """Open the store to others, with all that was restored."""

        def end(record: Mailboxes) -> Mailboxes:
            self._check(record)
            return replace(record, format=FORMAT, restoration="")

        self._change(f"{self._root}.mailboxes", Mailboxes, end)

    def log_state(self, mailbox: str) -> LogState:
        """Return the end of retention and the seal of a log."""
        return self._read(f"{self._root}.log.{token_of(mailbox)}", LogState)[0]

    def remove_through(self, mailbox: str, position: int, size: int) -> None:
        """Note that retention removed the commits through a position, of a total size."""
        self._change(
            f"{self._root}.log.{token_of(mailbox)}",
            LogState,
            lambda state: (
                replace(state, removed=position, removed_bytes=size) if position > state.removed else state
            ),
        )

    def seal(self, mailbox: str, end: Seal) -> None:
        """Save a seal, unless the saved one has a later position."""
        self._change(
            f"{self._root}.log.{token_of(mailbox)}",
            LogState,
            lambda state: (
                replace(state, sealed=end.position, chain=end.chain) if end.position > state.sealed else state
            ),
        )

    def _mailboxes(self) -> Mailboxes:
        record, _ = self._read(f"{self._root}.mailboxes", Mailboxes)
        self._check(record)
        return record

    def _check(self, record: Mailboxes) -> None:
        """Check that this process can use a store with this record; raise UnusableStore."""
        where = self._streams.settings.where
        if record.restoration != self._restoration:
            raise UnusableStore(
                f"The store {where} is being restored from a backup, or a restore was interrupted; wait for "
                "it, or run postroom restore again."
            )
        if not record.restoration:
            check_format(where, record.format, record.version)

    def _read(self, subject: str, type_: type[T]) -> tuple[T, int]:
        """Return a record and the sequence of its message; the default and 0 without one."""
        message = self._streams.call(partial(self._stream.last, subject))
        if message is None:
            return type_(), 0
        return _decode(message, type_), message.sequence

    def _change(self, subject: str, type_: type[T], change: Callable[[T], T]) -> None:
        for _ in range(TRIES):
            record, sequence = self._read(subject, type_)
            changed = change(record)
            if changed == record and sequence:
                return
            part = seal(subject, _encode(changed))
            try:
                self._streams.call(partial(self._stream.append, subject, [part], sequence), WRITE_SECONDS)
                return
            except SubjectChanged:
                continue
        raise Unavailable(f"Record {subject} of the store is changed by others all the time; retry shortly.")

    # -- snapshots ---

    def save_snapshot(self, mailbox: str, snapshot: StoredSnapshot) -> None:
        """Save a row of a snapshot in place of one at the same position."""
        self.save_blob(f"snapshot.{token_of(mailbox)}", snapshot.position, _encode(_Snapshot(*snapshot)))

    def snapshots(self, mailbox: str) -> Iterator[StoredSnapshot]:
        """Yield the rows of snapshots, newest first, each read lazily, without those that were altered."""
        name = f"snapshot.{token_of(mailbox)}"
        for position in reversed(self.blobs(name)):
            content = self.read_blob(name, position)
            if content is not None:
                yield StoredSnapshot(
                    *msgspec.structs.astuple(msgspec.msgpack.decode(content, type=_Snapshot))
                )

    def drop_snapshots(self, mailbox: str, before: int) -> None:
        """Remove the rows of snapshots before a position."""
        self.drop_blobs(f"snapshot.{token_of(mailbox)}", before)

    # -- blobs: numbered contents of any size ---

    def blobs(self, name: str) -> list[int]:
        """Return the numbers of the blobs of a name, sorted."""
        subjects = self._streams.call(partial(self._stream.subjects, f"{self._root}.{name}.*.*"))
        return sorted({int(subject.split(".")[-2]) for subject in subjects})

    def save_blob(self, name: str, number: int, content: bytes) -> None:
        """Save a blob in place of one with the same number."""
        room = max(1, self._stream.max_bytes - FRAME_BYTES)
        contents = [content[start : start + room] for start in range(0, len(content), room)] or [b""]
        digest = blake3(content).digest()
        for part, each in enumerate(contents):
            subject = f"{self._root}.{name}.{number}.{part}"
            body = seal(subject, _encode(_Part(part, len(contents), digest, each)))
            self._streams.call(partial(self._stream.append, subject, [body], None), WRITE_SECONDS)

    def read_blob(self, name: str, number: int) -> bytes | None:
        """Return a blob; None if it is missing, incomplete or altered, which is logged."""
        contents: list[bytes] = []
        while True:
            subject = f"{self._root}.{name}.{number}.{len(contents)}"
            message = self._streams.call(partial(self._stream.last, subject))
            try:
                part = None if message is None else _decode(message, _Part)
            except BrokenLog as error:
                logger().warning("store.blob_broken", subject=subject, error=str(error))
                return None
            if part is None:
                break
            contents.append(part.content)
            if len(contents) >= part.parts:
                content = b"".join(contents)
                if blake3(content).digest() == part.digest:
                    return content
                break
        logger().warning("store.blob_incomplete", subject=f"{self._root}.{name}.{number}")
        return None

    def drop_blobs(self, name: str, before: int) -> None:
        """Remove the blobs with numbers below `before`."""
        for number in self.blobs(name):
            if number < before:
                subject = f"{self._root}.{name}.{number}.*"
                self._streams.call(partial(self._stream.purge, subject, None))


def _decode(message: StoredMessage, type_: type[T]) -> T:
    body = unseal(message)
    try:
        return msgspec.msgpack.decode(body, type=type_)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BrokenLog(
            f"Message {message.sequence} of subject {message.subject} can't be decoded ({error}); it was "
            "altered, or a newer version of Postroom wrote it. Restore the store from a backup.",
            0,
        ) from error
