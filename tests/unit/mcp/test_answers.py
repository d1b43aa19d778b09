"""Answers of tools are masked, within bounds, and show what can't be seen."""

import json
from typing import Any

import pytest

from postroom.adapters.mcp.answers import (
    MAX_BYTES,
    ROW_BYTES,
    answer_page,
    answer_rows,
    answer_value,
    make_error,
    shrink,
)
from postroom.application.masking import NO_MASK, Mask
from postroom.application.page import Page
from postroom.application.text import visible
from postroom.domain.errors import InvalidRequest, Saturated


def size(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode ✓\n\ttext", "plain, ünïcode ✓\n\ttext"),
        ("\u202eabc", "\\u202eabc"),
        ("a\U000e0041b", "a\\U000e0041b"),
        ("a\u200bb\r\x1b[31m", "a\\u200bb\\x0d\\x1b[31m"),
        ("\ud800", "\\ud800"),
        ("", ""),
    ],
)
def test_characters_that_can_not_be_seen_are_escaped(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_a_value_is_cut_only_if_it_is_too_large_and_says_how_much_is_left_out() -> None:
    value = {"text": "x" * 3_000, "items": [*range(90)]}
    assert shrink(value, MAX_BYTES) == value
    cut = shrink({"text": "x" * 100_000, "items": [*range(1_000)]}, 8_000)
    assert size(cut) <= 8_000
    assert cut["text"].endswith(" more characters]")
    assert cut["items"][-1].endswith(" more]")
    deep: Any = "x" * 1_000
    for _ in range(30):
        deep = {"member": [deep] * 3} if size(deep) < 1 << 20 else [deep]
    assert size(shrink(deep, MAX_BYTES)) <= MAX_BYTES
    many = {f"header {number}": "x" * 100 for number in range(5_000)}
    assert size(shrink(many, ROW_BYTES)) <= ROW_BYTES


@pytest.mark.parametrize("length", [1, 500, 5_000, 500_000])
async def test_pages_lead_to_the_end_whatever_the_size_of_rows(length: int) -> None:
    rows = [{"number": number, "text": "é" * length} for number in range(57)]

    async def ask(limit: int) -> Page[Any]:
        end = start + limit
        return Page(tuple(rows[start:end]), str(end) if end < len(rows) else None)

    numbers: list[int] = []
    start = 0
    cursor: str | None = "0"
    while cursor is not None:
        start = int(cursor)
        answer = await answer_page("items", ask, NO_MASK, 20)
        assert size(answer["data"]) <= MAX_BYTES + 100
        numbers += [each["number"] for each in answer["data"]["items"]]
        cursor = answer.get("next_cursor")
    assert numbers == [*range(57)]


@pytest.mark.parametrize("length", [1, 2_000, 50_000])
def test_rows_of_a_whole_result_are_paged_by_their_number(length: int) -> None:
    rows = [{"number": number, "text": "x" * length} for number in range(57)]
    numbers: list[int] = []
    cursor: str | None = None
    while True:
        answer = answer_rows("topics", rows, NO_MASK, 20, cursor)
        assert size(answer["data"]) <= MAX_BYTES + 100
        numbers += [each["number"] for each in answer["data"]["topics"]]
        cursor = answer.get("next_cursor")
        if cursor is None:
            break
    assert numbers == [*range(57)]
    assert answer_rows("topics", rows, NO_MASK, 20, "1000")["data"]["topics"] == []
    with pytest.raises(InvalidRequest, match="next_cursor"):
        answer_rows("topics", rows, NO_MASK, 20, "-1")


def test_members_of_the_names_of_hidden_headers_are_hidden_at_any_depth() -> None:
    mask = Mask(headers=("X-Card", "principal"))
    value = {
        "headers": {"x_card": "4111", "other": "shown"},
        "jobs": [{"principal": "shop", "spec": {"principals": ["shop"], "text": "4111", "topics": ["a"]}}],
        "story": [{"text": "shown"}],
        "principal": None,
    }
    data = answer_value(value, mask)["data"]
    assert data["headers"] == {"x_card": "[masked]", "other": "shown"}
    assert data["jobs"] == [
        {
            "principal": "[masked]",
            "spec": {"principals": ["[masked]"], "text": "[masked]", "topics": ["a"]},
        }
    ]
    assert (data["story"], data["principal"]) == ([{"text": "shown"}], None)
    assert answer_value(value, NO_MASK)["data"] == value


def test_the_message_of_an_error_is_data_as_it_may_quote_names_of_others() -> None:
    answer = make_error(Saturated("The topic \u202e is full.", 5))
    assert answer["data"] == {"message": "The topic \\u202e is full."}
    assert (answer["code"], answer["retry_after_ms"]) == ("E_SATURATED", 5)
    assert "topic" not in {name for name in answer if name != "data"}
