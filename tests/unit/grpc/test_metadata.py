"""Values of gRPC metadata."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.grpc.calls import read_metadata, read_number, read_text, write_text
from postroom.domain.arguments import MAX_INT
from postroom.domain.errors import InvalidRequest


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
def test_any_text_becomes_visible_ascii_and_reads_back(text: str) -> None:
    value = write_text(text)
    assert all("!" <= each <= "~" for each in value)
    assert read_text(value) == text


@pytest.mark.parametrize(
    "value", ["", "-1", "1.5", "+1", " 1", "1_0", "٣", "0x1", str(MAX_INT + 1), "9" * 500]
)
def test_what_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="postroom-epoch must be a number"):
        read_number({"postroom-epoch": value}, "postroom-epoch")


def test_numbers_read_back_and_missing_ones_are_none() -> None:
    assert read_number({"postroom-epoch": str(MAX_INT)}, "postroom-epoch") == MAX_INT
    assert read_number({}, "postroom-epoch") is None


def test_binary_metadata_is_left_out() -> None:
    assert read_metadata([("a", "1"), ("b-bin", b"2")]) == {"a": "1"}
    assert read_metadata(None) == {}
