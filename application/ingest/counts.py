"""Counts of an ingester."""

import msgspec


class IngestCounts(msgspec.Struct):
    """Numbers of messages by outcome; a redelivered message is counted again.

    Arguments:
        received: fetched from the source.
        stored: new to the log.
        duplicates: already in the log.
        skipped: malformed, logged and acknowledged.
        dead_lettered: published to the dead-letter subject because they could not be stored.
        deferred: could not be stored; the source redelivers them later.
        retries: attempts to store a batch after the first.
    """

    received: int = 0
    stored: int = 0
    duplicates: int = 0
    skipped: int = 0
    dead_lettered: int = 0
    deferred: int = 0
    retries: int = 0
