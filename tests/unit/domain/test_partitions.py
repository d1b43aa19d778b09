"""Partitions of mailboxes and their proxies (RFC-049 Alignment with RFC-048)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.errors import InvalidRequest
from postroom.domain.lease.partitions import NO_PARTITIONS, assign_partitions, partition_of


def crc_32(data: bytes) -> int:
    """Return the CRC-32 of ISO 3309, bit by bit."""
    remainder = 0xFFFF_FFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0xEDB8_8320 if remainder & 1 else 0)
    return remainder ^ 0xFFFF_FFFF


@pytest.mark.parametrize(
    ("mailbox", "partition"), [("$admin@proxy-01", 109), ("audit-logs@proxy-02", 78), ("größe@π", 233)]
)
def test_the_partition_of_a_mailbox_never_changes(mailbox: str, partition: int) -> None:
    assert partition_of(mailbox) == partition


NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=20)


@given(st.builds("{}@{}".format, NAMES, NAMES))
def test_the_partition_of_a_mailbox_is_the_crc_32_of_its_name(mailbox: str) -> None:
    assert crc_32(b"123456789") == 0xCBF4_3926  # the check value of its definition
    assert partition_of(mailbox) == crc_32(mailbox.encode()) % 256


def test_only_a_mailbox_has_a_partition() -> None:
    with pytest.raises(InvalidRequest, match="must have the form namespace@proxy"):
        partition_of("orders")


def test_four_proxies_get_the_ranges_of_the_specification() -> None:
    partitions = assign_partitions(NO_PARTITIONS, ["proxy-04", "proxy-02", "proxy-01", "proxy-03"])
    assert {proxy: partitions.ranges(proxy) for proxy in partitions.proxies} == {
        "proxy-01": [(0, 63)],
        "proxy-02": [(64, 127)],
        "proxy-03": [(128, 191)],
        "proxy-04": [(192, 255)],
    }
    assert partitions.owner(64) == "proxy-02"
    assert partitions.ranges("proxy-05") == []


def test_a_proxy_that_joins_takes_only_its_share_and_returns_it_when_it_leaves() -> None:
    one = assign_partitions(NO_PARTITIONS, ["a"])
    assert one.ranges("a") == [(0, 255)]
    two = assign_partitions(one, ["a", "b"])
    assert (two.ranges("a"), two.ranges("b")) == ([(0, 127)], [(128, 255)])
    assert assign_partitions(two, ["a"]) == one
    assert assign_partitions(two, []) == NO_PARTITIONS
    assert NO_PARTITIONS.owner(0) is None
