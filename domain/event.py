"""The base of every domain event: which aggregate it belongs to, its place there, and when it happened."""

import msgspec


class Event(msgspec.Struct, frozen=True, gc=False, kw_only=False):
    """Carry the three facts that every event has.

    Arguments:
        stream: id of the aggregate (16 bytes): a message's, or the mailbox's own.
        version: place in that aggregate's history, counted from 1 without gaps.
        at: log time of the event, microseconds since 1970 UTC; never decreases within a mailbox.
    """

    stream: bytes
    version: int
    at: int
