"""Port: the append-only list of the records of erasures."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol


class ErasureLog(Protocol):
    """Lines of text, beside the key store; calls block.

    All methods raise Unavailable when the lines can't be read or written.
    """

    def read(self) -> Sequence[bytes]:
        """Return the lines, oldest first; none before the first `append`."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep other writers out while the context lasts; raises Unavailable when there is one."""

    def append(self, line: bytes) -> None:
        """Append a line, which is durable when this returns; the caller holds the lock."""
