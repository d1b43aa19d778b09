"""The replay window: recent idempotency keys of a topic, with the hashes of their payloads."""

from collections import OrderedDict
from itertools import islice

import msgspec

from postroom.domain.errors import IdempotencyConflict, Saturated


class ReplayEntry(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Entry of an idempotency key: the message sent with it, the payload's hash, and the send time (µs)."""

    message: bytes
    payload_hash: bytes
    at: int


class ReplayWindow:
    """Bounded table `idem_key -> (message, payload_hash, at)` of the last `T_replay` (svc-mailbox C-2, I-13).

    A key is never evicted within the window; when the table is full of unexpired keys, new ones are refused.
    Entries are ordered by time, so expired ones come first.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: dict[str, ReplayEntry] | None = None) -> None:
        self._keys: OrderedDict[str, ReplayEntry] = OrderedDict(keys or {})

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
            oldest = next(islice(self._keys.values(), len(self._keys) - capacity, None))
            if oldest.at > now - window:
                raise Saturated(
                    f"Topic {topic} remembers its limit of {capacity} idempotency keys; retry later or raise "
                    "replay_capacity in its policy.",
                    retry_after_ms=max(1, (oldest.at + window - now) // 1_000),
                )
        return True

    def add(self, key: str, entry: ReplayEntry, window: int) -> None:
        """Add a key, and drop the keys that have expired by its time."""
        self.drop_until(entry.at - window)
        keys = self._keys
        if key in keys:  # reused after its window: move the entry to the end
            del keys[key]
        keys[key] = entry

    def drop_until(self, time: int) -> None:
        """Drop the keys added at or before `time` (µs)."""
        keys = self._keys
        while keys and next(iter(keys.values())).at <= time:
            keys.popitem(last=False)

    def is_expired(self, time: int) -> bool:
        """Return whether all keys were added at or before `time` (µs)."""
        return not self._keys or next(reversed(self._keys.values())).at <= time

    def restart(self, at: int) -> None:
        """Restart every key's window at `at` (µs), because the elapsed time is unknown."""
        for key, entry in self._keys.items():
            self._keys[key] = ReplayEntry(entry.message, entry.payload_hash, at)

    def since(self, time: int) -> dict[str, ReplayEntry]:
        """Return the keys added after `time` (µs), oldest first."""
        return {key: entry for key, entry in self._keys.items() if entry.at > time}
