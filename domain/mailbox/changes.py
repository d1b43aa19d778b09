"""What changed in a mailbox since it was last collected for a snapshot."""


class Changes:
    """Messages that changed since they were collected.

    Messages sent after `through` are not tracked one by one: they are the last ones of the mailbox. So a
    message that settles soon after it was sent costs a comparison.

    Arguments:
        through: position up to which messages that are sent have been collected.
        changed: streams of those of them that changed since, and are unsettled.
        settled: streams of those of them that settled since.
    """

    __slots__ = ("changed", "settled", "through")

    def __init__(self, through: int = 0) -> None:
        self.through = through
        self.changed: set[bytes] = set()
        self.settled: set[bytes] = set()

    def settle(self, stream: bytes) -> None:
        """Note that one of the messages up to `through` is settled."""
        self.changed.discard(stream)
        self.settled.add(stream)

    def take(self, through: int) -> tuple[list[bytes], list[bytes]]:
        """Return the streams that changed and those that settled, and restart at position `through`."""
        taken = list(self.changed), list(self.settled)
        self.through = through
        self.changed.clear()
        self.settled.clear()
        return taken
