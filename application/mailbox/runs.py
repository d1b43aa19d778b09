"""Runs: the encoding of consecutive events of one type, column by column (ADR 0066).

A column whose values are all the same is stored as one value. The tag of a run is the name of the event and
its schema version: events whose fields change get a run with the next version, and the former run an
`upcast` method that returns it.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from blake3 import blake3
from msgspec.structs import astuple

from postroom.domain.arguments import MAX_INT
from postroom.domain.event import Event, StoredEvent
from postroom.domain.mailbox.events import (
    LogTruncated,
    MailboxCreated,
    MailboxMode,
    OwnershipTaken,
    TopicPaused,
    TopicPolicySet,
    TopicResumed,
)
from postroom.domain.message import (
    Headers,
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageReceived,
    MessageRedriven,
    MessageRequeued,
    MessageSent,
    MessageVisibilityExtended,
)
from postroom.domain.names import STREAM_BYTES
from postroom.domain.policy import TopicPolicy

T = TypeVar("T")

HASH_BYTES = 32
_STREAM, _VERSION, _AT = range(3)  # the fields of every event

Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=MAX_INT)]
Ints = Int64 | list[Int64]
OptionalInts = Int64 | None | list[Int64 | None]
Texts = str | list[str]
OptionalTexts = str | None | list[str | None]


class Run(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Consecutive events of one type.

    Arguments:
        count: number of events.
        streams: their stream ids, 16 bytes each.
        versions: their numbers in the histories of their aggregates.
        distances: see `Record.distance`.
    """

    event: ClassVar[type[Event]]

    count: int
    streams: bytes
    versions: Ints
    distances: Ints

    @classmethod
    def of(cls, events: Sequence[Event], distances: Sequence[int]) -> "Run":
        """Return the run of events, which all have this run's type."""
        fields = list(zip(*map(astuple, events), strict=True))
        columns = (column(each) for each in fields[_AT + 1 :])
        return cls(*_common(fields, distances), *columns)

    def columns(self) -> Iterator[Iterable[Any]]:
        """Yield the values of each field of the events after `at`.

        Raises: ValueError when a column has another number of values than the run.
        """
        return (expand(each, self.count) for each in astuple(self)[4:])

    def events(self, at: int, envelopes: Iterator[bytes]) -> Iterable[Event]:
        """Return the events.

        Arguments:
            at: their log time, µs.
            envelopes: of the messages, for `SentRun`.

        Raises: ValueError when the run's columns don't fit together.
        """
        return map(self.event, *self._identity(at), *self.columns())

    def stream_ids(self) -> tuple[bytes, ...]:
        """Return the stream ids; raises ValueError unless there are `count`."""
        return split(self.streams, STREAM_BYTES, self.count)

    def envelope_hashes(self) -> Iterable[bytes]:
        """Return the BLAKE3 hash of each event's envelope, empty for events without."""
        return repeat(b"", self.count)

    def _identity(self, at: int) -> tuple[Iterable[bytes], Iterable[int], Iterable[int]]:
        return self.stream_ids(), expand(self.versions, self.count), repeat(at, self.count)


class SentRun(Run, frozen=True, tag="MessageSent.1"):
    """Messages that were sent: the fields of `MessageSent`, with those of its `Headers` at the end."""

    event = MessageSent

    topics: Texts
    shards: Ints
    due: OptionalInts
    expires_at: Ints
    sizes: Ints
    idem_keys: OptionalTexts
    payload_hashes: bytes
    hash_chains: bytes
    envelopes_hashed: bytes
    priorities: Ints
    timestamps: Ints
    message_ids: OptionalTexts
    content_types: OptionalTexts
    schema_urls: OptionalTexts
    schema_versions: OptionalTexts
    encryptions: OptionalTexts
    correlation_ids: OptionalTexts
    principals: OptionalTexts
    namespaces: OptionalTexts
    trace_ids: OptionalTexts
    span_ids: OptionalTexts
    custom_headers: dict[str, str] | list[dict[str, str] | None] | None

    @classmethod
    def of(cls, events: Sequence[Event], distances: Sequence[int]) -> "SentRun":
        """Return the run of `MessageSent` events; it has the hashes of their envelopes."""
        fields = list(zip(*map(astuple, events), strict=True))
        payload_hashes, hash_chains, headers, envelopes, priorities = fields[9:]
        columns = (
            *_common(fields, distances),
            *map(column, fields[3:9]),
            _join(payload_hashes, HASH_BYTES),
            _join(hash_chains, HASH_BYTES),
            b"".join([blake3(envelope).digest() for envelope in envelopes]),
            column(priorities),
            *_header_columns(headers),
        )
        return cls(*columns)

    def events(self, at: int, envelopes: Iterator[bytes]) -> Iterable[Event]:
        """Return the `MessageSent` events with their envelopes; see `Run.events`."""
        topics, shards, due, expires_at, sizes, idem_keys, _, _, _, priorities, *headers = self.columns()
        return map(
            MessageSent,
            *self._identity(at),
            topics,
            shards,
            due,
            expires_at,
            sizes,
            idem_keys,
            split(self.payload_hashes, HASH_BYTES, self.count),
            split(self.hash_chains, HASH_BYTES, self.count),
            map(Headers, *headers),
            envelopes,
            priorities,
        )

    def columns(self) -> Iterator[Iterable[Any]]:
        """Yield the values of each column; those of hashes are joined."""
        return ((each,) if type(each) is bytes else expand(each, self.count) for each in astuple(self)[4:])

    def envelope_hashes(self) -> Iterable[bytes]:
        """Return the BLAKE3 hash of each envelope."""
        return split(self.envelopes_hashed, HASH_BYTES, self.count)


class ReceivedRun(Run, frozen=True, tag="MessageReceived.1"):
    """Deliveries of messages."""

    event = MessageReceived

    attempts: Ints
    due: Ints
    consumers: OptionalTexts


class ExtendedRun(Run, frozen=True, tag="MessageVisibilityExtended.1"):
    """Extensions of visibility timeouts."""

    event = MessageVisibilityExtended

    attempts: Ints
    due: Ints


class AckedRun(Run, frozen=True, tag="MessageAcked.1"):
    """Messages that were settled."""

    event = MessageAcked

    attempts: Ints


class RequeuedRun(Run, frozen=True, tag="MessageRequeued.1"):
    """Deliveries that failed or timed out."""

    event = MessageRequeued

    attempts: Ints
    due: Ints
    reasons: Texts
    last_errors: OptionalTexts


class DeadLetteredRun(Run, frozen=True, tag="MessageDeadLettered.1"):
    """Messages that became dead letters."""

    event = MessageDeadLettered

    attempts: Ints
    reasons: Texts
    last_errors: OptionalTexts
    expires_at: Ints


class RedrivenRun(Run, frozen=True, tag="MessageRedriven.1"):
    """Dead letters that were redriven."""

    event = MessageRedriven

    due: Ints
    expires_at: Ints


class ExpiredRun(Run, frozen=True, tag="MessageExpired.1"):
    """Messages that were removed unsettled."""

    event = MessageExpired

    reasons: Texts


class CreatedRun(Run, frozen=True, tag="MailboxCreated.1"):
    """The creation of the mailbox."""

    event = MailboxCreated

    names: Texts
    modes: MailboxMode | list[MailboxMode]


class OwnershipRun(Run, frozen=True, tag="OwnershipTaken.1"):
    """Changes of the mailbox's owner."""

    event = OwnershipTaken

    epochs: Ints
    owners: Texts
    boots: Texts
    uptimes: Ints
    clocks_continue: bool | list[bool]


class PolicyRun(Run, frozen=True, tag="TopicPolicySet.1"):
    """Policies that operators set."""

    event = TopicPolicySet

    topics: Texts
    policies: TopicPolicy | list[TopicPolicy]


class PausedRun(Run, frozen=True, tag="TopicPaused.1"):
    """Topics that operators paused."""

    event = TopicPaused

    topics: Texts


class ResumedRun(Run, frozen=True, tag="TopicResumed.1"):
    """Topics that operators resumed."""

    event = TopicResumed

    topics: Texts


class TruncatedRun(Run, frozen=True, tag="LogTruncated.1"):
    """Removals of old commits."""

    event = LogTruncated

    through: Ints
    links: bytes | list[bytes]


class StoredRun(Run, frozen=True, tag="StoredEvent.1"):
    """Events of a log that is not a mailbox's."""

    event = StoredEvent

    topics: Texts
    states: bytes | list[bytes]


AnyRun = (
    SentRun
    | ReceivedRun
    | AckedRun
    | ExtendedRun
    | RequeuedRun
    | DeadLetteredRun
    | RedrivenRun
    | ExpiredRun
    | CreatedRun
    | OwnershipRun
    | PolicyRun
    | PausedRun
    | ResumedRun
    | TruncatedRun
    | StoredRun
)
RUNS: dict[type[Event], type[Run]] = {run.event: run for run in AnyRun.__args__}
"""The run that encodes each type of event."""


def column(values: Sequence[Any]) -> Any:
    """Return a column: one value if all are the same; raises TypeError for a list as a value."""
    first = values[0]
    if type(first) is list:
        raise TypeError("a value is a list")
    return first if values.count(first) == len(values) else values


def expand(values: Any, count: int) -> Iterable[Any]:
    """Return the values of a column; raises ValueError unless there are `count`."""
    if type(values) is not list:
        return repeat(values, count)
    if len(values) != count:
        raise ValueError(f"a column has {len(values)} values of {count}")
    return values


def split(joined: bytes, size: int, count: int) -> tuple[bytes, ...]:
    """Return values of `size` bytes each, stored joined; raises ValueError unless there are `count`."""
    if len(joined) != size * count:
        raise ValueError(f"a column has {len(joined)} bytes instead of {count} times {size}")
    return struct.unpack(f"{size}s" * count, joined)


def _common(fields: Sequence[Sequence[Any]], distances: Sequence[int]) -> tuple[Any, ...]:
    """Return the columns that all runs have."""
    streams = fields[_STREAM]
    return len(streams), _join(streams, STREAM_BYTES), column(fields[_VERSION]), column(distances)


def _header_columns(headers: Sequence[Headers]) -> Iterable[Any]:
    """Return the columns of headers; messages that are sent together often have the very same."""
    first = headers[0]
    if all(each is first for each in headers):
        return astuple(first)
    return map(column, zip(*map(astuple, headers), strict=True))


def _join(values: Sequence[bytes], size: int) -> bytes:
    joined = b"".join(values)
    if set(map(len, values)) != {size}:
        raise ValueError(f"a value does not have {size} bytes")
    return joined
