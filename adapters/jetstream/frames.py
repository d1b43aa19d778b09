"""Frames: messages of a log's stream, which make up appends (ADR 0147).

An append is one message, or several parts if it is larger than a message may be. A part is valid only right
after the part before it, so an append is complete exactly when its last part is in the stream; the parts of
an append that was not completed are passed over, and the next append follows them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from blake3 import blake3
from msgspec.structs import astuple

from postroom.adapters.jetstream.client import StoredMessage
from postroom.application.mailbox.codec import compress, decompress, decompress_envelopes
from postroom.application.ports.event_log import Head
from postroom.domain.commit import Commit, LastEvent
from postroom.domain.errors import BrokenLog

FORMAT = 1
FRAME_BYTES = 256
"""Upper bound of a frame without its body, in bytes."""
COMMIT_BYTES, ENTRY_BYTES = 60, 36
"""Estimated size of a commit besides its events and envelopes, and of an entry of the index."""
DIGEST_BYTES = 8
"""Enough to notice an accident; who alters a message on purpose can change its digest, too, not the chain."""


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A part of an append.

    Arguments:
        previous: sequence of the last message of the append before, or 0.
        first, count: first position of the append's events, and their number.
        epoch, at, chain: of its last commit.
        before, size: estimated bytes of all commits before it, and of its own.
        body: a part of the commits.
        part, parts: number of this part from 0, and of all.
        digest: 32-byte BLAKE3 of the whole body; like the numbers of parts left out if it is in one part.
    """

    format: int
    previous: int
    first: int
    count: int
    epoch: int
    at: int
    chain: bytes
    before: int
    size: int
    body: bytes
    part: int = 0
    parts: int = 1
    digest: bytes = b""

    @property
    def last(self) -> int:
        """Return the position of the append's last event."""
        return self.first + self.count - 1

    @property
    def is_end(self) -> bool:
        """Return whether the append ends with this part."""
        return self.part + 1 == self.parts

    @property
    def head(self) -> Head:
        """Return the end of the log after this append."""
        return Head(self.last, self.at, self.chain, self.epoch)


class StoredCommit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A commit of an append, with compressed parts.

    Arguments:
        size: its estimated size in the log, bytes.
        last_events: see `Commit`.
    """

    first: int
    last: int
    epoch: int
    at: int
    chain: bytes
    events: bytes
    envelopes: bytes
    size: int
    last_events: list[LastEvent]

    def commit(self, *, envelopes: bool = True) -> Commit:
        """Return the commit; raise BrokenLog when its events can't be decompressed."""
        content = decompress_envelopes(self.envelopes) if envelopes and self.envelopes else b""
        events = decompress(self.events, self.first)
        return Commit(self.first, self.last, self.epoch, self.at, self.chain, events, content)


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The commits of an append, without what the frame says of the last one; see `_encode_shortly`.

    Arguments:
        events, envelopes, last_events: of the last commit.
        earlier: the commits before it.
    """

    events: bytes
    envelopes: bytes = b""
    last_events: Sequence[LastEvent] = ()
    earlier: Sequence[StoredCommit] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode_frame = msgspec.msgpack.Decoder(Frame).decode
_decode_body = msgspec.msgpack.Decoder(_Body).decode
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError)


class Append(NamedTuple):
    """An append as it was read.

    Arguments:
        begin, end: sequences of its first and its last message.
        frame: of its last part.
    """

    begin: int
    end: int
    frame: Frame
    commits: Sequence[StoredCommit]


def encode_append(
    subject: str, commits: Sequence[Commit], previous: int, before: int, max_bytes: int
) -> tuple[list[bytes], Frame]:
    """Return the messages of an append, and the frame of the last one without its body.

    Arguments:
        previous, before: see `Frame`.
        max_bytes: size of the largest message.
    """
    *earlier, end = map(_store, commits)
    first, size = commits[0].first, end.size + sum(each.size for each in earlier)
    body = _encode_shortly(_Body(end.events, end.envelopes, end.last_events, earlier))
    room = max(1, max_bytes - FRAME_BYTES)
    bodies = [body[start : start + room] for start in range(0, len(body), room)]
    digest = blake3(body).digest() if len(bodies) > 1 else b""
    frames = [
        Frame(
            *(FORMAT, previous, first, end.last - first + 1, end.epoch, end.at, end.chain, before, size),
            *(part, number, len(bodies), digest),
        )
        for number, part in enumerate(bodies)
    ]
    parts = [seal(subject, _encode_shortly(frame)) for frame in frames]
    return parts, msgspec.structs.replace(frames[-1], body=b"")


def decode_frame(message: StoredMessage) -> Frame:
    """Return the frame of a message of a log.

    Raises: BrokenLog for a message that another program published, or that was altered.
    """
    try:
        frame = _decode_frame(unseal(message))
    except _DECODE_ERRORS as error:
        raise broken_message(message, f"can't be decoded ({error})") from error
    if frame.format != FORMAT:
        raise broken_message(message, f"has the unknown format {frame.format}")
    return frame


class Assembler:
    """Assembler of the messages of one subject, in their order, into appends."""

    def __init__(self) -> None:
        self._parts: list[Frame] = []
        self._begin = 0

    @property
    def is_within(self) -> bool:
        """Return whether parts of an append are missing so far."""
        return bool(self._parts)

    def add(self, message: StoredMessage) -> Append | None:
        """Add the next message; return the append that it completes, if any.

        Raises: BrokenLog when it can't be decoded, or the parts do not have the hash that they state.
        """
        frame = decode_frame(message)
        if frame.part == 0:
            self._parts, self._begin = [frame], message.sequence
        elif len(self._parts) == frame.part and self._parts[0].digest == frame.digest:
            self._parts.append(frame)
        else:
            self._parts = []  # the rest of an append that was not completed, or whose beginning was not read
            return None
        if not frame.is_end:
            return None
        parts, self._parts = self._parts, []
        body = b"".join(part.body for part in parts)
        if frame.parts > 1 and blake3(body).digest() != frame.digest:
            raise broken_message(message, "ends an append that does not match its hash")
        return Append(self._begin, message.sequence, frame, _decode_commits(message, frame, body))


def _store(commit: Commit) -> StoredCommit:
    events, envelopes = compress(commit.events), compress(commit.envelopes)
    size = COMMIT_BYTES + len(events) + len(envelopes) + ENTRY_BYTES * len(commit.entries)
    return StoredCommit(*commit[:5], events, envelopes, size, list(commit.last_events))


def _decode_commits(message: StoredMessage, frame: Frame, body: bytes) -> list[StoredCommit]:
    try:
        end = _decode_body(body)
    except _DECODE_ERRORS as error:
        raise broken_message(message, f"can't be decoded ({error})") from error
    first = end.earlier[-1].last + 1 if end.earlier else frame.first
    size = frame.size - sum(each.size for each in end.earlier)
    head = (first, frame.last, frame.epoch, frame.at, frame.chain)
    return [*end.earlier, StoredCommit(*head, end.events, end.envelopes, size, list(end.last_events))]


def _encode_shortly(struct: msgspec.Struct) -> bytes:
    """Encode a struct without the fields at its end that have their defaults."""
    values = list(astuple(struct))
    for default in reversed(struct.__struct_defaults__):
        if values[-1] and values[-1] != default:
            break
        values.pop()
    return _encode(values)


def seal(subject: str, body: bytes) -> bytes:
    """Return the payload of a message: a digest of its subject and body, and the body."""
    return _digest(subject, body) + body


def unseal(message: StoredMessage) -> bytes:
    """Return the body of a message.

    Raises: BrokenLog when the digest does not match.
    """
    body = message.data[DIGEST_BYTES:]
    if message.data[:DIGEST_BYTES] != _digest(message.subject, body):
        raise broken_message(message, "does not match its digest")
    return body


def _digest(subject: str, body: bytes) -> bytes:
    return blake3(subject.encode() + b"\0" + body).digest(DIGEST_BYTES)


def broken_message(message: StoredMessage, problem: str) -> BrokenLog:
    """Return the error about a message."""
    return BrokenLog(
        f"Message {message.sequence} of subject {message.subject} {problem}; it was altered, or published by "
        "another program. Delete it with nats stream rmm if it is another program's; otherwise restore the "
        "store from a backup.",
        message.sequence,
    )
