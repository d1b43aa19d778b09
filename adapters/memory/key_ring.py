"""The key ring port in memory."""

from collections.abc import Sequence

from postroom.application.access.key_ring import rotate_keys
from postroom.domain.capability.token import RootKey


class MemoryKeyRing:
    """A key ring that is lost at the end of the process; see `KeyRing`."""

    def __init__(self) -> None:
        self._keys: list[RootKey] = []

    def root_keys(self) -> Sequence[RootKey]:
        """Return the keys; see `KeyRing.root_keys`."""
        return list(self._keys)

    def rotate(self, key: RootKey, retire_at: int) -> None:
        """Add the key that signs from now on; see `KeyRing.rotate`."""
        self._keys = rotate_keys(self._keys, key, retire_at)
