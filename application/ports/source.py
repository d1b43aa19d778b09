"""Port: a source of messages (RFC-037 message source slot; SDS-047 PORT-047-004 `JetStreamConsumer`)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec


class Headers(Mapping[str, str]):
    """Headers of a message; lookup returns the first value of a repeated header.

    Arguments:
        pairs: names and values in their order.
    """

    __slots__ = ("_first", "pairs")

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.pairs = pairs
        self._first = dict(reversed(pairs))

    def __getitem__(self, name: str) -> str:
        return self._first[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for name, _ in self.pairs))

    def __len__(self) -> int:
        return len(self._first)

    def __repr__(self) -> str:
        return f"Headers({self.pairs!r})"


class SourceMessage(msgspec.Struct, frozen=True, gc=False):
    """One delivery of a message by a source.

    Arguments:
        delivered: number of this delivery of the message, counted from 1.
        sequence: position of the message in the source, for people and logs.
        token: identifies this delivery to the source, which settles it by the token.
        sticky_key: key whose messages keep their order; None if the source has none.
        framing: number of bytes before the envelope, such as the id of a schema.
        is_tombstone: whether it only says that earlier messages of its key were deleted, without an envelope.
    """

    subject: str
    data: bytes
    headers: Mapping[str, str]
    delivered: int
    sequence: str
    token: Any
    sticky_key: str | None = None
    framing: int = 0
    is_tombstone: bool = False

    @property
    def envelope(self) -> bytes:
        """Return the data without its framing."""
        return self.data[self.framing :] if self.framing else self.data

    @property
    def header_pairs(self) -> Sequence[tuple[str, str]]:
        """Return names and values of all headers, including repeated ones."""
        return self.headers.pairs if isinstance(self.headers, Headers) else tuple(self.headers.items())


class Source(Protocol):
    """Durable consumer of a stream: a message that was not acked is delivered again, also after a crash.

    Every adapter passes `tests/conformance/source.py`.

    Raises: Unavailable while the source can't be reached, to be retried by the caller; NotFound when the
    consumer or its stream was deleted.
    """

    async def fetch(self, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        """Return up to `limit` messages, waiting up to `wait_ms` for the first.

        One call at a time. Messages of a cancelled call are delivered again later.
        """

    async def ack(self, messages: Sequence[SourceMessage]) -> None:
        """Acknowledge deliveries; return once the source has received the acks.

        A source that crashes may lose them and redeliver the messages, so consumers must deduplicate.
        """

    async def nack(self, messages: Sequence[SourceMessage], delay_ms: int) -> None:
        """Request redelivery of messages after a delay."""

    async def extend(self, messages: Sequence[SourceMessage]) -> None:
        """Restart the ack wait of deliveries that are in progress."""

    async def close(self) -> None:
        """Disconnect; unacked messages will be redelivered. Closing twice is fine."""


class CountedSource(Source, Protocol):
    """Source that can tell how far behind its consumer is."""

    async def count_pending(self) -> int:
        """Return the number of messages that were not delivered yet; raises Unavailable."""
