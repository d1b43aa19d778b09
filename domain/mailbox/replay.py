"""The replay window: recent idempotency keys of a topic, with the hashes of their payloads."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice

import msgspec

from postroom.domain.errors import IdempotencyConflict, Saturated

BLOCK_KEYS = 500
"""Keys that a snapshot takes at a time."""
DROPPED_KEYS = 1_000
"""Expired keys that are dropped when others are added; 500,000 at once would take 100 ms."""


class ReplayEntry(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Entry of an idempotency key: the message sent with it, the payload's hash, and the send time (µs)."""

    message: bytes
    payload_hash: bytes
    at: int


class ReplayWindow:
    """Bounded table `idem_key -> (message, payload_hash, at)` of the last `T_replay` (svc-mailbox C-2, I-13).

    A key is never evicted within the window; when the table is full of unexpired keys, new ones are refused.
    Entries are ordered by time, so expired ones come first.

    Arguments:
        keys: the entries, in the order of time.
        dropped_until: time (µs); keys added at or before it were dropped, or belong to a former topic of the
            name.
    """

    __slots__ = ("_blocks", "_dropped", "_keys", "_uncollected", "dropped_until")

    def __init__(self, keys: dict[str, ReplayEntry] | None = None, dropped_until: int = -1) -> None:
        self._keys: dict[str, ReplayEntry] = {} if keys is None else keys
        # The keys, oldest first, in full blocks but for the last. A snapshot reads blocks while the window
        # goes on to change: to copy 500,000 keys would stop the event loop for 10 ms.
        self._blocks = _blocks_of(self._keys)
        self._dropped = 0  # keys of the first block, which stay in it until all are dropped
        self._uncollected = 0
        self.dropped_until = dropped_until

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str, since: int) -> ReplayEntry | None:
        """Return the entry of `key` if it was sent after `since` (µs), or None."""
        entry = self._keys.get(key)
        return entry if entry is not None and entry.at > since else None

    def admit(
        self, topic: str, key: str, payload_hash: bytes, *, capacity: int, window: int, now: int
    ) -> bool:
        """Return True for a new key and False for a repetition with the same payload (svc-mailbox I-2).

        Arguments:
            capacity: maximum number of remembered keys.
            window, now: in µs.

        Raises: IdempotencyConflict on a repetition with another payload, Saturated when the window is full.
        """
        first = self.find(key, now - window)
        if first is not None:
            if first.payload_hash == payload_hash:
                return False
            raise IdempotencyConflict(
                f"Idempotency key {key!r} on topic {topic} was used for another payload within the replay "
                "window; send the other payload under a new key."
            )
        if len(self._keys) >= capacity:
            # There are more keys than `capacity` if that was lowered; count from the newest.
            oldest = self._keys[self._key(len(self._keys) - capacity)]
            if oldest.at > now - window:
                raise Saturated(
                    f"Topic {topic} remembers its limit of {capacity} idempotency keys; retry later or raise "
                    "replay_capacity in its policy.",
                    retry_after_ms=max(1, (oldest.at + window - now) // 1_000),
                )
        return True

    def add(self, key: str, entry: ReplayEntry, window: int) -> None:
        """Add a key, and drop keys that have expired by its time."""
        self.drop_until(entry.at - window, DROPPED_KEYS)
        while key in self._keys and self._keys[key].at <= entry.at - window:
            self.drop_until(entry.at - window, DROPPED_KEYS)
        if key in self._keys:  # its window had ended, but a later policy made it longer
            self._blocks, self._dropped = _blocks_of(each for each in self.keys() if each != key), 0
        self._keys[key] = entry
        self._append((key,))
        self._uncollected += 1

    def has_room_for(self, keys: Sequence[str], capacity: int) -> bool:
        """Return whether all keys are distinct and new, and fit beside those that are remembered.

        Arguments: see `admit`.
        """
        return (
            len(self._keys) + len(keys) <= capacity
            and self._keys.keys().isdisjoint(keys)
            and len(set(keys)) == len(keys)
        )

    def add_all(self, entries: dict[str, ReplayEntry], at: int, window: int) -> None:
        """Add keys of one time (µs); see `add`."""
        if not self._keys.keys().isdisjoint(entries):
            for key, entry in entries.items():
                self.add(key, entry, window)
            return
        self.drop_until(at - window, DROPPED_KEYS + len(entries))
        self._keys.update(entries)
        self._append(list(entries))
        self._uncollected += len(entries)

    def drop_until(self, time: int, most: int = 1 << 62) -> None:
        """Drop the keys added at or before `time` (µs), oldest first, but at `most` so many now."""
        self.dropped_until = max(self.dropped_until, time)
        keys, blocks = self._keys, self._blocks
        while blocks:
            block = blocks[0]
            while self._dropped < len(block) and keys[block[self._dropped]].at <= time:
                if not most:
                    return
                most -= 1
                del keys[block[self._dropped]]
                self._dropped += 1
            if self._dropped < len(block):
                return
            blocks.popleft()
            self._dropped = 0

    def is_expired(self, time: int) -> bool:
        """Return whether all keys were added at or before `time` (µs)."""
        return not self._blocks or self._keys[self._blocks[-1][-1]].at <= time

    def count_between(self, after: int, through: int) -> int:
        """Return the number of keys that were added after a time (µs), and at or before another."""
        keys = range(len(self._keys))
        first, last = (
            bisect_right(keys, time, key=lambda number: self._keys[self._key(number)].at)
            for time in (after, through)
        )
        return max(0, last - first)

    def restart(self, at: int) -> None:
        """Restart every key's window at `at` (µs), because the elapsed time is unknown."""
        for key, entry in self._keys.items():
            self._keys[key] = ReplayEntry(entry.message, entry.payload_hash, at)
        self._uncollected = len(self._keys)

    # -- for snapshots ---

    def keys(self) -> list[str]:
        """Return the keys, oldest first."""
        return list(islice(chain.from_iterable(self._blocks), self._dropped, None))

    def blocks_through(self, time: int) -> Sequence[Sequence[str]]:
        """Return the keys of `time` (µs) and before in blocks, oldest first; the last may have later ones.

        Keys that are added afterwards may appear in the last block.
        """
        blocks = list(self._blocks)
        if self._dropped:
            blocks[0] = blocks[0][self._dropped :]
        return blocks[: bisect_right(blocks, time, key=lambda block: self._keys[block[0]].at)]

    @property
    def has_uncollected(self) -> bool:
        """Return whether keys were added since `take_uncollected` was last called."""
        return bool(self._uncollected and self._keys)

    def forget_uncollected(self) -> None:
        """Discard the keys that `take_uncollected` would return."""
        self._uncollected = 0

    def take_uncollected(self) -> list[str]:
        """Return the keys that were added since this was last called, oldest first."""
        newest: deque[Sequence[str]] = deque()
        missing = min(self._uncollected, len(self._keys))
        for block in reversed(self._blocks):
            if missing <= 0:
                break
            newest.appendleft(block[-missing:])
            missing -= len(block)
        self._uncollected = 0
        return list(chain.from_iterable(newest))

    def entries(self, keys: Iterable[str], since: int) -> dict[str, ReplayEntry]:
        """Return the entries of `keys` that were added after `since` (µs)."""
        entries = ((key, self._keys.get(key)) for key in keys)
        return {key: entry for key, entry in entries if entry is not None and entry.at > since}

    def _key(self, number: int) -> str:
        """Return a key by its number from the oldest one, which is 0."""
        number += self._dropped
        return self._blocks[number // BLOCK_KEYS][number % BLOCK_KEYS]

    def _append(self, keys: Sequence[str]) -> None:
        room = BLOCK_KEYS - len(self._blocks[-1]) if self._blocks else 0
        if room:
            self._blocks[-1].extend(keys[:room])
        if len(keys) > room:
            self._blocks.extend(_blocks_of(keys[room:]))


def _blocks_of(keys: Iterable[str]) -> deque[list[str]]:
    rest = iter(keys)
    return deque(iter(lambda: list(islice(rest, BLOCK_KEYS)), []))
