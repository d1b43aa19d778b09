"""Rows of snapshots: parts as bytes, compressed, each with its digest in front (ADR 0067)."""

import msgspec
from blake3 import blake3

from postroom.application.mailbox.compression import compress, decompress
from postroom.domain.errors import BrokenLog
from postroom.domain.mailbox.snapshot import READABLE, SnapshotPart

DIGEST_BYTES = 32
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SnapshotPart).decode


def encode_part(part: SnapshotPart) -> bytes:
    """Return the bytes of a row, which begin with the digest of those that follow."""
    compressed = compress(_encode(part))
    return blake3(compressed).digest() + compressed


def digest_of(state: bytes) -> bytes:
    """Return the digest of an encoded row."""
    return state[:DIGEST_BYTES]


def decode_part(state: bytes) -> SnapshotPart | None:
    """Return the row that these bytes hold; None if they are damaged or of another version."""
    compressed = state[DIGEST_BYTES:]
    if blake3(compressed).digest() != digest_of(state):
        return None
    try:
        part = _decode(decompress(compressed, 0))
    except (msgspec.MsgspecError, BrokenLog):
        return None
    return part if part.version in READABLE else None
