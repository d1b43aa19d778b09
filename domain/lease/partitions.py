"""Partitions of mailboxes, and which proxy each belongs to (RFC-049 Alignment with RFC-048)."""

from collections import Counter
from collections.abc import Collection
from itertools import groupby
from zlib import crc32

import msgspec

from postroom.domain.names import check_mailbox

PARTITIONS = 256


class PartitionMap(msgspec.Struct, frozen=True):
    """The proxy of each partition.

    Arguments:
        owners: ids of proxies by partition; empty for a partition without one.
    """

    owners: tuple[str, ...] = ("",) * PARTITIONS

    @property
    def proxies(self) -> list[str]:
        """Return the ids of the proxies that have partitions, in order."""
        return sorted({*self.owners} - {""})

    def owner(self, partition: int) -> str | None:
        """Return the id of the proxy of a partition, or None if it has none."""
        return self.owners[partition] or None

    def ranges(self, proxy: str) -> list[tuple[int, int]]:
        """Return the first and last partitions of each contiguous range of a proxy."""
        runs = groupby(range(PARTITIONS), key=lambda partition: self.owners[partition] == proxy)
        ranges = [list(run) for is_owner, run in runs if is_owner]
        return [(run[0], run[-1]) for run in ranges]


NO_PARTITIONS = PartitionMap()


def partition_of(mailbox: str) -> int:
    """Return the partition of a mailbox: CRC-32 of its name modulo 256 (RFC-049 Partition-Based Assignment).

    Raises: InvalidRequest for a malformed name.
    """
    return crc32(check_mailbox(mailbox).encode()) % PARTITIONS


def assign_partitions(previous: PartitionMap, proxies: Collection[str]) -> PartitionMap:
    """Return a map in which each proxy has as many partitions as any other, or one more.

    It is the same for the same arguments in any order, moves no more partitions than necessary, and assigns
    contiguous ranges where that costs no move.

    Arguments:
        proxies: ids of the proxies that are alive; all partitions of other proxies move.
    """
    live = sorted({*proxies})
    if not live:
        return NO_PARTITIONS
    owners = [owner if owner in {*live} else "" for owner in previous.owners]
    shares = _shares(owners, live)
    for proxy in live:
        has = [partition for partition, owner in enumerate(owners) if owner == proxy]
        for partition in has[shares[proxy] :]:
            owners[partition] = ""
    missing = Counter(shares)
    missing.subtract(owner for owner in owners if owner)
    for partition in range(PARTITIONS):
        if not owners[partition]:
            owners[partition] = _receiver(owners, partition, live, missing)
            missing[owners[partition]] -= 1
    return PartitionMap(tuple(owners))


def _shares(owners: list[str], live: list[str]) -> dict[str, int]:
    """Return how many partitions each proxy gets; the remainder goes to those that have the most now."""
    share, over = divmod(PARTITIONS, len(live))
    counts = Counter(owners)
    by_count = sorted(live, key=lambda proxy: -counts[proxy])
    return {proxy: share + (index < over) for index, proxy in enumerate(by_count)}


def _receiver(owners: list[str], partition: int, live: list[str], missing: Counter[str]) -> str:
    """Return the proxy of a neighbouring partition if it has too few, else the one that lacks the most."""
    for neighbour in (owners[partition - 1 : partition], owners[partition + 1 : partition + 2]):
        if neighbour and missing[neighbour[0]] > 0:
            return neighbour[0]
    return max(live, key=lambda proxy: missing[proxy])
