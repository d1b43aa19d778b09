"""Framing of a schema registry: a zero byte, the id of the schema, and the index of its message."""

SCHEMA_ID_BYTES = 5
"""The zero byte and the id of the schema."""
MAX_INDEXES = 64
"""Maximum depth of nested message types; the index of `PrismEnvelope` has one."""


def framing_length(data: bytes) -> int:
    """Return the number of bytes before a framed protobuf message, or 0 if there is no framing.

    A protobuf message never begins with a zero byte, so the framing is unambiguous.
    """
    if len(data) < SCHEMA_ID_BYTES or data[0]:
        return 0
    count, at = _read_varint(data, SCHEMA_ID_BYTES)
    if count < 0 or count > MAX_INDEXES:
        return 0
    for _ in range(count):
        index, at = _read_varint(data, at)
        if index < 0:
            return 0
    return at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a zigzag varint of at most five bytes and the position after it, or -1 without one."""
    number = shift = 0
    for end in range(at, min(at + 5, len(data))):
        number |= (data[end] & 0x7F) << shift
        shift += 7
        if data[end] < 0x80:
            return (number >> 1) ^ -(number & 1), end + 1
    return -1, at
