"""Differences of payloads: JSON by structure, other content line by line, both bounded."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.console import comparison
from postroom.adapters.console.comparison import Comparison, Difference, Line, compare_payloads
from postroom.application.masking import MASK, Mask
from postroom.domain.envelope.content import DecodedPayload, PayloadFormat

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab~/ü\u202e", max_size=3),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text("ab/~", max_size=2), children),
    max_leaves=12,
)


def payload(text: str, format_: PayloadFormat = PayloadFormat.JSON) -> DecodedPayload:
    """Return a payload of text."""
    return DecodedPayload(format_, text.encode(errors="surrogatepass"), text)


def compare(first: Any, second: Any) -> list[tuple[str, ...]]:
    """Return the differences of two values."""
    found = compare_payloads(payload(json.dumps(first)), payload(json.dumps(second)))
    assert not found.lines
    assert found.is_whole
    return [tuple(each) for each in found.differences]


def test_values_are_compared_by_the_fields_that_have_them() -> None:
    first = {"id": 7, "lines": [{"sku": "a", "n": 1}], "note": None, "x/y~z": {"deep": True}}
    second = {"x/y~z": {"deep": False}, "id": 7, "lines": [{"sku": "a", "n": 2}], "by": "ü"}
    assert compare(first, second) == [
        ("/lines/0/n", "differs", "1", "2"),
        ("/note", "first", "null", ""),
        ("/x~1y~0z/deep", "differs", "true", "false"),
        ("/by", "second", "", '"ü"'),
    ]
    assert compare(first, dict(reversed(first.items()))) == []


def test_elements_of_lists_are_aligned() -> None:
    assert compare([1, 2, 3, 4], [1, 3, 4, 5]) == [("/1", "first", "2", ""), ("/3", "second", "", "5")]
    first, second = [{"id": n} for n in range(5)], [{"id": n} for n in (9, 0, 1, 2, 33, 4)]
    assert compare(first, second) == [
        ("/0", "second", "", '{"id": 9}'),
        ("/3/id → /4/id", "differs", "3", "33"),
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1", "1.0"),
        ("1", '"1"'),
        ("1", "true"),
        ("0", "false"),
        ("null", '""'),
        ("[]", "{}"),
        ("1e5", "100000"),
    ],
)
def test_values_of_other_types_and_numbers_that_are_written_otherwise_differ(first: str, second: str) -> None:
    found = compare_payloads(payload(first), payload(second))
    assert found.differences == [Difference("/", "differs", first, second)]


def test_numbers_keep_all_digits() -> None:
    first, second = "9" * 5_000 + "1", "9" * 5_000 + "2"
    (difference,) = compare_payloads(payload(first), payload(second)).differences
    assert (difference.first, difference.second) == (first, second)


@given(VALUES, VALUES)
def test_values_differ_if_and_only_if_their_json_does(first: Any, second: Any) -> None:
    is_same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert (compare(first, second) == []) == is_same


def test_whether_hidden_values_differ_is_not_told() -> None:
    mask = Mask(payload_fields=("/card", "/people/*/name"))
    texts = [
        {"card": card, "people": [{"name": name}], "shop": "north"}
        for card, name in (("4111", "ann"), ("4111", "bob"))
    ]
    first, second = (mask.hide_fields(payload(json.dumps(each))) for each in texts)
    assert first is not None
    assert second is not None
    hidden = json.dumps(MASK)
    assert compare_payloads(first, second).differences == [
        Difference("/card", "hidden", hidden, hidden),
        Difference("/people/0/name", "hidden", hidden, hidden),
    ]


def test_text_is_compared_line_by_line_with_the_lines_around() -> None:
    lines = [f"line {number}" for number in range(40)]
    changed = [*lines[:10], "new", *lines[11:30], *lines[31:]]
    found = compare_payloads(
        payload("\n".join(lines), PayloadFormat.TEXT), payload("\n".join(changed), PayloadFormat.TEXT)
    )
    marks = "".join(each.mark or "…" for each in found.lines)
    assert marks == "   -+   …   -   "
    assert Line("-", "line 10") in found.lines
    assert Line("+", "new") in found.lines
    assert compare_payloads(payload("a"), payload("a", PayloadFormat.TEXT)) == Comparison(lines=[])


def test_bytes_are_compared_in_hexadecimal() -> None:
    first, second = (
        DecodedPayload(PayloadFormat.BINARY, bytes(range(64)) + end, None) for end in (b"\0", b"\1")
    )
    found = compare_payloads(first, second)
    assert [each.text.split()[:2] for each in found.lines if each.mark.strip()] == [
        ["00000040", "00"],
        ["00000040", "01"],
    ]


def test_only_the_first_part_of_large_payloads_is_compared() -> None:
    large = json.dumps(list(range(200_000)))
    found = compare_payloads(payload(large), payload(large + " "))
    assert (found.differences, found.lines, found.is_whole) == ((), [], False)
    found = compare_payloads(payload(large), payload("[9" + large[2:]))
    assert [each.mark for each in found.lines][:3] == [" ", "-", "+"]
    many = [f"{number}" for number in range(5_000)]
    found = compare_payloads(
        payload("\n".join(many), PayloadFormat.TEXT), payload("\n".join(many[::-1]), PayloadFormat.TEXT)
    )
    assert len(found.lines) + found.omitted <= 2 * comparison.MAX_LINES
    assert not found.is_whole


def test_many_differences_are_counted() -> None:
    found = compare_payloads(payload(json.dumps([0] * 900)), payload(json.dumps([1] * 900)))
    assert (len(found.differences), found.omitted) == (comparison.MAX_DIFFERENCES, 400)


def test_lists_of_lists_are_aligned_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MAX_PAIRS", 100)
    first, second = ([[number * step for number in range(9)] for step in range(9)] for _ in range(2))
    second[8].insert(0, -1)
    assert len(compare(first, second)) == 10  # by index: the place for more pairs is used up


@pytest.mark.parametrize("depth", [900, 100_000])
def test_values_that_are_nested_too_deep_are_compared_as_text(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    found = compare_payloads(payload(deep), payload(deep[:depth] + "1" + deep[depth:]))
    assert not found.differences
