"""The log time of a mailbox now, for a process that does not own it."""

from postroom.application.mailbox.stored_snapshots import fold
from postroom.application.ports.clock import Clock
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.mailbox.events import OwnershipTaken
from postroom.domain.mailbox.log_clock import log_time
from postroom.domain.mailbox.state import Clock as ClockReading
from postroom.domain.names import mailbox_stream


class LogTime:
    """Source of a mailbox's current log time, by the last owner's reading of the clocks (svc-mailbox I-17).

    Arguments:
        log: the mailbox's log.
        clock: the clocks of this machine.
    """

    def __init__(self, log: EventLogReader, clock: Clock) -> None:
        self._log = log
        self._clock = clock

    def __call__(self) -> int:
        """Return the log time in µs; folds the log if retention removed the last owner's reading."""
        head, clock = self._log.head(), self._clock
        if head is None:
            return clock.wall()
        return log_time(
            self._last_reading(), head.at, wall=clock.wall(), boot=clock.boot(), uptime=clock.uptime()
        )

    def _last_reading(self) -> ClockReading | None:
        for record in reversed(self._log.read_stream(mailbox_stream(self._log.mailbox))):
            event = record.event
            if isinstance(event, OwnershipTaken):
                return ClockReading(event.boot, event.uptime, event.at)
        return fold(self._log).clock
