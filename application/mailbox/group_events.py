"""The events of a group of commands, and what their commits say about them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

from postroom.application.mailbox.records import is_indexed
from postroom.domain.commit import LastEvent
from postroom.domain.event import Event
from postroom.domain.message import Message, MessageSent

MAX_ENVELOPE_BYTES = 16 << 20
"""Envelopes of one commit, in bytes, unless a single one is larger."""


class CommitEvents:
    """The events of one commit, in the order in which they were applied.

    Arguments:
        distances: see `Record.distance`.
        last_events: see `Commit`.
    """

    __slots__ = ("distances", "envelope_bytes", "events", "last_events")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.distances: list[int] = []
        self.last_events: list[LastEvent] = []
        self.envelope_bytes = 0


class GroupEvents:
    """The events of a group: usually of one commit, of more if their envelopes are large.

    Arguments:
        acked: number of messages acked, by topic.
    """

    __slots__ = ("_last", "acked", "commits")

    def __init__(self) -> None:
        self._last = CommitEvents()
        self.commits = [self._last]
        self.acked: Counter[str] = Counter()

    def add_sent(self, event: MessageSent) -> None:
        """Add the first event of a message."""
        commit, size = self._last, len(event.envelope)
        if commit.envelope_bytes + size > MAX_ENVELOPE_BYTES and commit.events:
            commit = self._last = CommitEvents()
            self.commits.append(commit)
        commit.envelope_bytes += size
        commit.events.append(event)
        commit.distances.append(0)

    def add(self, event: Event, position: int, message: Message | None) -> None:
        """Add an event of the mailbox or of a message, before it is applied to it.

        Arguments:
            position: of the event.
        """
        commit = self._last
        commit.events.append(event)
        if message is None:
            commit.distances.append(0)
            return
        commit.distances.append(position - message.last)
        if is_indexed(event, position - message.position):
            commit.last_events.append(LastEvent(event.stream, message.position, position))

    def add_batch(self, events: Sequence[Event], first: int, messages: Mapping[bytes, Message]) -> None:
        """Add events of one type, before they are applied to the messages; see `add_sent` and `add`.

        Arguments:
            first: position of the first event.
        """
        if type(events[0]) is MessageSent:
            sizes = sum([len(cast("MessageSent", event).envelope) for event in events])
            if self._last.envelope_bytes + sizes > MAX_ENVELOPE_BYTES:
                for event in events:
                    self.add_sent(event)  # type: ignore[arg-type]  # all sent
                return
            self._last.envelope_bytes += sizes
            self._last.distances += [0] * len(events)
        else:
            changed = [messages[event.stream] for event in events]
            positions = range(first, first + len(events))
            self._last.distances += [p - message.last for p, message in zip(positions, changed, strict=True)]
            self._last.last_events += [
                LastEvent(message.stream, message.position, position)
                for position, message, event in zip(positions, changed, events, strict=True)
                if is_indexed(event, position - message.position)
            ]
        self._last.events += events

    def sent(self, first: int) -> dict[int, MessageSent]:
        """Return the messages that the group sent, by position.

        Arguments:
            first: position of its first event.
        """
        events = (event for commit in self.commits for event in commit.events)
        return {p: event for p, event in enumerate(events, first) if isinstance(event, MessageSent)}
