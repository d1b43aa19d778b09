"""The replay window: which idempotency keys a topic has seen lately, and with what payload."""

from collections import OrderedDict
from itertools import islice

import msgspec

from postroom.domain.errors import IdempotencyConflict, Saturated


class Remembered(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What was sent under an idempotency key, and when (µs)."""

    message: bytes
    payload_hash: bytes
    at: int


class ReplayWindow:
    """Remember `idem_key -> (message, payload_hash, at)` for `T_replay` (svc-mailbox C-2, I-13).

    The table is bounded, and a key never leaves it inside the window: when it is full of such keys, new ones
    are refused. Entries are kept in the order of their time, so that expired ones stand in front.
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: dict[str, Remembered] | None = None) -> None:
        self._keys: OrderedDict[str, Remembered] = OrderedDict(keys or {})

    def __len__(self) -> int:
        return len(self._keys)

    def recall(self, key: str, since: int) -> Remembered | None:
        """Return what was sent under `key` after `since` (µs), or None."""
        found = self._keys.get(key)
        return found if found is not None and found.at > since else None

    def admit(
        self, topic: str, key: str, payload_hash: bytes, *, capacity: int, window: int, now: int
    ) -> bool:
        """Tell whether `key` is new; a repeat with the same payload is not (svc-mailbox I-2).

        Arguments:
            capacity: how many keys may be remembered at once.
            window, now: in µs.

        Raises: IdempotencyConflict on a repeat with another payload, Saturated when no key can be forgotten
        yet.
        """
        found = self.recall(key, now - window)
        if found is not None:
            if found.payload_hash == payload_hash:
                return False
            raise IdempotencyConflict(
                f"Idempotency key {key!r} on topic {topic} was used for another payload within the replay "
                "window; "
                "send the changed payload under a new key."
            )
        if len(self._keys) >= capacity:
            # A capacity that was lowered may leave more keys than it allows: count from the newest.
            oldest = next(islice(self._keys.values(), len(self._keys) - capacity, None))
            if oldest.at > now - window:
                raise Saturated(
                    f"Topic {topic} remembers its limit of {capacity} idempotency keys; retry later or raise "
                    "replay_capacity in its policy.",
                    retry_after_ms=max(1, (oldest.at + window - now) // 1_000),
                )
        return True

    def remember(self, key: str, remembered: Remembered, window: int) -> None:
        """Keep a key for the window, and forget those whose window is over at its time."""
        self.forget(remembered.at - window)
        keys = self._keys
        if key in keys:  # used again after its window: it goes to the back of the line
            del keys[key]
        keys[key] = remembered

    def forget(self, time: int) -> None:
        """Forget the keys remembered at or before `time` (µs)."""
        keys = self._keys
        while keys and next(iter(keys.values())).at <= time:
            keys.popitem(last=False)

    def restart(self, at: int) -> None:
        """Let every key's window begin again at `at` (µs): nobody knows how much of it has passed."""
        for key, seen in self._keys.items():
            self._keys[key] = Remembered(seen.message, seen.payload_hash, at)

    def since(self, time: int) -> dict[str, Remembered]:
        """Return the keys remembered after `time` (µs), oldest first."""
        return {key: seen for key, seen in self._keys.items() if seen.at > time}
