"""Ports: reading a whole store at one moment, and loading such a copy into an empty store."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from postroom.application.ports.event_log import Seal, StoredSnapshot
from postroom.domain.commit import Commit, IndexEntry


class MailboxHead(msgspec.Struct, frozen=True):
    """The end of a log in a backup.

    Arguments:
        first: position of its oldest event, 0 if it is empty.
        position: of its last event.
        chain, epoch, recorded_at: of its last commit; `chain` in hex, the time in µs since 1970 UTC.
    """

    mailbox: str
    first: int
    position: int
    chain: str
    epoch: int
    recorded_at: int


class RecordedRow(NamedTuple):
    """A message that a transaction recorded for a mailbox, not sent yet; `error` if it was refused."""

    id: str
    mailbox: str
    topic: str
    message: str
    error: str | None


class StoreSnapshot(Protocol):
    """The content of a store at one moment; calls block and raise Unavailable when it can't be read."""

    def heads(self) -> list[MailboxHead]:
        """Return the ends of all logs, reserved ones included, sorted by mailbox."""

    def commits(self, mailbox: str) -> Iterator[Commit]:
        """Yield the commits of a log in the order of their positions, with envelopes."""

    def entries(self, mailbox: str) -> Iterator[IndexEntry]:
        """Yield the entries of a log's index, in any order."""

    def snapshots(self, mailbox: str) -> list[StoredSnapshot]:
        """Return the saved snapshots of a mailbox."""

    def seal(self, mailbox: str) -> Seal | None:
        """Return the seal of a log, if it has one."""

    def recorded_messages(self) -> Iterator[RecordedRow]:
        """Yield the messages that transactions recorded in the store, oldest first."""


class StoreLoader(Protocol):
    """Loader of an empty store; nothing of it is visible to others before it is committed."""

    def add_mailbox(self, mailbox: str, first: int, last: int) -> None:
        """Create a log that will have the positions `first` to `last`; `first` is 1 if it stays empty."""

    def append(self, mailbox: str, commits: Sequence[Commit]) -> None:
        """Append commits to a log, in the order of their positions, with the index entries they have."""

    def add_entries(self, mailbox: str, entries: Sequence[IndexEntry]) -> None:
        """Add entries to a log's index, as they are."""

    def save_snapshots(self, mailbox: str, snapshots: Sequence[StoredSnapshot]) -> None:
        """Save snapshots of a mailbox."""

    def save_seal(self, mailbox: str, seal: Seal) -> None:
        """Save the seal of a log."""

    def record_messages(self, rows: Sequence[RecordedRow]) -> None:
        """Insert messages that transactions recorded."""
