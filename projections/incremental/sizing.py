"""Sizing: the ranges of the next batch, and the limit on its records."""

from collections.abc import Mapping, Sequence

from postroom.projections.incremental.cursors import Cursor, Head
from postroom.projections.log_extent import LogExtent, Range

MAX_EVENTS = 300_000
"""Maximum number of records in a batch; a message that is sent and settled within one is written once."""
INITIAL_EVENTS, MIN_EVENTS = 10_000, 1_000
"""The initial limit, and the lowest that it is reduced to."""
TARGET_SECONDS = 60.0
"""Duration of a batch that the limit aims at; progress becomes visible at its end."""
MAX_BYTES = 128 << 20
"""Envelopes of a batch: reading ends with the records that exceed it."""

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
            size: total size of its envelopes in bytes.
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
