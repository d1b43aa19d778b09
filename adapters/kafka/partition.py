"""An assigned partition: its unsettled messages, and the offset to commit."""

UNKNOWN = -1


class Partition:
    """An assignment of a partition to this member of the group.

    Arguments:
        generation: number of the assignment; messages of an earlier one are not settled in it.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.position = UNKNOWN
        """Offset after the last received message."""
        self.committed = UNKNOWN
        self.is_at_end = False
        self.is_revoked = False
        self._in_progress: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._in_progress)

    def add(self, offset: int) -> bool:
        """Add a received message; return False if it is already unsettled."""
        is_rewind, is_new = offset < self.position, offset not in self._in_progress
        self._in_progress.setdefault(offset, False)
        if is_rewind:  # the topic was recreated or truncated
            self._in_progress = dict(sorted(self._in_progress.items()))
        self.position, self.is_at_end = offset + 1, False
        return is_new

    def reach_end(self, offset: int) -> None:
        """Record the end of the partition, for example after messages of an aborted transaction."""
        self.position, self.is_at_end = max(self.position, offset), True

    def mark(self, offset: int, *, is_in_progress: bool) -> None:
        """Mark an unsettled message as in progress, or as waiting for redelivery."""
        if offset in self._in_progress:
            self._in_progress[offset] = is_in_progress

    def settle(self, offset: int) -> None:
        """Remove a stored message."""
        self._in_progress.pop(offset, None)

    @property
    def is_idle(self) -> bool:
        """Return whether no message is in progress."""
        return not any(self._in_progress.values())

    @property
    def offset_to_commit(self) -> int:
        """Return the offset before which all messages are stored."""
        return next(iter(self._in_progress), self.position)

    @property
    def has_commit(self) -> bool:
        """Return whether there is a new offset to commit."""
        return self.offset_to_commit not in (UNKNOWN, self.committed)
