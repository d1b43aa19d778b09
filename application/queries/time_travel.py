"""Time travel: the exact state of a mailbox at a past moment, folded from the log."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from postroom.application.mailbox.stored_snapshots import fold, fold_at
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLogReader
from postroom.application.query_results import Moment
from postroom.domain.arguments import check_int
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.state import Mailbox

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class StateAt:
    """Source of a mailbox's state at a moment or now.

    A position is exact to the record. A time is log time (ADR 0007): every record up to it is included, and
    messages are delayed or ready as of that time. Folding takes time proportional to the number of records
    since the newest snapshot before the moment; call it in a thread when running an event loop.
    """

    def __init__(
        self, log: EventLogReader, now: Callable[[], int], present: Callable[[], Mailbox] | None = None
    ) -> None:
        """Take the log.

        Arguments:
            now: returns the log time (µs) of the present state.
            present: returns the present state from memory; None folds the log.
        """
        self._log = log
        self._now = now
        self._present = present

    def __call__(self, at: Moment | None) -> tuple[Mailbox, int]:
        """Return the mailbox and the log time, in µs, that its timers are relative to.

        Raises: NotFound when retention removed the moment, InvalidRequest when it is in the future.
        """
        if at is None:
            mailbox = self._present() if self._present is not None else fold(self._log)
            return mailbox, self._now()
        if isinstance(at, datetime):
            time = to_us(at)
            self._check_not_future(time)
            return fold_at(self._log, self._log.position_before(time + 1)), time
        mailbox = fold_at(self._log, check_int("at", at))
        return mailbox, mailbox.at

    def _check_not_future(self, time: int) -> None:
        head = self._log.head()
        if head is not None and time <= head.at:
            return
        _, now = self(None)
        if time > now:
            raise InvalidRequest(f"{rfc3339(time)} is in the future; pass a time in the past.")


def to_us(time: datetime) -> int:
    """Return a time in µs since 1970 UTC.

    Raises: InvalidRequest when it has no UTC offset.
    """
    if time.tzinfo is None:
        raise InvalidRequest(f"The time {time.isoformat()} has no UTC offset; add its time zone.")
    return (time - _EPOCH) // timedelta(microseconds=1)
