"""Batches of messages that fit into one request to a server."""

from collections.abc import Iterator, Sequence

from postroom.application.messages import NewMessage

MAX_ITEMS = 1_000
"""Maximum number of messages or receipts in one request."""
OVERHEAD_BYTES = 512
"""Estimated size of a message in a batch besides its payload and attributes."""


def split_batches(messages: Sequence[NewMessage], max_bytes: int) -> Iterator[list[NewMessage]]:
    """Yield messages in batches of up to `max_bytes`, or of one message."""
    batch: list[NewMessage] = []
    size = 0
    for message in messages:
        added = OVERHEAD_BYTES + len(message.payload) + sum(len(k) + len(v) for k, v in message.attrs.items())
        if batch and (size + added > max_bytes or len(batch) == MAX_ITEMS):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += added
    if batch:
        yield batch
