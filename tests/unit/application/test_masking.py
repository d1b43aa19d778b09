"""Masks hide headers and fields of payloads, whatever their form."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.application.masking import MASK, Mask
from postroom.domain.envelope.content import DecodedPayload, PayloadFormat
from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.errors import InvalidRequest

CARD = Mask(payload_fields=("/card/number", "/items/*/secret", "/a~1b/~0c", "/list/1"))


def payload(text: str, format_: PayloadFormat = PayloadFormat.JSON) -> DecodedPayload:
    return DecodedPayload(format_, text.encode(), text)


def hidden(value: Any) -> Any:
    shown = CARD.hide_fields(payload(json.dumps(value)))
    assert shown is not None
    assert shown.text is not None
    assert shown.data == shown.text.encode()
    return json.loads(shown.text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"card": {"number": 4111, "name": "x"}}, {"card": {"number": MASK, "name": "x"}}),
        ({"items": [{"secret": 1}, {"open": 2}, 3]}, {"items": [{"secret": MASK}, {"open": 2}, 3]}),
        ({"items": {"k": {"secret": [1]}}}, {"items": {"k": {"secret": MASK}}}),
        ({"a/b": {"~c": 1}}, {"a/b": {"~c": MASK}}),
        ({"list": [0, 1, 2]}, {"list": [0, MASK, 2]}),
        ({"card": {"number": {"first": [1, 2]}}}, {"card": {"number": MASK}}),
        ({"card": "none"}, {"card": "none"}),
    ],
    ids=["member", "elements", "members", "escapes", "index", "whole", "absent"],
)
def test_what_a_pointer_names_is_hidden_and_the_rest_is_not(value: Any, expected: Any) -> None:
    assert hidden(value) == expected


def test_a_payload_without_the_fields_stays_as_it_was_sent() -> None:
    decoded = payload('{ "b": 1.10, "huge": 123456789012345678901234567890 }')
    assert CARD.hide_fields(decoded) is decoded


def test_a_name_that_is_repeated_hides_nothing_from_the_mask() -> None:
    shown = CARD.hide_fields(payload('{"card": {"number": "4111"}, "card": {}}'))
    assert shown is not None
    assert "4111" not in (shown.text or "")
    assert b"4111" not in shown.data


@pytest.mark.parametrize(
    "decoded",
    [
        payload("card: 4111", PayloadFormat.TEXT),
        DecodedPayload(PayloadFormat.JSON, b'{"card": 4111', None, ("is not JSON",)),
        DecodedPayload(PayloadFormat.BINARY, b"\x08\x01"),
        payload("[" * 100_000 + "]" * 100_000),
    ],
    ids=["text", "broken", "binary", "deep"],
)
def test_a_payload_whose_fields_are_unknown_is_hidden_as_a_whole(decoded: DecodedPayload) -> None:
    assert CARD.hide_fields(decoded) is None
    assert Mask().hide_fields(decoded) is decoded


@given(value=st.recursive(st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3)))
def test_a_masked_value_is_in_no_part_of_what_is_shown(value: Any) -> None:
    shown = CARD.hide_fields(payload(json.dumps({"card": {"number": ["4111-secret", value]}})))
    assert shown is not None
    assert b"4111-secret" not in shown.data


def test_headers_are_hidden_whatever_the_case_of_their_names() -> None:
    item = MailboxItem(
        message_id="m",
        timestamp=0,
        topic="t",
        principal="eve",
        correlation_id="c",
        custom_headers={"Authorization": "x", "other": "y"},
        envelope_blob=b"",
    )
    shown = Mask(headers=("AUTHORIZATION", "Principal", "trace_id")).hide_item(item)
    assert shown.custom_headers == {"Authorization": MASK, "other": "y"}
    assert (shown.principal, shown.correlation_id, shown.trace_id) == (MASK, "c", None)
    assert Mask().hide_item(item) is item


@pytest.mark.parametrize(
    "mask",
    [
        Mask(payload_fields=("card",)),
        Mask(payload_fields=("",)),
        Mask(payload_fields=("/a~2",)),
        Mask(payload_fields="/a"),  # type: ignore[arg-type]
        Mask(headers=("",)),
        Mask(headers=(1,)),  # type: ignore[arg-type]
        Mask(headers=("a",) * 101),
    ],
    ids=["relative", "empty", "escape", "text", "no-name", "number", "many"],
)
def test_a_malformed_rule_is_refused(mask: Mask) -> None:
    with pytest.raises(InvalidRequest, match="mask_"):
        mask.validate()


@pytest.mark.parametrize("name", ["correlation-id", "Correlation ID", "CORRELATION_ID"])
def test_a_header_is_hidden_however_its_name_is_written(name: str) -> None:
    mask = Mask(headers=(name, "x_card")).validate()
    item = MailboxItem(
        message_id="m",
        timestamp=0,
        topic="t",
        correlation_id="4111",
        custom_headers={"X-Card": "4111"},
        envelope_blob=b"",
    )
    assert "4111" not in str(mask.hide_item(item))
    assert mask.covers_header("correlation_id")


@pytest.mark.parametrize("name", ["topic", "Message-ID", "timestamp"])
def test_a_header_that_is_always_shown_is_no_rule_of_a_mask(name: str) -> None:
    with pytest.raises(InvalidRequest, match="can't be hidden"):
        Mask(headers=(name,)).validate()
