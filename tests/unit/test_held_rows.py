"""Rows that a capture holds in the outbox table, as another mapping reads them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.postgres.capture.event_rows import MAX_ROW_BYTES, HeldRow, Row, read_held_row
from postroom.adapters.postgres.capture.settings import CaptureColumns, CaptureSettings
from postroom.domain.errors import InvalidRequest

TEXT = 25
SETTINGS = CaptureSettings("events", columns=CaptureColumns(payload="body"))
TEXTS = {"id": b"1", "aggregate_type": b"order", "aggregate_id": b"o-1", "event_type": b"order_placed"}


@given(
    values=st.dictionaries(st.text(max_size=5), st.none() | st.binary(max_size=20)),
    encoding=st.sampled_from(["utf-8", "latin-1", "cp1252", "euc_jp"]),
)
def test_what_is_held_of_a_row_is_exact_whatever_its_bytes_are(
    values: dict[str, bytes | None], encoding: str
) -> None:
    row = Row("public.events", values, dict.fromkeys(values, TEXT), 5)
    held = msgspec.json.decode(msgspec.json.encode(HeldRow.of(row, encoding)), type=HeldRow)
    assert held.row() == row


@given(st.binary(max_size=50))
def test_a_payload_that_is_no_text_is_read_as_it_was(body: bytes) -> None:
    row = Row("public.events", TEXTS | {"body": body}, dict.fromkeys([*TEXTS, "body"], TEXT), 5)
    read = read_held_row(SETTINGS, msgspec.json.encode(HeldRow.of(row, "utf-8")))
    assert (read.payload, read.unreadable) == (body, None)


def test_a_column_that_was_too_large_to_hold_is_named_only_if_the_settings_need_it() -> None:
    values = TEXTS | {"body": b"2", "other": b"x" * MAX_ROW_BYTES}
    row = Row("public.events", values, dict.fromkeys(values, TEXT), 5)
    payload = msgspec.json.encode(HeldRow.of(row, "utf-8"))
    assert read_held_row(SETTINGS, payload).payload == b"2"
    other = CaptureSettings("events", columns=CaptureColumns(payload="other"))
    with pytest.raises(InvalidRequest, match="Its column other was not held, as the row has more than"):
        read_held_row(other, payload)


@given(st.binary(max_size=50) | st.sampled_from([b'{"table":"public.events"}', b"[]", b"\xff"]))
def test_whatever_is_stored_is_read_or_refused(payload: bytes) -> None:
    with pytest.raises(InvalidRequest, match="Its payload is not a row of a captured table"):
        read_held_row(SETTINGS, payload)
