"""Filters in the URLs of the console."""

from urllib.parse import parse_qsl, urlencode

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.adapters.console.event_filter import PARAMETERS, parse_filter, write_filter, write_time
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import Status
from postroom.domain.search import Cursor, EventFilter, Order
from tests.support.examples import examples

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
named = texts.filter(str.strip)
filters = st.builds(
    EventFilter,
    start_time=st.none() | st.integers(-(1 << 63) + 1, 0),
    end_time=st.none() | st.integers(0, (1 << 63) - 1),
    topics=st.lists(texts, max_size=3, unique=True).map(tuple),
    principals=st.lists(texts, max_size=3, unique=True).map(tuple),
    statuses=st.lists(st.sampled_from(Status), max_size=3, unique=True).map(tuple),
    message_id=st.none() | texts,
    correlation_id=st.none() | texts,
    trace_id=st.none() | texts,
    namespace=st.none() | texts,
    headers=st.dictionaries(texts, st.text(st.characters(exclude_categories=["Cs"])), max_size=3),
    text=st.none() | named,
    match=st.none() | st.sampled_from(["refund", "pay* over", "été 東*"]),
    order=st.sampled_from(Order),
    limit=st.integers(1, 1_000),
    cursor=st.none() | st.builds(Cursor, st.integers(0, 1 << 40), st.integers(0, 1 << 60)).map(Cursor.encode),
)


@settings(max_examples=examples(200))
@given(wanted=filters)
def test_a_filter_survives_its_url(wanted: EventFilter) -> None:
    pairs = write_filter(wanted)
    assert parse_filter(parse_qsl(urlencode(pairs), keep_blank_values=True)) == wanted
    assert write_filter(parse_filter(pairs)) == pairs


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.sampled_from(sorted(PARAMETERS)), st.text(max_size=20)), max_size=4))
def test_any_text_is_a_filter_or_one_clear_error(pairs: list[tuple[str, str]]) -> None:
    error: InvalidRequest | None = None
    try:
        assert msgspec.json.encode(parse_filter(pairs))
    except InvalidRequest as refusal:
        error = refusal
    assert error is None or str(error).endswith(".")


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("2026-01-31T08:00:00Z", 1_769_846_400_000),
        ("2026-01-31T09:00:00.250+01:00", 1_769_846_400_250),
        ("2026-01-31", 1_769_817_600_000),
        ("1769846400000", 1_769_846_400_000),
        ("-1", -1),
    ],
)
def test_a_time_is_rfc_3339_or_milliseconds(text: str, ms: int) -> None:
    assert parse_filter([("start_time", text)]).start_time == ms
    assert parse_filter([("start_time", write_time(ms))]).start_time == ms


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([("start_time", "yesterday")], "not a time"),
        ([("header", "tenant")], "name=value"),
        ([("header", "a=1"), ("header", "a=2")], "two values"),
        ([("statuses", "lost")], "Unknown status"),
        ([("message_id", "a"), ("message_id", "b")], "twice"),
        ([("order", "up")], "newest or oldest"),
        ([("limit", "ten")], "not a number"),
        ([("cursor", "x")], "next_cursor"),
        ([("topics", "\ud800")], "surrogate"),
    ],
)
def test_what_is_malformed_is_named(pairs: list[tuple[str, str]], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_filter(pairs)
