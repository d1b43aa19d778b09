"""The cut: how far a rebuild reads each mailbox log, so that its read models show one consistent moment."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import msgspec

from postroom.domain.errors import NotFound, Unavailable

PLACES = 1 << 40
"""A log row's `place` is its mailbox's number times this, plus its position."""


class MailboxCut(msgspec.Struct, frozen=True):
    """Say which part of one mailbox log is read.

    Arguments:
        id, name: of the mailbox.
        first, last: positions, both included; retention may have removed those before `first`.
        at: log time in µs of the record at `last`; what "now" means to the read models.
    """

    id: int
    name: str
    first: int
    last: int
    at: int

    def place(self, position: int) -> int:
        """Return the log's key for a position of this mailbox."""
        return self.id * PLACES + position

    @property
    def events(self) -> int:
        """Return how many records lie in the cut, had retention removed none since."""
        return self.last - self.first + 1


def take_cuts(store: str) -> list[MailboxCut]:
    """Return the present extent of every mailbox log of a SQLite store; empty logs are left out.

    Raises: NotFound when there is no store at that path, Unavailable when the file can't be read as one.
    """
    if not Path(store).is_file():
        raise NotFound(f"There is no store at {store}; name one with --store or POSTROOM_STORE.")
    try:
        with closing(sqlite3.connect(read_uri(store), uri=True)) as connection:
            names = connection.execute("SELECT id, name FROM mailbox_names ORDER BY id").fetchall()
            return [cut for id_, name in names if (cut := _cut(connection, id_, name)) is not None]
    except sqlite3.Error as error:
        raise Unavailable(
            f"The store {store} can't be read: {error}. Check the path and its permissions."
        ) from error


def read_uri(store: str) -> str:
    """Return the address under which a SQLite file is opened for reading only."""
    return f"{Path(store).absolute().as_uri()}?mode=ro"


def encode_cuts(cuts: Iterable[MailboxCut]) -> str:
    """Return cuts as JSON."""
    return msgspec.json.encode(list(cuts)).decode()


def decode_cuts(text: str) -> list[MailboxCut]:
    """Return the cuts that `encode_cuts` wrote."""
    return msgspec.json.decode(text, type=list[MailboxCut])


def _cut(connection: sqlite3.Connection, id_: int, name: str) -> MailboxCut | None:
    bounds = (id_ * PLACES, (id_ + 1) * PLACES)
    end = "SELECT place, at FROM log WHERE place > ? AND place < ? ORDER BY place {} LIMIT 1"
    first = connection.execute(end.format("ASC"), bounds).fetchone()
    if first is None:
        return None
    last, at = connection.execute(end.format("DESC"), bounds).fetchone()
    return MailboxCut(id_, name, first[0] % PLACES, last % PLACES, at)
