"""What every store of subject keys promises: a test class inherits the suite and brings `keys`."""

import re
from functools import partial

import pytest

from postroom.application.ports.subject_keys import SubjectKeys, UnknownPseudonym
from postroom.domain.errors import IntegrityFailure

NOW = 1_700_000_000_000_000
HOSTILE = ["", "alice", "ALICE", "a" * 10_000, "amélie\u0000", "日本\u202e", "'; DROP TABLE subjects; --"]


class SubjectKeysConformance:
    def test_a_subject_has_the_same_key_for_ever_and_no_other_subject_has_it(self, keys: SubjectKeys) -> None:
        first = keys.get_or_create(HOSTILE)
        again = keys.get_or_create(list(reversed(HOSTILE)))
        assert {name: key.pseudonym for name, key in first.items()} == {
            name: key.pseudonym for name, key in again.items()
        }
        assert len({key.pseudonym for key in first.values()}) == len(HOSTILE)
        ciphertexts = {name: key.encrypt("payload", b"x") for name, key in first.items()}
        assert ciphertexts == {name: key.encrypt("payload", b"x") for name, key in again.items()}
        assert len(set(ciphertexts.values())) == len(HOSTILE)

    def test_a_pseudonym_leads_to_the_key_but_says_nothing_of_the_name(self, keys: SubjectKeys) -> None:
        key = keys.get_or_create(["alice"])["alice"]
        resolved = keys.resolve([key.pseudonym])[key.pseudonym]
        assert resolved is not None
        assert resolved.decrypt("payload", key.encrypt("payload", b"hello")) == b"hello"
        assert "alice" not in repr(key) + key.pseudonym + repr(keys)

    @pytest.mark.parametrize("plaintext", [b"", b"\x00", b"x" * 100_000])
    def test_a_ciphertext_is_decrypted_for_its_own_part_only(
        self, keys: SubjectKeys, plaintext: bytes
    ) -> None:
        key = keys.get_or_create(["alice"])["alice"]
        ciphertext = key.encrypt("payload", plaintext)
        assert key.decrypt("payload", ciphertext) == plaintext
        with pytest.raises(IntegrityFailure, match=key.pseudonym):
            key.decrypt("headers", ciphertext)

    def test_an_altered_ciphertext_is_not_decrypted(self, keys: SubjectKeys) -> None:
        key = keys.get_or_create(["alice"])["alice"]
        ciphertext = key.encrypt("payload", b"hello")
        altered = [bytes([ciphertext[0] ^ 1]) + ciphertext[1:], ciphertext[:-1], ciphertext + b"x", b"", b"x"]
        for each in altered:
            with pytest.raises(IntegrityFailure):
                key.decrypt("payload", each)

    def test_tokens_are_equal_for_equal_values_of_one_header_and_subject(self, keys: SubjectKeys) -> None:
        both = keys.get_or_create(["alice", "bob"])
        tokens = {
            both[subject].token(name, value)
            for subject in both
            for name, value in (("mail", b"x"), ("mail", b"y"), ("phone", b"x"), ("mai", b"lx"))
        }
        assert len(tokens) == 8
        assert both["alice"].token("mail", b"x") == keys.get(["alice"])["alice"].token("mail", b"x")

    def test_get_creates_nothing(self, keys: SubjectKeys) -> None:
        assert keys.get(["alice"]) == {}
        assert keys.find("alice") is None
        assert list(keys.list_subjects()) == []

    def test_a_destroyed_key_is_gone_and_known_as_destroyed(self, keys: SubjectKeys) -> None:
        alice, bob = (each.pseudonym for each in keys.get_or_create(["alice", "bob"]).values())
        keys.destroy(alice, NOW)
        keys.destroy(alice, NOW + 1)
        resolved = keys.resolve([alice, bob])
        assert resolved[alice] is None
        assert resolved[bob] is not None
        assert keys.get(["alice"]) == {}
        assert [(each.pseudonym, each.erased_at) for each in keys.list_subjects()] == [
            (alice, NOW),
            (bob, None),
        ]

    def test_an_erasure_can_be_resumed_by_name_until_it_is_recorded(self, keys: SubjectKeys) -> None:
        pseudonym = keys.get_or_create(["alice"])["alice"].pseudonym
        keys.mark_recorded(pseudonym)  # changes nothing before the key is destroyed
        keys.destroy(pseudonym, NOW)
        pending = keys.find("alice")
        assert pending is not None
        assert (pending.pseudonym, pending.erased_at, pending.is_recorded) == (pseudonym, NOW, False)
        keys.mark_recorded(pseudonym)
        keys.mark_recorded(pseudonym)
        assert keys.find("alice") is None
        assert [each.is_recorded for each in keys.list_subjects()] == [True]

    def test_an_erased_subject_that_returns_is_a_new_one(self, keys: SubjectKeys) -> None:
        before = keys.get_or_create(["alice"])["alice"].pseudonym
        keys.destroy(before, NOW)
        after = keys.get_or_create(["alice"])["alice"].pseudonym
        assert after != before
        subject = keys.find("alice")
        assert subject is not None
        assert subject.pseudonym == after
        assert keys.resolve([before])[before] is None

    def test_a_pseudonym_of_another_store_is_reported(self, keys: SubjectKeys) -> None:
        for unknown in ("subject:" + "0" * 32, "subject:\0", "日本"):
            for use in (
                partial(keys.resolve, [unknown]),
                partial(keys.destroy, unknown, NOW),
                partial(keys.mark_recorded, unknown),
            ):
                with pytest.raises(UnknownPseudonym, match=re.escape(unknown)):
                    use()
