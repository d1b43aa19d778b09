"""The events of a group of commands, and what their commits say about them."""

from collections import Counter
from collections.abc import Sequence

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
        sent_by_topic, delivered, nacked: the same of those sent, delivered and nacked.
    """

    __slots__ = ("_last", "acked", "commits", "delivered", "nacked", "sent_by_topic")

    def __init__(self) -> None:
        self._last = CommitEvents()
        self.commits = [self._last]
        self.acked: Counter[str] = Counter()
        self.sent_by_topic: Counter[str] = Counter()
        self.delivered: Counter[str] = Counter()
        self.nacked: Counter[str] = Counter()

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

    def add_all_sent(self, events: Sequence[MessageSent]) -> None:
        """Add the first events of messages; see `add_sent`."""
        commit, size = self._last, sum([len(event.envelope) for event in events])
        if commit.envelope_bytes + size > MAX_ENVELOPE_BYTES:
            for event in events:
                self.add_sent(event)
            return
        commit.envelope_bytes += size
        commit.events += events
        commit.distances += [0] * len(events)

    def add_all(self, events: Sequence[Event], first: int, messages: Sequence[Message]) -> None:
        """Add events of one type, before they are applied to their messages; see `add`.

        Arguments:
            first: position of the first event.
        """
        commit, positions = self._last, range(first, first + len(events))
        commit.events += events
        commit.distances += [p - message.last for p, message in zip(positions, messages, strict=True)]
        farthest = positions[-1] - min([message.position for message in messages])
        if is_indexed(events[0], farthest):
            commit.last_events += [
                LastEvent(message.stream, message.position, position)
                for position, message in zip(positions, messages, strict=True)
                if is_indexed(events[0], position - message.position)
            ]

    def sent(self, first: int) -> dict[int, MessageSent]:
        """Return the messages that the group sent, by position.

        Arguments:
            first: position of its first event.
        """
        events = (event for commit in self.commits for event in commit.events)
        return {p: event for p, event in enumerate(events, first) if isinstance(event, MessageSent)}
