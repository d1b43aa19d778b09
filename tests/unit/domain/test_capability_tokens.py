"""Tokens of capabilities: minting, attenuating, verifying."""

from collections.abc import Callable
from hmac import compare_digest, digest
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.capability import token as tokens
from postroom.domain.capability.access import (
    Access,
    check_operation,
    check_time,
    combine,
    uncovered_topic,
    verify,
)
from postroom.domain.capability.rights import (
    QUOTA_WINDOWS_MS,
    Caveat,
    Expires,
    Mailboxes,
    MaxMessages,
    NotBefore,
    Operations,
    Quota,
    Right,
    Rights,
    Topics,
    decode_caveat,
    encode_caveat,
)
from postroom.domain.capability.token import MAX_CAVEATS, Identifier, RootKey, Token, attenuate, mint
from postroom.domain.errors import Forbidden, InvalidRequest, Unauthenticated

SECRET = bytes(range(32))
NOW = 1_000_000
EXPIRY = Expires(NOW + 1_000)
NAMES = st.sampled_from(["a", "a.b", "b", "*", "a.*", "main@local", "main@*"])
PATTERNS = st.lists(NAMES, min_size=1, max_size=3).map(tuple)
TIMES = st.integers(NOW - 5, NOW + 5)
LIMITS = st.none() | st.integers(0, 10)
CAVEATS = st.one_of(
    PATTERNS.map(Mailboxes),
    PATTERNS.map(Topics),
    st.lists(st.sampled_from(Right), min_size=1, max_size=5).map(lambda some: Operations(tuple(some))),
    st.builds(Quota, st.integers(0, 10), LIMITS, st.sampled_from(QUOTA_WINDOWS_MS)),
    TIMES.map(NotBefore),
    TIMES.map(Expires),
    st.integers(1, 10).map(MaxMessages),
)


def identifier(rights: Rights | None = None, **values: Any) -> Identifier:
    fields: dict[str, Any] = {
        "key_id": b"k" * 8,
        "nonce": b"n" * 16,
        "principal": "orders-service",
        "epoch": 1,
        "issued_at": NOW,
        "rights": rights or Rights(),
    }
    return Identifier(**fields | values)


def issued(*caveats: Caveat, rights: Rights | None = None) -> Token:
    return mint(identifier(rights), SECRET, [EXPIRY, *caveats])


def authorize(access: Access, operation: Right, mailbox: str, topic: str | None, now: int) -> None:
    """Make the checks of a call, as `Guard` does."""
    check_time(access, now)
    check_operation(access, operation, mailbox)
    if topic is not None and not access.covers_topic(topic):
        raise uncovered_topic()


def outcome(access: Callable[[], Access], operation: Right, mailbox: str, topic: str | None) -> bool:
    try:
        authorize(access(), operation, mailbox, topic, NOW)
    except (Forbidden, Unauthenticated):
        return False
    return True


def test_a_token_survives_its_text_form() -> None:
    token = issued(Topics(("orders.*",)), MaxMessages(5))
    assert Token.decode(token.encode()) == token
    assert token.encode().startswith("prm1_")
    assert token.read_identifier() == identifier()
    assert token.read_caveats() == [EXPIRY, Topics(("orders.*",)), MaxMessages(5)]


def test_caveats_only_narrow() -> None:
    access = verify(
        issued(
            Topics(("orders.*",)),
            Topics(("*.paid",)),
            Operations((Right.SEND, Right.RECV)),
            MaxMessages(5),
            MaxMessages(9),
            Expires(NOW + 5_000),
            NotBefore(NOW),
        ),
        SECRET,
    )
    assert (access.expires, access.max_messages) == (NOW + 1_000, 5)
    authorize(access, Right.SEND, "main@local", "orders.paid", NOW)
    for operation, topic in (
        (Right.SEND, "orders.new"),
        (Right.SEND, "x.paid"),
        (Right.ACK, "orders.paid"),
    ):
        with pytest.raises(Forbidden):
            authorize(access, operation, "main@local", topic, NOW)


@pytest.mark.parametrize(
    ("now", "reason"), [(NOW - 1, "not-yet-valid"), (NOW + 1_000, "expired"), (NOW + 2_000, "expired")]
)
def test_a_capability_is_valid_from_its_start_to_before_its_expiry(now: int, reason: str) -> None:
    access = verify(issued(NotBefore(NOW)), SECRET)
    authorize(access, Right.SEND, "main@local", "orders", NOW)
    authorize(access, Right.SEND, "main@local", "orders", NOW + 999)
    with pytest.raises(Unauthenticated) as error:
        authorize(access, Right.SEND, "main@local", "orders", now)
    assert error.value.reason == reason


def test_a_capability_of_a_namespace_covers_no_other_mailbox() -> None:
    access = verify(issued(rights=Rights(mailboxes=("acme@*",))), SECRET)
    authorize(access, Right.ADMIN, "acme@one", None, NOW)
    with pytest.raises(Forbidden) as error:
        authorize(access, Right.ADMIN, "other@one", None, NOW)
    assert error.value.reason == "mailbox"


@given(st.lists(CAVEATS, max_size=4), CAVEATS, st.sampled_from(Right), st.none() | NAMES)
def test_what_an_attenuated_token_allows_the_token_allows(
    caveats: list[Caveat], added: Caveat, operation: Right, topic: str | None
) -> None:
    token = issued(*caveats)
    narrower = attenuate(token, added)
    if outcome(lambda: verify(narrower, SECRET), operation, "main@local", topic):
        assert outcome(lambda: verify(token, SECRET), operation, "main@local", topic)
    wide, narrow = verify(token, SECRET), verify(narrower, SECRET)
    assert set(wide.quotas) <= set(narrow.quotas)
    assert wide.max_messages is None or (narrow.max_messages or 99) <= wide.max_messages


def test_every_flipped_bit_of_a_token_denies() -> None:
    text = issued(Topics(("orders",))).encode()
    for index in range(len(text)):
        for bit in range(8):
            flipped = text[:index] + chr(ord(text[index]) ^ 1 << bit) + text[index + 1 :]
            with pytest.raises(Unauthenticated):
                verify(Token.decode(flipped), SECRET)


@pytest.mark.parametrize(
    "alter",
    [
        lambda token: Token(token.identifier, token.caveats[:-1], token.tag),
        lambda token: Token(token.identifier, token.caveats[::-1], token.tag),
        lambda token: Token(token.identifier, (*token.caveats, token.caveats[0]), token.tag),
        lambda token: Token(token.identifier, token.caveats, bytes(32)),
        lambda token: Token(msgspec.msgpack.encode(identifier(principal="root")), token.caveats, token.tag),
    ],
    ids=[
        "without a caveat",
        "in another order",
        "with a caveat twice",
        "without a tag",
        "of another principal",
    ],
)
def test_an_altered_token_is_denied(alter: Callable[[Token], Token]) -> None:
    with pytest.raises(Unauthenticated) as error:
        verify(Token.decode(alter(issued(MaxMessages(1))).encode()), SECRET)
    assert error.value.reason == "signature"


@given(st.text() | st.binary() | st.integers() | st.none() | st.text().map(lambda text: f"prm1_{text}"))
def test_junk_is_denied_with_a_typed_error(junk: object) -> None:
    with pytest.raises(Unauthenticated):
        verify(Token.decode(junk), SECRET)


@given(st.binary(max_size=60))
def test_any_bytes_in_a_signed_place_end_in_a_typed_error(data: bytes) -> None:
    token = issued()
    signed = Token(token.identifier, (*token.caveats, data), digest(token.tag, data, "sha256"))
    try:
        verify(signed, SECRET)
    except Unauthenticated:
        return
    assert encode_caveat(decode_caveat(data)) == data


@pytest.mark.parametrize(
    "caveat",
    [
        ["unheard-of", 1],
        ["max-messages", 5, "and more"],
        ["max-messages", 0],
        ["topics", []],
        ["topics", [""]],
        ["operations", ["fly"]],
        ["quota", 1, 1, 7],
        ["quota", None, None, 1_000],
        ["expires", -1],
        {"expires": 5},
    ],
    ids=str,
)
def test_an_unknown_or_malformed_caveat_denies(caveat: object) -> None:
    data, token = msgspec.msgpack.encode(caveat), issued()
    signed = Token(token.identifier, (*token.caveats, data), digest(token.tag, data, "sha256"))
    with pytest.raises(Unauthenticated) as error:
        verify(signed, SECRET)
    assert error.value.reason == "caveat"


def test_another_encoding_of_a_caveat_denies() -> None:
    token = issued()
    data = b"\x92\xacmax-messages\xcd\x00\x05"  # 5 in two bytes
    assert msgspec.msgpack.decode(data) == ["max-messages", 5]
    signed = Token(token.identifier, (*token.caveats, data), digest(token.tag, data, "sha256"))
    with pytest.raises(Unauthenticated) as error:
        verify(signed, SECRET)
    assert error.value.reason == "caveat"


def test_a_token_without_an_expiry_is_denied() -> None:
    with pytest.raises(Unauthenticated):
        verify(mint(identifier(), SECRET), SECRET)


@pytest.mark.parametrize("addition", ["=", "A", " ", "\n", "\0"], ids=repr)
def test_another_spelling_of_a_token_is_denied(addition: str) -> None:
    with pytest.raises(Unauthenticated):
        Token.decode(issued().encode() + addition)


def test_a_token_has_at_most_32_caveats_and_4000_characters() -> None:
    token = issued()
    for _ in range(MAX_CAVEATS - 1):
        token = attenuate(token, MaxMessages(1))
    with pytest.raises(InvalidRequest, match="32 caveats"):
        attenuate(token, MaxMessages(1))
    with pytest.raises(InvalidRequest, match="4000"):
        attenuate(issued(), Topics(tuple(str(n) * 100 for n in range(40))))


def test_no_repr_shows_a_secret() -> None:
    token, key = issued(), RootKey(b"k" * 8, SECRET, NOW)
    shown = f"{token!r} {key!r} {token} {key}"
    assert token.encode() not in shown
    assert repr(token.tag) not in shown
    assert repr(SECRET) not in shown


def test_tags_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison with == would return at the first byte that differs."""
    compared: list[bytes] = []

    class Tag(bytes):
        __hash__ = bytes.__hash__

        def __eq__(self, other: object) -> bool:
            raise AssertionError("The tag was compared with ==.")

    def compare(computed: bytes, received: bytes) -> bool:
        compared.append(computed)
        return compare_digest(computed, bytes(memoryview(received)))

    monkeypatch.setattr(tokens, "compare_digest", compare)
    token = issued()
    verify(Token(token.identifier, token.caveats, Tag(token.tag)), SECRET)
    assert compared == [token.tag]


@pytest.mark.parametrize(
    "values",
    [
        {"principal": ""},
        {"principal": " "},
        {"principal": "a\nb"},
        {"nonce": b"short"},
        {"key_id": b"short"},
        {"epoch": -1},
        {"rights": Rights(topics=())},
        {"rights": Rights(operations=())},
    ],
    ids=str,
)
def test_a_malformed_identifier_is_not_minted(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        mint(identifier(**values), SECRET)


def test_rights_without_caveats_are_those_of_the_identifier() -> None:
    access = combine(identifier(Rights(topics=("orders",))), [EXPIRY])
    assert access.covers_topic("orders")
    assert not access.covers_topic("orders.new")
    assert not access.covers_all_topics
    assert combine(identifier(), [EXPIRY]).covers_all_topics
