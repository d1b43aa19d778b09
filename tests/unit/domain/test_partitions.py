"""Partitions of mailboxes and their proxies (RFC-049 Alignment with RFC-048)."""

from zlib import crc32

import pytest

from postroom.domain.errors import InvalidRequest
from postroom.domain.lease.partitions import NO_PARTITIONS, assign_partitions, partition_of


@pytest.mark.parametrize("mailbox", ["$admin@proxy-01", "audit-logs@proxy-02", "größe@π"])
def test_the_partition_of_a_mailbox_is_the_crc_32_of_its_name(mailbox: str) -> None:
    assert partition_of(mailbox) == crc32(mailbox.encode()) % 256


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
