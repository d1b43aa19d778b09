"""Defects that a drill puts into the runners of a store in JetStream, each of which it has to find."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from nats.errors import Error as NatsError

from postroom.adapters.jetstream.client import Outgoing, StreamClient


def omit_fence() -> None:
    """Append to logs without the sequence that the subject's last message must have."""
    publish = StreamClient._publish

    @wraps(publish)
    async def unfenced(self: StreamClient, messages: Sequence[Outgoing], deadline: float) -> int:
        if not self.stream.endswith("_STATE"):  # else runners that start forget each other's mailboxes
            messages = [each._replace(expected=None) for each in messages]
        return await publish(self, messages, deadline)

    StreamClient._publish = unfenced  # type: ignore[method-assign]  # the defect


def believe_unknown_outcomes() -> None:
    """Take a publish without an answer for one that was stored."""
    publish = StreamClient._publish

    @wraps(publish)
    async def believing(self: StreamClient, messages: Sequence[Outgoing], deadline: float) -> int:
        try:
            return await publish(self, messages, deadline)
        except (NatsError, OSError, TimeoutError):
            return (messages[0].expected or 0) + len(messages)

    StreamClient._publish = believing  # type: ignore[method-assign]  # the defect


DEFECTS: dict[str, Callable[[], Any]] = {
    "fence-omitted": omit_fence,
    "unknown-outcome-believed": believe_unknown_outcomes,
}
