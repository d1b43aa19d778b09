"""An assigned partition: which of its messages are unsettled, and which offset may be committed."""

UNKNOWN = -1


class Partition:
    """An assignment of a partition to this member of the group.

    Arguments:
        generation: number of this assignment; a message of an earlier one is not settled by it.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.position = UNKNOWN
        """Offset after the last message that arrived."""
        self.committed = UNKNOWN
        self.is_at_end = False
        self.is_revoked = False
        self._in_progress: dict[int, bool] = {}

    def __len__(self) -> int:
        return len(self._in_progress)

    def add(self, offset: int) -> bool:
        """Add a message that arrived, and return whether it was not already unsettled."""
        is_rewind, is_new = offset < self.position, offset not in self._in_progress
        self._in_progress.setdefault(offset, False)
        if is_rewind:  # the topic was created again, or truncated
            self._in_progress = dict(sorted(self._in_progress.items()))
        self.position, self.is_at_end = offset + 1, False
        return is_new

    def reach_end(self, offset: int) -> None:
        """Note that no message follows, for example after messages of an aborted transaction."""
        self.position, self.is_at_end = max(self.position, offset), True

    def mark(self, offset: int, *, is_in_progress: bool) -> None:
        """Mark an unsettled message as in progress, or as waiting."""
        if offset in self._in_progress:
            self._in_progress[offset] = is_in_progress

    def settle(self, offset: int) -> None:
        """Remove a message that is stored."""
        self._in_progress.pop(offset, None)

    @property
    def is_idle(self) -> bool:
        """Return whether no message is in progress."""
        return not any(self._in_progress.values())

    @property
    def offset_to_commit(self) -> int:
        """Return the offset before which every message is stored."""
        return next(iter(self._in_progress), self.position)

    @property
    def has_commit(self) -> bool:
        """Return whether an offset is to be committed."""
        return self.offset_to_commit not in (UNKNOWN, self.committed)
