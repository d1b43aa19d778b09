"""A log in memory whose commits can be altered, as by a person with access to a store's disk."""

from typing import Any

from postroom.adapters.memory.event_log import MemoryEventLog


class AlteredLog(MemoryEventLog):
    """An event log in memory that can be altered."""

    def alter(self, first: int, **fields: Any) -> None:
        """Replace fields of the commit that begins at position `first`."""
        index = self._index_of(first)
        self._commits[index] = self._commits[index]._replace(**fields)

    def remove(self, first: int) -> None:
        """Remove the commit that begins at position `first`."""
        del self._commits[self._index_of(first)]

    def _index_of(self, first: int) -> int:
        return [each.first for each in self._commits].index(first)
