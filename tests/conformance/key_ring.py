"""What every key ring promises: a test class inherits the suite and brings `keys`."""

import pytest

from postroom.application.access.authority import KeyRing, signing_key
from postroom.domain.capability.token import RootKey
from postroom.domain.errors import InvalidRequest


def key(number: int, **fields: int) -> RootKey:
    return RootKey(bytes([number]) * 8, bytes([100 + number]) * 32, number * 1_000, **fields)


class KeyRingConformance:
    def test_a_new_key_ring_has_no_key(self, keys: KeyRing) -> None:
        assert list(keys.root_keys()) == []
        assert signing_key(keys.root_keys()) is None

    def test_the_newest_key_signs_and_the_others_retire(self, keys: KeyRing) -> None:
        for number in (1, 2, 3):
            keys.rotate(key(number), number * 1_000 + 5_000)
        assert [(each.id, each.retire_at) for each in keys.root_keys()] == [
            (key(1).id, 7_000),
            (key(2).id, 8_000),
            (key(3).id, None),
        ]
        assert signing_key(keys.root_keys()) == key(3)

    def test_a_key_that_was_retired_at_a_rotation_is_removed(self, keys: KeyRing) -> None:
        keys.rotate(key(1), 0)
        keys.rotate(key(2), 2_500)
        keys.rotate(key(3), 9_000)
        assert [each.id for each in keys.root_keys()] == [key(2).id, key(3).id]

    def test_a_malformed_key_is_refused_and_changes_nothing(self, keys: KeyRing) -> None:
        keys.rotate(key(1), 0)
        with pytest.raises(InvalidRequest) as error:
            keys.rotate(RootKey(b"short", b"secret" * 2, 5_000), 9_000)
        assert "secretsecret" not in str(error.value)
        assert list(keys.root_keys()) == [key(1)]

    def test_no_secret_is_in_a_repr(self, keys: KeyRing) -> None:
        keys.rotate(key(1), 0)
        shown = repr(keys) + repr(keys.root_keys())
        assert key(1).secret.hex() not in shown
        assert repr(key(1).secret) not in shown
