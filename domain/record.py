"""Events, and records: events as they are read from a log, with their positions."""

from typing import NamedTuple

import msgspec


class Event(msgspec.Struct, frozen=True, gc=False, kw_only=False):
    """Base class of domain events, with their common fields.

    Arguments:
        stream: id of the aggregate (16 bytes): a message's, or the mailbox's own.
        version: the event's number in the aggregate's history, counted from 1 without gaps.
        at: log time of the event, microseconds since 1970 UTC; never decreases within a mailbox.
    """

    stream: bytes
    version: int
    at: int

    @property
    def type_name(self) -> str:
        """Return the name of the event, such as `MessageSent`."""
        return type(self).__name__


class StoredEvent(Event, frozen=True, gc=False):
    """An event of a reserved log, in the encoding of its writer.

    Arguments:
        topic: name of its type.
        state: its fields, encoded.
    """

    topic: str
    state: bytes

    @property
    def type_name(self) -> str:
        """Return the name of its type."""
        return self.topic


class Record(NamedTuple):
    """Event of a log, with the facts of its commit.

    Arguments:
        position: number in the mailbox's log: 1, 2, 3, ... without gaps.
        epoch: fencing number of the owner that wrote it.
        chain: chain hash of its commit.
        event: the event; a `MessageSent` has its headers, and its envelope unless that was not read.
        distance: how many positions before it the previous event of its message is; 0 for the first event of
            a message, and for events of other streams.
        envelope_hash: 32-byte BLAKE3 of the envelope, for `MessageSent` only.
    """

    position: int
    epoch: int
    chain: bytes
    event: Event
    distance: int = 0
    envelope_hash: bytes = b""

    @property
    def stream(self) -> bytes:
        """Return the id of the event's aggregate."""
        return self.event.stream

    @property
    def version(self) -> int:
        """Return the event's number in the history of its aggregate."""
        return self.event.version

    @property
    def at(self) -> int:
        """Return the log time of the event, µs."""
        return self.event.at

    @property
    def type(self) -> str:
        """Return the name of the event."""
        return self.event.type_name
