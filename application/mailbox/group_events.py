"""The events of a group of commands, and what their commits say about them."""

from postroom.application.mailbox.records import is_indexed
from postroom.domain.commit import IndexEntry, LastEvent
from postroom.domain.event import Event
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MessageSent

MAX_ENVELOPE_BYTES = 16 << 20
"""Envelopes of one commit, in bytes, unless a single one is larger."""


class CommitEvents:
    """The events of one commit, in the order in which they were applied.

    Arguments:
        distances: see `Record.distance`.
        entries, last_events: see `Commit`.
    """

    __slots__ = ("distances", "entries", "envelope_bytes", "events", "last_events")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.distances: list[int] = []
        self.entries: list[IndexEntry] = []
        self.last_events: list[LastEvent] = []
        self.envelope_bytes = 0


class GroupEvents:
    """The events of a group: usually of one commit, of more if their envelopes are large."""

    __slots__ = ("commits",)

    def __init__(self) -> None:
        self.commits: list[CommitEvents] = []

    def add(self, event: Event, mailbox: Mailbox) -> None:
        """Add the next event, before it is applied to the mailbox."""
        if not self.commits:
            self.commits.append(CommitEvents())
        commit, position = self.commits[-1], mailbox.position + 1
        if type(event) is MessageSent:
            size = len(event.envelope)
            if commit.events and commit.envelope_bytes + size > MAX_ENVELOPE_BYTES:
                commit = CommitEvents()
                self.commits.append(commit)
            commit.envelope_bytes += size
        message = mailbox.messages.get(event.stream) if event.version > 1 else None
        if message is None:
            commit.distances.append(0)
            commit.entries.append(IndexEntry(event.stream, event.version, position))
        else:
            commit.distances.append(position - message.last)
            if is_indexed(event, position - message.position):
                commit.last_events.append(LastEvent(event.stream, message.position, position))
        commit.events.append(event)

    def sent(self, first: int) -> dict[int, MessageSent]:
        """Return the messages that the group sent, by position.

        Arguments:
            first: position of its first event.
        """
        events = (event for commit in self.commits for event in commit.events)
        return {p: event for p, event in enumerate(events, first) if isinstance(event, MessageSent)}
