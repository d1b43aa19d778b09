"""Histories of messages, while a log is read for them."""

from collections.abc import Callable, Collection

from postroom.application.mailbox.codec import stream_ids
from postroom.domain.commit import Commit
from postroom.domain.errors import BrokenLog
from postroom.domain.event import Event
from postroom.domain.message import MessageAcked, MessageExpired, MessageSent
from postroom.domain.record import Record

FEW = 4
"""Streams that are searched for in the bytes of a commit; for more, decoding their ids is faster."""


class History:
    """The records of a message, as far as they were read."""

    def __init__(
        self, sent: Record, records: list[Record], is_at_rest: Callable[[Record, Event], bool]
    ) -> None:
        """Initialise with its first record, all that are known, and whether later ones are near the first.

        Arguments:
            records: extended by those that are added.
            is_at_rest: called with the first and the latest record, returns whether the index has what
                follows far from the first.
        """
        self.stream = sent.stream
        self._sent = sent
        self._records = records
        self._check = is_at_rest
        self._is_complete = False
        self._is_at_rest = False
        self._note(records[-1])

    @property
    def position(self) -> int:
        """Return the position of the latest record."""
        return self._records[-1].position

    def ends_before(self, position: int) -> bool:
        """Return whether no record can be added whose commit begins after a distance from the first.

        Arguments:
            position: the beginning of the commit less that distance.
        """
        return self._is_complete or (self._is_at_rest and position > self._sent.position)

    def add(self, record: Record) -> None:
        """Add the next record of the message, unless it is known."""
        if self._is_complete or record.position <= self.position:
            return
        if isinstance(record.event, MessageSent):
            self._is_complete = True  # sent again, after retention had removed the message from the log
            return
        self._records.append(record)
        self._note(record)

    def _note(self, latest: Record) -> None:
        self._is_at_rest = self._check(self._sent, latest.event)
        self._is_complete = isinstance(latest.event, MessageAcked | MessageExpired)


def may_hold(commit: Commit, streams: Collection[bytes]) -> bool:
    """Return whether a commit may have events of one of these streams."""
    if len(streams) > FEW:
        try:
            return not set(streams).isdisjoint(stream_ids(commit))
        except BrokenLog:
            pass  # those whose ids are not in its bytes need not know
    return any(stream in commit.events for stream in streams)  # ids stand in a commit as they are
