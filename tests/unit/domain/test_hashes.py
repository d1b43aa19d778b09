"""Hashes never change, as stored logs depend on them; the expected values were computed once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.commit import GENESIS, link
from postroom.domain.integrity import hash_chain, payload_hash
from postroom.domain.mailbox.state import shard_of
from postroom.domain.names import b3, mailbox_stream, message_stream

HELLO = bytes.fromhex("ea8f163db38682925e4491c5e58d4bb3506ef8c14eb78a86e908c5624a67200f")


def test_the_payload_hash_is_blake3() -> None:
    # BLAKE3's official test vector for an empty input.
    assert b3(payload_hash(b"")) == "b3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert payload_hash(b"hello") == HELLO


@pytest.mark.parametrize(
    ("key", "shards", "shard"),
    [
        ("orders", 8, 6),
        ("orders", 1, 0),
        ("orders", 16, 6),
        ("orders", 1_024, 150),
        ("user-1", 8, 0),
        ("user-2", 8, 4),
        ("user-3", 8, 7),
        ("github.push", 8, 4),
        ("ünïcode/📮", 8, 0),
    ],
)
def test_a_key_stays_in_its_shard(key: str, shards: int, shard: int) -> None:
    assert shard_of(key, shards) == shard


@given(key=st.text(max_size=50), shards=st.integers(1, 1_024))
def test_any_key_is_in_the_shard_that_its_blake3_hash_names(key: str, shards: int) -> None:
    """Stored messages are in the shards of this formula, so that it is for ever (svc-mailbox P-6)."""
    first_eight_bytes = b3(payload_hash(key.encode()))[3:19]
    assert shard_of(key, shards) == int(first_eight_bytes, 16) % shards


def test_keys_spread_over_all_shards() -> None:
    counts = [0] * 8
    for number in range(8_000):
        counts[shard_of(f"user-{number}", 8)] += 1
    assert all(850 < count < 1_150 for count in counts)


@pytest.mark.parametrize(
    ("timestamp", "idem_key", "attrs", "digest"),
    [
        (
            1_700_000_000_000_000,
            "k",
            {"b": b"2", "a": b"\xff"},
            "9859c1de0d71860deb677894391f4a25b68c583e45693287d4f7fd627aab3820",
        ),
        (None, None, {}, "32b24bf8f3895fa783e724848cff6af8175c3751be8ddabcc9cd386796782f0e"),
    ],
)
def test_the_hash_chain_of_a_message_is_stable(
    timestamp: int | None, idem_key: str | None, attrs: dict[str, bytes], digest: str
) -> None:
    assert hash_chain("orders", timestamp, idem_key, HELLO, attrs).hex() == digest


def test_the_order_of_attributes_does_not_change_the_hash_chain() -> None:
    one = hash_chain("t", 1, None, HELLO, {"a": b"1", "b": b"2"})
    assert one == hash_chain("t", 1, None, HELLO, {"b": b"2", "a": b"1"})


@pytest.mark.parametrize(
    "changed",
    [
        ("u", 1, "k", HELLO, {"a": b"1"}),
        ("t", 2, "k", HELLO, {"a": b"1"}),
        ("t", None, "k", HELLO, {"a": b"1"}),
        ("t", 1, "l", HELLO, {"a": b"1"}),
        ("t", 1, None, HELLO, {"a": b"1"}),
        ("t", 1, "k", bytes(32), {"a": b"1"}),
        ("t", 1, "k", HELLO, {"a": b"2"}),
        ("t", 1, "k", HELLO, {"b": b"1"}),
        ("t", 1, "k", HELLO, {}),
    ],
)
def test_the_hash_chain_covers_each_of_its_parts(
    changed: tuple[str, int | None, str | None, bytes, dict[str, bytes]],
) -> None:
    assert hash_chain(*changed) != hash_chain("t", 1, "k", HELLO, {"a": b"1"})


def test_stream_ids_are_stable() -> None:
    assert mailbox_stream("main@local").hex() == "d29b9d92b7eb5f3badf4ae67a75994df"
    assert message_stream("main@local", "order-1").hex() == "681d83d528d35248b621e54f2bd4d9c3"


def test_an_id_that_is_a_uuid_is_its_own_stream_id_in_its_canonical_spelling_only() -> None:
    uuid = "0198c0de-0000-7000-8000-00000000000a"
    assert message_stream("main@local", uuid).hex() == uuid.replace("-", "")
    assert message_stream("main@local", uuid.upper()).hex() != uuid.replace("-", "")


def test_an_outside_id_is_another_message_in_another_mailbox() -> None:
    assert message_stream("main@local", "order-1") != message_stream("side@local", "order-1")


def test_the_links_of_the_log_are_stable() -> None:
    first = link(GENESIS, 1, 3, 1, 5, b"\x90")
    assert first.hex() == "547f6142a9e25be08b5e0780e808d3d379c6616a3ff74dc79fd571d2693ffa39"
    later = link(b"\x01" * 32, 4, 4, 7, 1_700_000_000_000_000, b"events")
    assert later.hex() == "6dae2c0459ce96396e546f1006264b5740824a0d57f54d850c04f7c343384001"


@pytest.mark.parametrize("changed", range(6))
def test_a_link_covers_each_of_its_parts(changed: int) -> None:
    parts = [b"\x01" * 32, 4, 5, 7, 6, b"events"]
    others = [bytes(32), 3, 6, 8, 7, b"event"]
    assert link(*parts) != link(*parts[:changed], others[changed], *parts[changed + 1 :])  # type: ignore[arg-type,call-arg]
