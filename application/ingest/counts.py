"""What an ingester did so far."""

import msgspec


class Ingested(msgspec.Struct):
    """Count messages by what became of them; a message that comes again is counted again.

    Arguments:
        received: taken from the source.
        stored: new to the log.
        duplicates: known to the log already.
        skipped: can't be stored, and dropped with a warning.
        dead_lettered: can't be stored, and published to the dead-letter subject.
        set_aside: can't be stored now, and left to the source, which delivers them again later.
        retries: times that storing a batch was tried again.
    """

    received: int = 0
    stored: int = 0
    duplicates: int = 0
    skipped: int = 0
    dead_lettered: int = 0
    set_aside: int = 0
    retries: int = 0
