import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.http.signature import check_keys, sign, verify_signature
from postroom.domain.errors import InvalidRequest, Unauthenticated

KEY, OLD, OTHER = b"k" * 32, b"o" * 32, b"x" * 32
BODY = b'{"payload":{"total":5}}'
NOW = 1_766_959_200


def test_a_signed_body_is_accepted() -> None:
    verify_signature(sign(BODY, NOW, [KEY]), BODY, KEY, now=NOW)


def test_a_signature_is_the_hmac_of_timestamp_dot_body() -> None:
    headers = sign(b"{}", 1, [b"0123456789abcdef"])
    assert headers == {
        "Postroom-Timestamp": "1",
        "Postroom-Signature": "v1=2af693cb56b22c16912222aeefdc75a01de562bf70ee2015f41ecea48382997f",
    }


def test_names_of_headers_have_no_case() -> None:
    headers = {name.lower(): value for name, value in sign(BODY, NOW, [KEY]).items()}
    verify_signature(headers, BODY, KEY, now=NOW)


def test_while_a_key_is_replaced_either_is_accepted() -> None:
    both = sign(BODY, NOW, [KEY, OLD])
    verify_signature(both, BODY, OLD, now=NOW)
    verify_signature(both, BODY, KEY, now=NOW)
    verify_signature(sign(BODY, NOW, [OLD]), BODY, [KEY, OLD], now=NOW)


def test_another_key_is_refused() -> None:
    with pytest.raises(Unauthenticated, match="none of the keys"):
        verify_signature(sign(BODY, NOW, [OTHER]), BODY, [KEY, OLD], now=NOW)


@given(st.binary(max_size=64))
def test_another_body_is_refused(body: bytes) -> None:
    if body != BODY:
        with pytest.raises(Unauthenticated):
            verify_signature(sign(BODY, NOW, [KEY]), body, KEY, now=NOW)


def test_another_timestamp_is_refused() -> None:
    headers = sign(BODY, NOW, [KEY]) | {"Postroom-Timestamp": str(NOW + 1)}
    with pytest.raises(Unauthenticated, match="none of the keys"):
        verify_signature(headers, BODY, KEY, now=NOW)


@pytest.mark.parametrize("now", [NOW - 301, NOW + 301])
def test_an_old_request_is_refused(now: int) -> None:
    with pytest.raises(Unauthenticated, match="more than 300 s"):
        verify_signature(sign(BODY, NOW, [KEY]), BODY, KEY, now=now)
    verify_signature(sign(BODY, NOW, [KEY]), BODY, KEY, now=now, tolerance_seconds=301)


@pytest.mark.parametrize("stamp", ["", "x", "-1", "1.5", "²", "9" * 40, " 1"])
def test_a_timestamp_that_is_none_is_refused(stamp: str) -> None:
    with pytest.raises(Unauthenticated, match="Postroom-Timestamp"):
        verify_signature(sign(BODY, NOW, [KEY]) | {"Postroom-Timestamp": stamp}, BODY, KEY, now=NOW)


@pytest.mark.parametrize("signature", ["", "v1=", "v1=é", "v0=00", "00", "v1=00," * 1_000])
def test_a_signature_that_is_none_is_refused(signature: str) -> None:
    with pytest.raises(Unauthenticated, match="none of the keys"):
        verify_signature(
            {"Postroom-Timestamp": str(NOW), "Postroom-Signature": signature}, BODY, KEY, now=NOW
        )


def test_an_unsigned_request_is_refused() -> None:
    with pytest.raises(Unauthenticated):
        verify_signature({}, BODY, KEY)


def test_keys_must_be_secrets_and_are_never_shown() -> None:
    with pytest.raises(InvalidRequest, match="there is no key"):
        check_keys([])
    with pytest.raises(InvalidRequest, match="at least 16 bytes") as caught:
        check_keys(["hunter2"])
    assert "hunter2" not in str(caught.value)
