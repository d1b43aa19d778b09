"""Port: hints that there is something to do."""

from typing import Protocol


class Hints(Protocol):
    """Tell early that an outbox may have new events; hints may get lost or come for nothing."""

    async def wait(self) -> None:
        """Return at the next hint, or at once where one came since the last call."""

    async def close(self) -> None:
        """Stop listening; closing twice is fine."""
