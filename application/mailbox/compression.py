"""Compression of the parts of a commit, in stores on disk (ADR 0066)."""

from collections.abc import Callable
from typing import TypeVar

import zstandard

from postroom.domain.errors import BrokenLog

T = TypeVar("T")

LEVEL = 1
MIN_BYTES = 256
"""Size below which compression saves less than it costs."""
MAX_BYTES = 1 << 30
"""Maximum size of a part; no store holds larger values."""
_MAGIC = b"\x28\xb5\x2f\xfd"

# Those not in use. To make one takes 9 µs, five times as long as to compress a small part. Who uses one takes
# it out: there are as many as threads use at a time, not as many as there are threads.
_compressors: list[zstandard.ZstdCompressor] = []
_decompressors: list[zstandard.ZstdDecompressor] = []


def compress(part: bytes) -> bytes:
    """Return a part of a commit, compressed where that makes it smaller.

    What is encoded as MessagePack never begins like a compressed part.
    """
    if len(part) < MIN_BYTES:
        return part
    compressor = _take(_compressors, _new_compressor)
    compressed = compressor.compress(part)
    _compressors.append(compressor)
    return compressed if len(compressed) < len(part) else part


def decompress(part: bytes, position: int) -> bytes:
    """Return the part that `compress` returned.

    Arguments:
        position: of the commit, for the error.

    Raises: BrokenLog when it can't be decompressed, or has another size than it states.
    """
    if not part.startswith(_MAGIC):
        return part
    try:
        size = zstandard.frame_content_size(part)
        if not 0 <= size <= MAX_BYTES:
            raise ValueError(f"it states a size of {size} bytes")
        decompressor = _take(_decompressors, zstandard.ZstdDecompressor)
        whole = decompressor.decompress(part, max_output_size=size, allow_extra_data=False)
        _decompressors.append(decompressor)
        if len(whole) != size:
            raise ValueError(f"it has {len(whole)} bytes instead of {size}")
        return whole
    except (zstandard.ZstdError, ValueError, MemoryError) as error:
        raise BrokenLog(
            f"The commit at position {position} can't be decompressed ({error}): it was altered. Restore the "
            "store from a backup.",
            position,
        ) from error


def decompress_envelopes(part: bytes) -> bytes:
    """Return the envelopes of a commit; empty if they were altered, which their hashes tell."""
    try:
        return decompress(part, 0)
    except BrokenLog:
        return b""


def _take(unused: list[T], make: Callable[[], T]) -> T:
    try:
        return unused.pop()
    except IndexError:
        return make()


def _new_compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(LEVEL)
