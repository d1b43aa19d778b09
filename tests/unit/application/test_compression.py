"""Compressors are used again, by one thread at a time."""

from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from postroom.application.mailbox.codec import compress, decompress
from postroom.domain.errors import BrokenLog

SIZES = (300, 4_000, 200_000)


def _part(number: int) -> bytes:
    chance = Random(number)
    size = chance.choice(SIZES)
    return b"\x90" + chance.randbytes(size // 2) + b"a" * (size // 2)


def _round_trip(number: int) -> bool:
    return decompress(compress(_part(number)), number) == _part(number)


def test_threads_that_compress_at_the_same_time_do_not_disturb_each_other() -> None:
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(_round_trip, range(400)))


def test_parts_are_read_after_one_that_was_altered() -> None:
    whole = compress(_part(1))
    for _ in range(3):
        with pytest.raises(BrokenLog):
            decompress(whole[:-9] + bytes(9), 1)
        assert decompress(whole, 1) == _part(1)


def test_a_part_has_the_same_bytes_whatever_was_compressed_before() -> None:
    whole = compress(_part(1))
    compress(_part(2))
    assert compress(_part(1)) == whole
