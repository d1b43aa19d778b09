"""Port: a stream of dead letters."""

from collections.abc import Sequence
from typing import Protocol

from postroom.application.ports.source import SourceMessage


class DeadLetterQueue(Protocol):
    """A stream of dead letters; every adapter passes `tests/conformance/dead_letter_queue.py`.

    Raises: Unavailable when the stream can't be reached, NotFound when it does not exist.
    """

    async def read(self, subject: str, limit: int) -> Sequence[SourceMessage]:
        """Return the oldest messages at a subject, `*` and `>` allowed, without settling them."""

    async def find(self, subject: str, sequence: str) -> SourceMessage | None:
        """Return a message by its sequence in the stream, or None when `subject` has no such message."""

    async def remove(self, message: SourceMessage) -> None:
        """Remove a message permanently; removing it twice is fine."""
