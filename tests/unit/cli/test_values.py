from datetime import UTC, datetime
from io import BytesIO

import pytest

from postroom.adapters.cli.mailbox import parse_changes
from postroom.adapters.cli.restrictions import parse_quota
from postroom.adapters.cli.values import (
    exact_duration,
    exact_size,
    format_duration,
    parse_duration,
    parse_pairs,
    parse_size,
    parse_time,
    read_words,
    readable,
)
from postroom.adapters.cli.verification import parse_expectation
from postroom.application.text import pluralize, printable
from postroom.domain.errors import InvalidRequest

NOW = datetime(2026, 1, 31, 8, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("500ms", 500),
        ("5s", 5_000),
        ("1.5s", 1_500),
        ("2m", 120_000),
        ("1h", 3_600_000),
        ("7d", 604_800_000),
        ("0", 0),
    ],
)
def test_durations_are_a_number_and_a_unit(text, ms):
    assert parse_duration(text) == ms


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1w", "5 s", "1e3s", "\N{ARABIC-INDIC DIGIT THREE}s"])
def test_anything_else_is_no_duration(text):
    with pytest.raises(InvalidRequest, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "0ms"), (200, "200ms"), (5_000, "5s"), (300_000, "5m"), (604_800_000, "7d")]
)
def test_durations_are_shown_in_their_largest_unit(ms, text):
    assert format_duration(ms) == text


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("2026-01-31T08:00:00Z", 1_769_846_400_000),
        ("2026-01-31T09:00:00+01:00", 1_769_846_400_000),
        ("2026-01-31T08:00:00", 1_769_846_400_000),
        ("2026-01-31", 1_769_817_600_000),
        ("1769846400000", 1_769_846_400_000),
        ("2h", 1_769_839_200_000),
    ],
)
def test_a_time_is_a_date_a_number_or_an_age(text, ms):
    assert parse_time(text, NOW) == ms


def test_anything_else_is_no_time():
    with pytest.raises(InvalidRequest, match="not a time"):
        parse_time("noon", NOW)


def test_pairs_are_names_and_values():
    assert parse_pairs(["a=1", "b=x=y", "c="], "--attr") == {"a": "1", "b": "x=y", "c": ""}


@pytest.mark.parametrize("digits", ["\N{ARABIC-INDIC DIGIT THREE}", "3\N{SUPERSCRIPT TWO}", "9" * 5_000])
@pytest.mark.parametrize(
    "parse",
    [
        lambda digits: parse_time(digits, NOW),
        lambda digits: parse_size(f"{digits}GB"),
        lambda digits: parse_quota(f"{digits}/1m", "--quota"),
        lambda digits: parse_expectation(f"{digits}:{'0' * 64}"),
        lambda digits: parse_changes({"policy.max_attempts": digits}, []),
        lambda digits: parse_changes({"policy.backoff_base_ms": digits}, []),
        lambda digits: parse_changes({"policy.backoff_base": f"{digits}ms"}, []),
    ],
)
def test_numbers_are_of_ascii_digits_and_not_longer_than_any_that_fits(parse, digits):
    with pytest.raises(InvalidRequest):
        parse(digits)


@pytest.mark.parametrize("texts", [["a"], ["=1"], ["a=1", "a=2"]])
def test_a_pair_without_a_name_or_given_twice_is_refused(texts):
    with pytest.raises(InvalidRequest, match="--attr"):
        parse_pairs(texts, "--attr")


def test_a_dash_stands_for_the_words_of_standard_input():
    assert read_words(["a", "-"], BytesIO(b"b c\nd\n")) == ["a", "b", "c", "d"]


def test_a_payload_is_shown_as_text_where_it_is_text():
    assert readable("grün".encode()) == ("grün", True)
    assert readable(b"\xff\x00") == ("/wA=", False)


def test_control_characters_are_escaped_but_line_feeds_and_tabs_are_not():
    assert printable("a\tb\nc\x1b[31m\x9b\x7f\r") == "a\tb\nc\\x1b[31m\\x9b\\x7f\\x0d"


def test_line_feeds_and_tabs_are_escaped_where_text_has_to_stay_on_its_line():
    assert printable("a\tb\nc", multiline=False) == "a\\tb\\nc"


@pytest.mark.parametrize("character", ["\u202e", "\u2066", "\u200f", "\u2028", "\ud800"])
def test_what_reorders_text_or_breaks_lines_is_escaped(character):
    assert printable(f"a{character}b") == f"a\\u{ord(character):04x}b"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GB", 10_000_000_000),
        ("10GiB", 10 * 2**30),
        ("1.5MB", 1_500_000),
        ("64 MiB", 64 * 2**20),
        ("500kB", 500_000),
        ("1KB", 1_000),
        ("7B", 7),
    ],
)
def test_sizes_are_a_number_and_a_decimal_or_binary_unit(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "10", "10G", "GB", "-1GB", "1kiB", "1e3MB"])
def test_anything_else_is_no_size(text):
    with pytest.raises(InvalidRequest, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["7d", "36h", "90s", "1500ms", "10m"])
def test_a_whole_duration_is_written_as_it_was_read(text):
    assert exact_duration(parse_duration(text)) == text


@pytest.mark.parametrize("text", ["10GB", "10GiB", "64MiB", "500kB", "1001B", "1024TiB"])
def test_a_whole_size_is_written_as_it_was_read(text):
    assert exact_size(parse_size(text)) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 events"), (1, "1 event"), (2, "2 events"), (12_345, "12,345 events")],
)
def test_a_count_takes_the_singular_for_one_only(count, text):
    assert pluralize(count, "event") == text


def test_an_irregular_plural_is_passed():
    assert [pluralize(count, "batch", "batches") for count in (1, 2)] == ["1 batch", "2 batches"]
