"""What happened to a mailbox, as far as the histories of its messages depend on it."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from postroom.application.mailbox.stored_snapshots import usable_snapshots
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.mailbox.events import MailboxEvent, OwnershipTaken, StoredSettings
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

        Events before the first `MessageSent`, and those of archived messages, are passed over.

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
