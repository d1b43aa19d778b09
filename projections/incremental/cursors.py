"""Cursors: the positions that a version of the read models has reached, and the ends of the logs."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from postroom.domain.errors import BrokenLog
from postroom.domain.search import BodyRules
from postroom.projections.log_extent import LogExtent


class Version(NamedTuple):
    """A version of the read models.

    Arguments:
        models: by projection, the version whose table contains it.
        status: `active`, or `building` until it becomes active.
        bodies: topics whose bodies are searched for words.
        archive: folder of the log archive that the version includes, or None.
    """

    number: int
    status: str
    models: dict[str, int]
    bodies: BodyRules
    archive: str | None


class Cursor(NamedTuple):
    """The last record applied from a mailbox: its position, and its log time `at` in µs.

    Arguments:
        chain: chain hash, in hex, of the commit with the record; empty if unknown.
        mailbox: name of the mailbox.
    """

    position: int
    at: int
    chain: str = ""
    mailbox: str = ""


START = Cursor(0, 0)
"""The cursor before the first record."""


class Head(NamedTuple):
    """The first and last position of a mailbox log; retention removed the records before `first`.

    Arguments:
        chain, at: chain hash in hex and log time (µs) of the commit at the position of a cursor; empty and 0
            if the log has none there.
    """

    id: int
    name: str
    first: int
    last: int
    chain: str = ""
    at: int = 0


def find_difference(cursor: Cursor, head: Head | None) -> str | None:
    """Return how a log differs from the one that a cursor was set in, or None.

    A commit that retention removed can't be compared. A cursor of an earlier release, which has no chain
    hash, is compared by log time.

    Arguments:
        head: of the mailbox with the cursor's id, at its position; None if the store has no such mailbox.
    """
    if cursor.position == 0:
        return None
    if head is None:
        return "the store has no such log now"
    if cursor.mailbox != head.name:
        return f"that log is one of {head.name} now"
    if head.first > cursor.position:
        return None
    if head.last < cursor.position:
        return f"its log ends at position {head.last} now"
    is_same = head.chain == cursor.chain if cursor.chain else head.chain and head.at == cursor.at
    return None if is_same else "its log has another commit there now"


def check_cursors(
    cursors: Mapping[int, Cursor], heads: Sequence[Head], where: str, command: str
) -> dict[int, Cursor]:
    """Check that no log was replaced, cut or renamed since its cursor was set.

    Arguments:
        cursors, heads: cursors by mailbox id, and the heads at their positions.
        where, command: of the read models with these cursors, and the command that rebuilds them.

    Returns: the cursors whose chain hash was unknown, with the hash that the log has there.
    Raises: BrokenLog for a log that differs.
    """
    ends = {head.id: head for head in heads}
    for id_, cursor in cursors.items():
        difference = find_difference(cursor, ends.get(id_))
        if difference is not None:
            raise BrokenLog(
                f"The read models {where} include position {cursor.position} of mailbox {cursor.mailbox}, "
                f"but {difference}: it was replaced or cut. Restore the store, or rebuild them with "
                f"`{command}`.",
                cursor.position,
            )
    return {
        id_: cursor._replace(chain=ends[id_].chain)
        for id_, cursor in cursors.items()
        if cursor.position and not cursor.chain and ends[id_].chain
    }


class Step(NamedTuple):
    """The advance of one mailbox from the cursor `start` to the end of `extent`."""

    start: Cursor
    extent: LogExtent

    @property
    def end(self) -> Cursor:
        """Return the cursor after the step."""
        return Cursor(self.extent.last, self.extent.at, self.extent.chain, self.extent.name)
