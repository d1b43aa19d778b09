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
