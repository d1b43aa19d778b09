"""Defects that a drill puts into the runners of a store in JetStream, each of which it has to find."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from nats.errors import Error as NatsError

from postroom.adapters.jetstream.client import StreamClient


def omit_fence() -> None:
    """Append to logs without the sequence that the subject's last message must have."""
    publish = StreamClient._publish

    @wraps(publish)
    async def unfenced(
        self: StreamClient, subject: str, parts: Sequence[bytes], expected: int | None, deadline: float
    ) -> int:
        is_log = not self.stream.endswith("_STATE")  # else runners that start forget each other's mailboxes
        return await publish(self, subject, parts, None if is_log else expected, deadline)

    StreamClient._publish = unfenced  # type: ignore[method-assign]  # the defect


def believe_unknown_outcomes() -> None:
    """Take a publish without an answer for one that was stored."""
    publish = StreamClient._publish

    @wraps(publish)
    async def believing(
        self: StreamClient, subject: str, parts: Sequence[bytes], expected: int | None, deadline: float
    ) -> int:
        try:
            return await publish(self, subject, parts, expected, deadline)
        except (NatsError, OSError, TimeoutError):
            return (expected or 0) + len(parts)

    StreamClient._publish = believing  # type: ignore[method-assign]  # the defect


DEFECTS: dict[str, Callable[[], Any]] = {
    "fence-omitted": omit_fence,
    "unknown-outcome-believed": believe_unknown_outcomes,
}
