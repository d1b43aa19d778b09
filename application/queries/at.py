"""Moments in a mailbox's past, and the mailbox as it stood then: time travel, folded from the log, exact."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from postroom.application.fold import fold, fold_at
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLog
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.state import Mailbox

Moment = int | datetime
"""A log position, or a time: the mailbox after that record, or after all records up to that log time."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class StateAt:
    """Return a mailbox as it stood at a moment, or as it stands now.

    A position in the log is exact. A time is log time (ADR 0007): every record up to it counts, and what was
    delayed is what was still delayed at that very time. Folding takes time in proportion to the records since
    the newest snapshot before the moment; beside an event loop, call it in a thread.
    """

    def __init__(
        self, log: EventLog, now: Callable[[], int], present: Callable[[], Mailbox] | None = None
    ) -> None:
        """Take the log, the log time now in µs, and the present state where it is in memory already."""
        self._log = log
        self._now = now
        self._present = present

    def __call__(self, at: Moment | None) -> tuple[Mailbox, int]:
        """Return the mailbox, and the log time in µs as of which it is to be read.

        Raises: NotFound where the log knows nothing of that moment, InvalidRequest for one in the future.
        """
        if at is None:
            return (self._present() if self._present is not None else fold(self._log)), self._now()
        if isinstance(at, datetime):
            time = to_us(at)
            return fold_at(self._log, self._position_at(time)), time
        mailbox = fold_at(self._log, at)
        return mailbox, mailbox.at

    def _position_at(self, time: int) -> int:
        head = self._log.head()
        if time > max(self._now(), head.at if head is not None else 0):
            raise InvalidRequest(f"{rfc3339(time)} is in the future; name a time that has passed.")
        return self._log.position_before(time + 1)


def to_us(time: datetime) -> int:
    """Return a time in µs since 1970 UTC.

    Raises: InvalidRequest when it does not say its offset.
    """
    if time.tzinfo is None:
        raise InvalidRequest(f"The time {time.isoformat()} says no offset from UTC; add its time zone.")
    return (time - _EPOCH) // timedelta(microseconds=1)
