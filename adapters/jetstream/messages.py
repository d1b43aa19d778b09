"""Encoding of a lease event as a message of the stream."""

from typing import NamedTuple
from uuid import UUID

import msgspec
from blake3 import blake3
from eventsourcing.persistence import Notification, StoredEvent

from postroom.domain.errors import BrokenLog

_DIGEST_BYTES = 16
_FORMAT = 1


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    save: bytes
    index: int
    version: int
    topic: str
    state: bytes


class StreamMessage(NamedTuple):
    """An event as the stream has it.

    Arguments:
        sequence: in the stream.
        save: id of the save that wrote the event.
        place: of the event in its save, from 0.
    """

    sequence: int
    save: UUID
    place: int
    event: StoredEvent

    @property
    def notification(self) -> Notification:
        """Return the event with its sequence as the notification id."""
        event = self.event
        return Notification(
            event.originator_id, event.originator_version, event.topic, event.state, self.sequence
        )


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Body).decode


def subject_of(stream: str, originator: UUID) -> str:
    """Return the subject of an aggregate's events."""
    return f"{stream}.{originator.hex}"


def encode(subject: str, save: UUID, index: int, event: StoredEvent) -> bytes:
    """Return the payload of an event: a digest of subject and body, and the body."""
    body = _encode(
        _Body(_FORMAT, save.bytes, index, event.originator_version, event.topic, bytes(event.state))
    )
    return _digest(subject, body) + body


def decode(subject: str, sequence: int, payload: bytes) -> StreamMessage:
    """Return the event of a message.

    Raises: BrokenLog for a message that is not an event of this stream, or was altered.
    """
    body = payload[_DIGEST_BYTES:]
    if payload[:_DIGEST_BYTES] != _digest(subject, body):
        raise _broken_log(subject, sequence, "does not match its digest")
    try:
        fields = _decode(body)
        originator = UUID(hex=subject.rpartition(".")[2])
        save = UUID(bytes=fields.save)
    except (msgspec.DecodeError, ValueError) as error:
        raise _broken_log(subject, sequence, f"can't be decoded ({error})") from error
    if fields.format != _FORMAT:
        raise _broken_log(subject, sequence, f"has the unknown format {fields.format}")
    event = StoredEvent(originator, fields.version, fields.topic, fields.state)
    return StreamMessage(sequence, save, fields.index, event)


def _digest(subject: str, body: bytes) -> bytes:
    return blake3(subject.encode() + b"\0" + body).digest(_DIGEST_BYTES)


def _broken_log(subject: str, sequence: int, problem: str) -> BrokenLog:
    return BrokenLog(
        f"Message {sequence} of the lease stream, at subject {subject}, {problem}; it was altered, or "
        "published by another program. Restore the stream from a backup, or use another stream.",
        sequence,
    )
