"""Cursors of a version of the read models, the ends of the logs, and the ranges of the next batch."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from postroom.domain.errors import BrokenLog
from postroom.domain.search import BodyRules
from postroom.projections.log_reader import LogExtent, Range


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


MAX_EVENTS = 300_000
"""Maximum number of records in a batch; a message that is sent and settled within one is written once."""
INITIAL_EVENTS, MIN_EVENTS = 10_000, 1_000
"""The initial limit, and the lowest that it is reduced to."""
TARGET_SECONDS = 60.0
"""Duration of a batch that the limit aims at; progress becomes visible at its end."""
MAX_BYTES = 128 << 20
"""Size of records after which a batch reads no more."""

Positions = Mapping[str, int]
"""The last position to cover, by mailbox."""


class BatchSize:
    """The limit on the records of a batch, adapted to the duration and size of batches.

    Arguments:
        max_events: highest limit.
    """

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self.events = min(max_events, INITIAL_EVENTS)
        self.events_ahead = max_events
        """The limit for a batch that is folded ahead; the highest until the first batch has been timed."""

    def adapt(self, events: int, size: int, seconds: float) -> None:
        """Set the limit to what keeps to `TARGET_SECONDS` and `MAX_BYTES` at the rate of a batch.

        A batch that was not full only lowers the limit.

        Arguments:
            events: number of records in the batch.
            size: total size of its records in bytes.
            seconds: its duration.
        """
        share = max(seconds / TARGET_SECONDS, size / MAX_BYTES, 1e-6)
        if share > 1 or events >= self.events:
            self.events = min(self._max_events, max(MIN_EVENTS, int(events / share)))
        self.events_ahead = self.events

    def allows(self, events: int) -> bool:
        """Return whether a batch that was folded ahead is applied: it may be twice as large as the limit."""
        return events <= 2 * self.events


def next_ranges(
    heads: Sequence[Head], cursors: Mapping[int, Cursor], limit: int, through: Positions | None = None
) -> list[Range]:
    """Return the ranges to read next, with the limit divided among the mailboxes that are behind.

    Arguments:
        cursors: cursors by mailbox id.
        limit: maximum number of records.
        through: last position to cover, by mailbox; other mailboxes are left out. None for all records.
    """
    pending = []
    for head in heads:
        last = head.last if through is None else min(head.last, through.get(head.name, 0))
        position = cursors[head.id].position if head.id in cursors else 0
        if last > position:
            pending.append((last - position, head, position))
    ranges = []
    for number, (behind, head, position) in enumerate(sorted(pending)):
        share = min(behind, max(1, limit // (len(pending) - number)))
        extent = LogExtent(head.id, head.name, position + 1, position + share, 0)
        ranges.append(Range(extent, position + 1, position + share))
        limit -= share
        if limit <= 0:
            break
    return sorted(ranges, key=lambda range_: range_.extent.id)


def through_record(ranges: Sequence[Range], mailbox: str, position: int) -> list[Range]:
    """Return the ranges up to a record of one of them.

    Arguments:
        mailbox, position: of the record, in the last range that is returned.
    """
    names = [each.extent.name for each in ranges]
    *earlier, (extent, first, _) = ranges[: names.index(mailbox) + 1]
    return [*earlier, Range(extent, first, position)]
