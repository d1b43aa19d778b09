import time
from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from postroom.adapters.http.signature import check_keys, sign, verify_signature
from postroom.domain.errors import InvalidRequest, Unauthenticated

KEY, OLD, OTHER = b"k" * 32, b"o" * 32, b"x" * 32
BODY = b'{"payload":{"total":5}}'
ID = "550e8400-e29b-41d4-a716-446655440000"


def signed(*keys: bytes, body: bytes = BODY, age_seconds: int = 0) -> dict[str, str]:
    return sign(ID, body, int(time.time()) - age_seconds, keys)


def test_a_signed_body_is_accepted() -> None:
    verify_signature(signed(KEY), BODY, KEY)


def test_a_signature_is_that_of_standard_webhooks() -> None:
    assert sign("msg_1", b"{}", 1, [b"0123456789abcdef"]) == {
        "webhook-id": "msg_1",
        "webhook-timestamp": "1",
        "webhook-signature": "v1,/Pg3D0au/cuVtF2Guo3MS57J79/MvJN2q4wIhs0KTXY=",
    }


def test_a_library_of_standard_webhooks_verifies_with_the_key_in_base64() -> None:
    secret = "whsec_" + b64encode(KEY).decode()
    assert Webhook(secret).verify(BODY, signed(KEY)) == {"payload": {"total": 5}}
    assert check_keys([secret]) == (KEY,)


def test_names_of_headers_have_no_case() -> None:
    verify_signature({name.title(): value for name, value in signed(KEY).items()}, BODY, KEY)


def test_while_a_key_is_replaced_either_is_accepted() -> None:
    both = signed(KEY, OLD)
    verify_signature(both, BODY, OLD)
    verify_signature(both, BODY, KEY)
    verify_signature(signed(OLD), BODY, [KEY, OLD])


def test_another_key_is_refused() -> None:
    with pytest.raises(Unauthenticated, match="No matching signature"):
        verify_signature(signed(OTHER), BODY, [KEY, OLD])


@given(st.binary(max_size=64))
def test_another_body_is_refused(body: bytes) -> None:
    if body != BODY:
        with pytest.raises(Unauthenticated):
            verify_signature(signed(KEY), body, KEY)


@pytest.mark.parametrize("header", ["webhook-id", "webhook-timestamp"])
def test_another_id_or_timestamp_is_refused(header: str) -> None:
    headers = signed(KEY)
    changed = {"webhook-id": "other", "webhook-timestamp": str(int(headers["webhook-timestamp"]) + 1)}
    with pytest.raises(Unauthenticated, match="No matching signature"):
        verify_signature(headers | {header: changed[header]}, BODY, KEY)


@pytest.mark.parametrize(("age_seconds", "says"), [(400, "too old"), (-400, "too new")])
def test_a_request_of_another_time_is_refused(age_seconds: int, says: str) -> None:
    with pytest.raises(Unauthenticated, match=says):
        verify_signature(signed(KEY, age_seconds=age_seconds), BODY, KEY)


@pytest.mark.parametrize("stamp", ["", "x", "nan", "inf", "²", "9" * 400])
def test_a_malformed_timestamp_is_refused(stamp: str) -> None:
    with pytest.raises(Unauthenticated):
        verify_signature(signed(KEY) | {"webhook-timestamp": stamp}, BODY, KEY)


@pytest.mark.parametrize("signature", ["", "v1,", "v1,é", "v1,a", "v0,00", "00", "v1,00," * 1_000])
def test_a_malformed_signature_is_refused(signature: str) -> None:
    with pytest.raises(Unauthenticated):
        verify_signature(signed(KEY) | {"webhook-signature": signature}, BODY, KEY)


def test_an_unsigned_request_is_refused() -> None:
    with pytest.raises(Unauthenticated, match="Missing required headers"):
        verify_signature({}, BODY, KEY)


@given(st.text(max_size=300))
def test_any_message_id_makes_a_header(message_id: str) -> None:
    headers = sign(message_id, BODY, int(time.time()), [KEY])
    assert headers["webhook-id"].isascii()
    assert headers["webhook-id"].isprintable()
    verify_signature(headers, BODY, KEY)


def test_keys_must_be_secrets_and_are_never_shown() -> None:
    with pytest.raises(InvalidRequest, match="there is no key"):
        check_keys([])
    for key in ("hunter2", "whsec_aHVudGVyMg=="):
        with pytest.raises(InvalidRequest, match="at least 16 bytes") as caught:
            check_keys([key])
        assert key not in str(caught.value)
    with pytest.raises(InvalidRequest, match="must be base64"):
        check_keys(["whsec_hunter2!"])
