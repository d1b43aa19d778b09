"""Applying: how the tables of a version of the read models are brought on to later positions of the log.

The rows that a batch changes and the cursor, which says how far each mailbox has come, change in one
transaction, and only if the cursor still stands where the batch begins: nothing is applied twice, whoever
else applies the same.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from postroom.adapters.postgres.url import is_url
from postroom.domain.record import Record
from postroom.domain.search import BodyRules
from postroom.projections.apply.changes import Batch
from postroom.projections.cut import MailboxCut


class Version(NamedTuple):
    """A version of the read models.

    Arguments:
        models: the version in whose table each projection is.
        status: `active`, or `building` as long as it is not served.
        bodies: whose bodies are searched for words.
        archive: folder of what retention removed from the log, if that was read too.
    """

    number: int
    status: str
    models: dict[str, int]
    bodies: BodyRules
    archive: str | None


class Cursor(NamedTuple):
    """Say how far a mailbox is covered: `at` is the log time in µs of the record at `position`."""

    position: int
    at: int


class Head(NamedTuple):
    """Say where the log of a mailbox ends, and where it begins: retention removed what was before."""

    id: int
    name: str
    first: int
    last: int


class Step(NamedTuple):
    """A mailbox's way from the cursor to a later position; `cut.at` is the log time there."""

    begins: Cursor
    cut: MailboxCut


class Tables(Protocol):
    """The tables of the read models of one store, as one process sees them that applies batches.

    All methods raise Unavailable when the store can't be used; the next call connects anew.

    Arguments:
        where: as it may be shown, without a password.
    """

    where: str

    def leading(self) -> AbstractContextManager[bool]:
        """Be the one process that follows while the context lasts; yield whether that worked out."""

    def active(self) -> Version | None:
        """Return the version that is served."""

    def version(self, number: int) -> Version:
        """Return a version; raise NotFound when there is none of that number."""

    def cursors(self, version: Version) -> dict[int, Cursor]:
        """Return how far a version has come, by the mailboxes' ids."""

    def heads(self, covered: dict[int, Cursor]) -> list[Head]:
        """Return where the mailbox logs end, in the order of their ids; empty ones end at 0.

        Arguments:
            covered: where to look from.
        """

    def records(self, mailbox: int, first: int, last: int) -> list[Record]:
        """Return the records of a mailbox at positions `first` to `last`, in their order."""

    def apply(self, version: Version, steps: Sequence[Step], batch: Batch) -> bool:
        """Apply a batch, and tell whether the cursor and the version were still those that it began at."""

    def remove(self, version: Version, before: int, after: int) -> bool:
        """Remove messages that retention removed from the log: places from `before`, below `after`.

        Returns: whether the version was still as it was known.
        """

    def close(self) -> None:
        """Release what is held; closing twice is fine."""


def open_tables(store: str | Path) -> Tables:
    """Return the tables of a store's read models.

    Arguments:
        store: path of a SQLite store, or URL of a PostgreSQL one.
    """
    if is_url(str(store)):
        from postroom.projections.apply.postgres import PostgresTables

        return PostgresTables(str(store))
    from postroom.projections.apply.sqlite import SqliteTables

    return SqliteTables(str(store))
