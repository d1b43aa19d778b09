"""Port: the stream that dead letters lie in until somebody deals with them."""

from collections.abc import Sequence
from typing import Protocol

from postroom.application.ports.source import SourceMessage


class DeadLetterQueue(Protocol):
    """Look at dead letters and remove them; see `tests/conformance/dead_letter_queue.py`.

    Raises: Unavailable when the stream can't be reached, NotFound when there is none.
    """

    async def read(self, subject: str, limit: int) -> Sequence[SourceMessage]:
        """Return what lies at a subject, `*` and `>` allowed, in the order in which it came there.

        Nothing is settled: to read is not to take away.
        """

    async def remove(self, message: SourceMessage) -> None:
        """Remove a message for good; one that is gone already is fine."""
