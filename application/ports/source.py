"""Ports: sources of messages (RFC-037 message source slot; SDS-047 PORT-047-004 `JetStreamConsumer`)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from postroom.domain.envelope.content import PayloadValidation
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope


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
        subject: subject, topic, queue or stream that it came from.
        data: its bytes.
        headers: by name.
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


class StreamState(msgspec.Struct, frozen=True):
    """A consumer of a stream.

    Arguments:
        incarnation: differs if the stream or the consumer was deleted and recreated.
        floor: sequence up to which the consumer's messages are acknowledged.
        delivered: sequence up to which they were delivered.
    """

    incarnation: str
    floor: int
    delivered: int


class OrderedStream(Protocol):
    """Messages of a durable consumer, read in the order of the stream whoever has their deliveries.

    Raises: Unavailable while the stream can't be reached, NotFound when it or the consumer was deleted.
    """

    async def state(self) -> StreamState:
        """Return the state of the consumer."""

    async def read(self, after: int, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        """Return up to `limit` next messages after a sequence, in order and without gaps.

        Waits up to `wait_ms` for the first. Deliveries of messages up to `after` are acknowledged.
        """

    async def ack(self, messages: Sequence[SourceMessage]) -> None:
        """Acknowledge messages that are stored."""

    async def close(self) -> None:
        """Disconnect; closing twice is fine."""


class PayloadValidator(Protocol):
    """Validator of payloads against the schemas of their topics; may be called from any thread."""

    def validate(self, envelope: PrismEnvelope) -> PayloadValidation:
        """Validate one payload; problems are returned, not raised.

        A payload that is encrypted, or whose topic has no schema, is accepted.
        """
