"""Base class of domain events."""

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
