"""Port: hints that an outbox has new events."""

from typing import Protocol


class Hints(Protocol):
    """Best-effort wake-ups of a relay: they may be lost or spurious."""

    async def wait(self) -> None:
        """Return at the next hint, or at once if there was one since the last call."""

    async def close(self) -> None:
        """Stop listening; closing twice is fine."""
