"""The cut: how far each mailbox log is read, so that what is made of it shows one consistent moment."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

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


class Range(NamedTuple):
    """Positions `first` to `last` of one mailbox, both included."""

    cut: MailboxCut
    first: int
    last: int


def split(ranges: Iterable[Range], positions: int) -> Iterator[Range]:
    """Yield the same ranges in pieces of at most so many positions."""
    for cut, start, end in ranges:
        for first in range(start, end + 1, positions):
            yield Range(cut, first, min(first + positions - 1, end))


def encode_cuts(cuts: Iterable[MailboxCut]) -> str:
    """Return cuts as JSON."""
    return msgspec.json.encode(list(cuts)).decode()


def decode_cuts(text: str) -> list[MailboxCut]:
    """Return the cuts that `encode_cuts` wrote."""
    return msgspec.json.decode(text, type=list[MailboxCut])
