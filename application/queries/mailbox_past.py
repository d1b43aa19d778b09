"""The state of a mailbox at a past moment, and the events of a mailbox that change its messages."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from postroom.application.mailbox.stored_snapshots import fold, fold_at, usable_snapshots
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import Clock, EventLogReader
from postroom.application.query_results import Moment
from postroom.domain.arguments import check_int
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.events import Clock as ClockReading
from postroom.domain.mailbox.events import MailboxEvent, OwnershipTaken, StoredSettings
from postroom.domain.mailbox.ownership import log_time
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MessageEvent, MessageSent
from postroom.domain.message_history import MessageHistory, begin, follow, take_over
from postroom.domain.names import mailbox_stream
from postroom.domain.policy import TopicPolicy
from postroom.domain.settings import MailboxSettings, resolve_policy


class Change(NamedTuple):
    """A change of the mailbox at a position, and its settings from then on."""

    position: int
    event: MailboxEvent
    settings: StoredSettings

    def policy(self, topic: str) -> TopicPolicy:
        """Return the policy of a topic from then on."""
        return resolve_policy(self.settings.settings, topic)


class MailboxPast(NamedTuple):
    """Changes of a mailbox's ownership and of its settings.

    Arguments:
        last, end: position and log time (µs) of the last record that counts.
        settings: before the first change; of the oldest snapshot where retention removed earlier ones.
        changes: in order.
    """

    last: int
    end: int
    settings: StoredSettings
    changes: list[Change]

    def settings_before(self, position: int) -> StoredSettings:
        """Return the settings in force before a position."""
        index = bisect_left(self.changes, position, key=_position)
        return self.changes[index - 1].settings if index else self.settings

    def histories(self, events: Iterable[tuple[int, int, MessageEvent]]) -> Iterator[MessageHistory]:
        """Yield the history of a message; one for each time that its id was sent.

        Events before the first `MessageSent`, and events of archived messages, are skipped.

        Arguments:
            events: position, epoch and event, in order.
        """
        history: MessageHistory | None = None
        changes: Iterator[Change] = iter(())
        policy: TopicPolicy | None = None
        change = None
        for position, epoch, event in events:
            if position > self.last:
                break
            if isinstance(event, MessageSent):
                if history is not None:
                    yield history
                policy = resolve_policy(self.settings_before(position).settings, event.topic)
                history = begin(event, position, epoch, policy) if event.due is not None else None
                changes = iter(self.changes[bisect_left(self.changes, position, key=_position) :])
                change = next(changes, None)
            elif history is not None:
                while change is not None and change.position < position:
                    policy = _apply(history, change)
                    change = next(changes, None)
                follow(history, event, position, epoch, policy)
                if history.is_settled:
                    yield history
                    history = None
        if history is not None:
            while change is not None:
                _apply(history, change)
                change = next(changes, None)
            yield history


def read_mailbox_past(log: EventLogReader, last: int, end: int) -> MailboxPast:
    """Return the history of a mailbox.

    Arguments:
        last, end: position and log time (µs) of the last record that counts.

    Raises: BrokenLog when the log contains a commit that this version can't read.
    """
    first = current = first_settings(log)
    changes = []
    for record in log.read_stream(mailbox_stream(log.mailbox)):
        if isinstance(event := record.event, MailboxEvent) and record.position <= last:
            current = current.after(event)
            changes.append(Change(record.position, event, current))
    return MailboxPast(last, end, first, changes)


def read_settings(log: EventLogReader) -> MailboxSettings:
    """Return the current settings of a mailbox, from its own events alone."""
    current = first_settings(log)
    for record in log.read_stream(mailbox_stream(log.mailbox)):
        current = current.after(record.event)
    return current.settings


def first_settings(log: EventLogReader) -> StoredSettings:
    """Return the settings before the first record of a log, as far as retention left them in a snapshot."""
    if (log.first_position() or 1) == 1:
        return StoredSettings()
    oldest = min(usable_snapshots(log), key=lambda snapshot: snapshot.position, default=None)
    return StoredSettings() if oldest is None else oldest.settings


def _apply(history: MessageHistory, change: Change) -> TopicPolicy:
    """Apply a change of the mailbox to a history; return its topic's policy from then on."""
    if isinstance(change.event, OwnershipTaken):
        take_over(history, change.event, change.position)
    return change.policy(history.topic)


def _position(change: Change) -> int:
    return change.position


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

    Raises: InvalidRequest when it has no UTC offset, or is not within the years 1 to 9999 in UTC.
    """
    if time.utcoffset() is None:
        raise InvalidRequest(f"The time {time.isoformat()} has no UTC offset; add its time zone.")
    try:
        time = time.astimezone(UTC)
    except OverflowError:
        raise InvalidRequest(
            f"The time {time.isoformat()} is not within the years 1 to 9999 in UTC."
        ) from None
    return (time - _EPOCH) // timedelta(microseconds=1)


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


HistoryItem = tuple[int, int, MessageEvent | OwnershipTaken, TopicPolicy | None]


def with_policies(
    topic: str, items: Iterator[tuple[int, int, MessageEvent | MailboxEvent]], settings: StoredSettings
) -> Iterator[HistoryItem]:
    """Yield the events of a message and the take-overs of its mailbox, each with the topic's policy then."""
    policy = resolve_policy(settings.settings, topic)
    for position, epoch, event in items:
        if isinstance(event, MailboxEvent):
            settings = settings.after(event)
            policy = resolve_policy(settings.settings, topic)
        if isinstance(event, MessageEvent | OwnershipTaken):
            yield position, epoch, event, policy
