"""Port: the keys that sign capabilities."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from postroom.domain.capability.token import RootKey


class KeyRing(Protocol):
    """The root keys of a service; every adapter passes `tests/conformance/key_ring.py`.

    Calls block and may come from any thread. Secrets are in no event, log, error or `repr`.
    """

    def root_keys(self) -> Sequence[RootKey]:
        """Return the keys, oldest first; none before the first `rotate`.

        Raises: InvalidRequest when they are malformed or others may read them, Unavailable when they can't be
            read.
        """

    def rotate(self, key: RootKey, retire_at: int) -> None:
        """Add the key that signs from now on; it is durable when this returns.

        Arguments:
            retire_at: what the other keys signed is valid until then, unless they retire earlier; µs since
                1970 UTC. Keys that were retired when `key` was created are removed.

        Raises: as `root_keys`.
        """


def signing_key(keys: Iterable[RootKey]) -> RootKey | None:
    """Return the key that signs, which is the newest, or None if the ring is empty."""
    return max(keys, key=lambda key: key.created_at, default=None)


def rotate_keys(keys: Sequence[RootKey], key: RootKey, retire_at: int) -> list[RootKey]:
    """Return the keys after a rotation; see `KeyRing.rotate`."""
    key.validate()
    others = [
        RootKey(
            each.id,
            each.secret,
            each.created_at,
            retire_at if each.retire_at is None else min(each.retire_at, retire_at),
        )
        for each in keys
        if each.retire_at is None or each.retire_at > key.created_at
    ]
    return [*others, key]
