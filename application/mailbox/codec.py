"""Codec: domain events to log records and back (ADR 0004).

An event's stream, version and time, and the fields that projections read, are columns of its record; the
other fields are a MessagePack array in `state`. The type name carries the schema version: an event whose
fields change gets a new version, and `UPCASTERS` a function that converts the array of the previous one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec
from msgspec.structs import astuple

from postroom.domain.arguments import MAX_INT
from postroom.domain.errors import BrokenLog
from postroom.domain.event import Event
from postroom.domain.integrity import has_intact_payload, message_checksum
from postroom.domain.mailbox.events import (
    LogTruncated,
    MailboxCreated,
    OwnershipTaken,
    TopicPaused,
    TopicPolicySet,
    TopicResumed,
)
from postroom.domain.message import (
    DEFAULT_PRIORITY,
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
from postroom.domain.record import CHAIN, HEADERS, NO_HEADERS, Record, encode_columns, link_encoded

Columns = tuple[str | None, int | None, int | None, int | None, str | None, bytes]
"""A record's `topic, shard, attempt, due, reason, state`."""

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_json = msgspec.json.Encoder(order="deterministic").encode
_parse_headers = msgspec.json.Decoder(dict[str, str]).decode
_NOTHING = _pack(())
_SENT = "MessageSent."
_CUSTOM_HEADERS = Record._fields.index("custom_headers")

# Types of the columns before and after `chain`, as strict as the strictest store.
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=MAX_INT)]
_Stream = Annotated[bytes, msgspec.Meta(min_length=STREAM_BYTES, max_length=STREAM_BYTES)]
_COLUMN_TYPES = {int: _Int64, int | None: _Int64 | None}
_types = [_COLUMN_TYPES.get(hint, hint) for hint in get_type_hints(Record).values()]
_types[Record._fields.index("stream")] = _Stream
_types[Record._fields.index("envelope")] = bytes
_BEFORE: Any = tuple.__class_getitem__(tuple(_types[:CHAIN]))
_AFTER: Any = tuple.__class_getitem__(tuple(_types[HEADERS:]))
_decode_columns = msgspec.msgpack.Decoder(tuple[_BEFORE, tuple[()]]).decode
_decode_sent_columns = msgspec.msgpack.Decoder(tuple[_BEFORE, _AFTER]).decode
_new_record = tuple.__new__  # a third of the cost of calling Record with all its columns


class Kind(NamedTuple):
    """Encoding of one type of event.

    Arguments:
        name: type name and schema version in the log.
        columns: the event's `Columns`.
        state: type of the array in `state`.
        event: builds the event from stream, version, at, the columns before `state`, and that array.
    """

    name: str
    cls: type[Event]
    columns: Callable[[Any], Columns]
    state: Any
    event: Callable[..., Event]


_NO_HEADERS = Headers(0)
_NO_CHECKSUM = b""
"""Checksum of messages stored by versions without checksums."""
_CHECKSUM = 5
"""Index of the checksum in the state of a sent message."""
_YEAR_9999 = 253_370_764_800_000_000
_UNREADABLE = (_YEAR_9999, 0, None, b"", b"", b"", DEFAULT_PRIORITY)
"""Substitute for an undecodable state of a sent message, which is quarantined on delivery."""
_DECODE_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, RecursionError)

KINDS = [
    Kind(
        "MessageSent.3",
        MessageSent,
        lambda e: (
            e.topic,
            e.shard,
            None,
            e.due,
            None,
            _pack(
                (
                    e.expires_at,
                    e.size,
                    e.idem_key,
                    e.payload_hash,
                    e.hash_chain,
                    message_checksum(e),
                    e.priority,
                )
            ),
        ),
        tuple[int, int, str | None, bytes, bytes, bytes, int],
        lambda s, v, at, topic, shard, attempt, due, reason, x: MessageSent(
            s, v, at, topic, shard, due, x[0], x[1], x[2], x[3], x[4], _NO_HEADERS, b"", x[6]
        ),
    ),
    Kind(
        "MessageReceived.1",
        MessageReceived,
        lambda e: (None, None, e.attempt, e.due, None, _pack((e.consumer,)) if e.consumer else _NOTHING),
        list[str],
        lambda s, v, at, topic, shard, attempt, due, reason, x: MessageReceived(
            s, v, at, attempt, due, x[0] if x else None
        ),
    ),
    Kind(
        "MessageVisibilityExtended.1",
        MessageVisibilityExtended,
        lambda e: (None, None, e.attempt, e.due, None, _NOTHING),
        tuple[()],
        lambda s, v, at, topic, shard, attempt, due, reason, x: MessageVisibilityExtended(
            s, v, at, attempt, due
        ),
    ),
    Kind(
        "MessageAcked.1",
        MessageAcked,
        lambda e: (None, None, e.attempt, None, None, _NOTHING),
        tuple[()],
        lambda s, v, at, topic, shard, attempt, due, reason, x: MessageAcked(s, v, at, attempt),
    ),
    Kind(
        "MessageRequeued.1",
        MessageRequeued,
        lambda e: (None, None, e.attempt, e.due, e.reason, _pack((e.last_error,))),
        tuple[str | None],
        lambda s, v, at, topic, shard, attempt, due, reason, x: MessageRequeued(
            s, v, at, attempt, due, reason, x[0]
        ),
    ),
    Kind(
        "MessageDeadLettered.1",
        MessageDeadLettered,
        lambda e: (None, None, e.attempt, None, e.reason, _pack((e.last_error, e.expires_at))),
        tuple[str | None, int],
        lambda s, v, at, topic, shard, attempt, due, reason, x: MessageDeadLettered(
            s, v, at, attempt, reason, x[0], x[1]
        ),
    ),
    Kind(
        "MessageRedriven.1",
        MessageRedriven,
        lambda e: (None, None, None, e.due, None, _pack((e.expires_at,))),
        tuple[int],
        lambda s, v, at, topic, shard, attempt, due, reason, x: MessageRedriven(s, v, at, due, x[0]),
    ),
    Kind(
        "MessageExpired.1",
        MessageExpired,
        lambda e: (None, None, None, None, e.reason, _NOTHING),
        tuple[()],
        lambda s, v, at, topic, shard, attempt, due, reason, x: MessageExpired(s, v, at, reason),
    ),
    Kind(
        "MailboxCreated.1",
        MailboxCreated,
        lambda e: (None, None, None, None, None, _pack((e.name, e.mode))),
        tuple[str, str],
        lambda s, v, at, topic, shard, attempt, due, reason, x: MailboxCreated(s, v, at, x[0], x[1]),
    ),
    Kind(
        "OwnershipTaken.1",
        OwnershipTaken,
        lambda e: (
            None,
            None,
            None,
            None,
            None,
            _pack((e.epoch, e.owner, e.boot, e.uptime, e.clock_continues)),
        ),
        tuple[int, str, str, int, bool],
        lambda s, v, at, topic, shard, attempt, due, reason, x: OwnershipTaken(s, v, at, *x),
    ),
    Kind(
        "TopicPolicySet.2",
        TopicPolicySet,
        lambda e: (e.topic, None, None, None, None, _pack((e.policy,))),
        tuple[TopicPolicy],
        lambda s, v, at, topic, shard, attempt, due, reason, x: TopicPolicySet(s, v, at, topic, x[0]),
    ),
    Kind(
        "TopicPaused.1",
        TopicPaused,
        lambda e: (e.topic, None, None, None, None, _NOTHING),
        tuple[()],
        lambda s, v, at, topic, shard, attempt, due, reason, x: TopicPaused(s, v, at, topic),
    ),
    Kind(
        "TopicResumed.1",
        TopicResumed,
        lambda e: (e.topic, None, None, None, None, _NOTHING),
        tuple[()],
        lambda s, v, at, topic, shard, attempt, due, reason, x: TopicResumed(s, v, at, topic),
    ),
    Kind(
        "LogTruncated.1",
        LogTruncated,
        lambda e: (None, None, None, None, None, _pack((e.through, e.link))),
        tuple[int, bytes],
        lambda s, v, at, topic, shard, attempt, due, reason, x: LogTruncated(s, v, at, x[0], x[1]),
    ),
]

_WRITE = {kind.cls: (kind.name, kind.columns) for kind in KINDS}
Upcaster = Callable[[list[Any]], list[Any]]
Reader = tuple[Callable[[bytes], Any], Callable[..., Event]]
"""Decoder of `state`, and constructor of the event (see `Kind`)."""

UPCASTERS: dict[str, Upcaster] = {
    "MessageSent.1": lambda state: [*state, _NO_CHECKSUM],
    "MessageSent.2": lambda state: [*state, DEFAULT_PRIORITY],
    "TopicPolicySet.1": lambda state: state,  # the fields that version 2 added have defaults
}
"""Upcasters of `state` to the next version, by type and version, such as `MessageSent.1`."""


def make_readers(kinds: Iterable[Kind], upcasters: Mapping[str, Upcaster]) -> dict[str, Reader]:
    """Return the reader of each type and version; older versions are upcast step by step."""
    readers: dict[str, Reader] = {
        kind.name: (msgspec.msgpack.Decoder(kind.state).decode, kind.event) for kind in kinds
    }
    versions = [(name.rpartition(".")[0], int(name.rpartition(".")[2])) for name in upcasters]
    for event, version in sorted(
        versions, reverse=True
    ):  # newest first, as readers build on the next version's
        decode, build = readers[f"{event}.{version + 1}"]
        name = f"{event}.{version}"
        readers[name] = (_upcasting(upcasters[name], decode), build)
    return readers


def _upcasting(upcast: Upcaster, decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    return lambda state: decode(_pack(upcast(_unpack(state))))


_READ = make_readers(KINDS, UPCASTERS)


def to_record(event: Event, position: int, epoch: int, previous: bytes) -> Record:
    """Return the record of an event at `position`, chained to the record with the chain hash `previous`.

    Raises: MsgspecError, TypeError, ValueError or OverflowError when the record could not be decoded.
    """
    name, columns = _WRITE[type(event)]
    before = (position, event.stream, event.version, epoch, name, event.at, *columns(event))
    _READ[name][0](before[-1])
    if type(event) is not MessageSent:
        encoded = encode_columns(before, ())
        _decode_columns(encoded)
        return _new_record(Record, (*before, link_encoded(previous, encoded), *NO_HEADERS))
    *headers, custom = astuple(event.headers)
    after = (*headers, None if not custom else _json(custom).decode(), event.envelope)
    encoded = encode_columns(before, after)
    _decode_sent_columns(encoded)
    if custom:
        _parse_headers(after[-2])
    return _new_record(Record, (*before, link_encoded(previous, encoded), *after))


def to_events(rows: Iterable[tuple[Any, ...]]) -> Iterator[Event]:
    """Yield the events of records; `MessageSent` events have empty headers and envelopes.

    Arguments:
        rows: records, or only their columns up to `state`.
    """
    for position, stream, version, _, name, at, topic, shard, attempt, due, reason, state, *_ in rows:
        try:
            decode, event = _READ[name]
        except KeyError:
            raise BrokenLog(
                f"The log holds an event of unknown type {name} at position {position}; "
                "read it with the Postroom version that wrote it, or a newer one.",
                position,
            ) from None
        try:
            values = decode(state)
        except _DECODE_ERRORS as error:
            if not name.startswith(_SENT):
                raise BrokenLog(
                    f"The log record at position {position} ({name}) can't be decoded: it was altered. "
                    "Restore the store from a backup.",
                    position,
                ) from error
            values = _UNREADABLE
        yield event(stream, version, at, topic, shard, attempt, due, reason, values)


def to_event(record: Record) -> Event:
    """Return the event of a whole record, with headers and envelope.

    Fields of a sent message that can't be decoded are empty; see `is_intact`.
    """
    event = next(to_events([record]))
    if not isinstance(event, MessageSent):
        return event
    try:
        custom = None if record.custom_headers is None else _parse_headers(record.custom_headers)
    except _DECODE_ERRORS:
        custom = None
    # A MessageSent has its header columns, in the order of the fields of `Headers`.
    headers = Headers(*record[HEADERS:_CUSTOM_HEADERS], custom)  # type: ignore[call-arg,arg-type]
    envelope: object = record.envelope  # a store may return another type than was written
    return msgspec.structs.replace(
        event, headers=headers, envelope=envelope if isinstance(envelope, bytes) else b""
    )


def is_intact(record: Record) -> bool:
    """Return whether the record of a sent message matches its hashes and checksum."""
    sent = to_event(record)
    if not isinstance(sent, MessageSent) or not has_intact_payload(sent):
        return False
    checksum = _READ[record.type][0](record.state)[_CHECKSUM]
    return bool(checksum == _NO_CHECKSUM or checksum == message_checksum(sent))
