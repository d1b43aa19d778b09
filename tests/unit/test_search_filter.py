from typing import Any

import msgspec
import pytest

from postroom.domain.errors import InvalidRequest
from postroom.domain.message import Status
from postroom.domain.search import (
    BodyRules,
    Cursor,
    EventFilter,
    FoundMessage,
    Order,
    parse_status,
    searchable_text,
    searchable_words,
    topic_matches,
)
from tests.support.envelopes import build_envelope

MESSAGE = FoundMessage(
    message_id="msg-1",
    timestamp=1_697_000_000_123,
    topic="admin.users.created",
    content_type="application/json",
    correlation_id="corr-1",
    principal="user-123",
    namespace="admin",
    trace_id="trace-1",
    custom_headers={"Region": "EU-West", "tenant": "blue"},
    envelope_blob=b"payload-word",
    mailbox="admin@p1",
    position=7,
    status=Status.IN_FLIGHT,
    attempts=2,
    shard=3,
)


@pytest.mark.parametrize(
    ("pattern", "topic"),
    [
        ("admin.users.created", "admin.users.created"),
        ("admin.users.*", "admin.users.created"),
        ("admin.users.*", "admin.users.roles.assigned"),
        ("admin.users.*", "admin.users."),
        ("*.created", "admin.users.created"),
        ("admin.*.created", "admin.users.created"),
        ("a*b*c", "a-b-b-c"),
        ("**", "anything"),
        ("*", ""),
        ("a*a", "aa"),
    ],
)
def test_a_topic_matches_its_own_name_and_globs_over_any_run_of_characters(pattern: str, topic: str) -> None:
    assert topic_matches(pattern, topic)


@pytest.mark.parametrize(
    ("pattern", "topic"),
    [
        ("admin.users", "admin.users.created"),
        ("admin.users.*", "admin.users"),
        ("admin.users.*", "admin_users.created"),
        ("admin.users.*", "Admin.users.created"),
        ("*.created", "admin.users.created.twice"),
        ("a*a", "a"),
        ("a*b*c", "a-c-b"),
        ("ab*bc", "abc"),
        ("admin.?sers", "admin.users"),
        ("[a]*", "a.b"),
        ("a_c*", "abc"),
        ("a%", "abc"),
    ],
)
def test_a_glob_is_case_sensitive_covers_the_whole_topic_and_knows_only_the_star(
    pattern: str, topic: str
) -> None:
    assert not topic_matches(pattern, topic)


def test_a_hostile_glob_is_answered_at_once() -> None:
    assert not topic_matches("*a" * 100 + "*b", "a" * 10_000)


def test_an_empty_filter_matches_every_message() -> None:
    assert EventFilter().matches(MESSAGE)


@pytest.mark.parametrize(
    ("matching", "other"),
    [
        ({"start_time": 1_697_000_000_123}, {"start_time": 1_697_000_000_124}),
        ({"end_time": 1_697_000_000_123}, {"end_time": 1_697_000_000_122}),
        ({"topics": ("x", "admin.*")}, {"topics": ("x", "y.*")}),
        ({"principals": ("x", "user-123")}, {"principals": ("x", "user-12")}),
        ({"statuses": (Status.DEAD, Status.IN_FLIGHT)}, {"statuses": (Status.DEAD,)}),
        ({"message_id": "msg-1"}, {"message_id": "msg-2"}),
        ({"correlation_id": "corr-1"}, {"correlation_id": "corr"}),
        ({"trace_id": "trace-1"}, {"trace_id": "trace-2"}),
        ({"namespace": "admin"}, {"namespace": "shop"}),
        ({"mailbox": "admin@p1"}, {"mailbox": "admin@p2"}),
        (
            {"headers": {"tenant": "blue", "Region": "EU-West"}},
            {"headers": {"tenant": "blue", "Region": "EU"}},
        ),
        ({"headers": {"tenant": "blue"}}, {"headers": {"Tenant": "blue"}}),
        ({"text": "created"}, {"text": "deleted"}),
        ({"text": "eu-west USER-123"}, {"text": "eu-west user-124"}),
        ({"text": "region"}, {"text": "payload-word"}),
        ({"match": "CREATED user"}, {"match": "create"}),
        ({"match": "creat* west"}, {"match": "creat* north"}),
    ],
)
def test_each_field_of_a_filter_narrows_the_search(matching: dict[str, Any], other: dict[str, Any]) -> None:
    assert EventFilter(**matching).matches(MESSAGE)
    assert not EventFilter(**other).matches(MESSAGE)


def test_all_fields_of_a_filter_have_to_match() -> None:
    assert EventFilter(principals=("user-123",), namespace="admin").matches(MESSAGE)
    assert not EventFilter(principals=("user-123",), namespace="shop").matches(MESSAGE)


def test_an_absent_header_matches_no_filter_on_it() -> None:
    anonymous = msgspec.structs.replace(MESSAGE, principal=None, trace_id=None)
    assert not EventFilter(principals=("user-123",)).matches(anonymous)
    assert not EventFilter(trace_id="trace-1").matches(anonymous)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"start_time": 2, "end_time": 1}, "start_time 2 is later than the end_time 1"),
        ({"start_time": -(2**63) - 1}, "start_time -9223372036854775809 is too large"),
        ({"end_time": 2**63}, "end_time 9223372036854775808 is too large"),
        ({"topics": ("a", "")}, "One of the topics is empty"),
        ({"principals": ("",)}, "One of the principals is empty"),
        ({"topics": tuple(map(str, range(101)))}, "has 101 topics; give at most 100"),
        ({"headers": {str(n): "" for n in range(101)}}, "has 101 headers; give at most 100"),
        ({"message_id": ""}, "message_id is empty"),
        ({"correlation_id": ""}, "correlation_id is empty"),
        ({"trace_id": ""}, "trace_id is empty"),
        ({"namespace": ""}, "namespace is empty"),
        ({"mailbox": ""}, "mailbox is empty"),
        ({"text": " \t"}, "text to search for is blank"),
        ({"text": "x" * 1_001}, "has 1001 characters; give at most 1000"),
        ({"match": "?"}, "No word in '\\?' to match"),
        ({"match": "x" * 1_001}, "words to match have 1001 characters; give at most 1000"),
        ({"limit": 0}, "limit is 0; give 1 to 1000"),
        ({"limit": 1_001}, "limit is 1001; give 1 to 1000"),
        ({"offset": -1}, "offset is -1"),
        ({"offset": 1, "cursor": Cursor(1, 1).encode()}, "both a cursor and an offset"),
        ({"cursor": "nonsense"}, "Invalid cursor 'nonsense'"),
    ],
)
def test_a_filter_with_invalid_values_is_refused_when_constructed(
    wrong: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        EventFilter(**wrong)


def test_a_filter_read_from_a_request_is_checked_like_any_other() -> None:
    assert msgspec.convert({"topics": ["a.*"], "order": "oldest"}, EventFilter) == EventFilter(
        topics=("a.*",), order=Order.OLDEST_FIRST
    )
    with pytest.raises(InvalidRequest, match="limit is 0"):
        msgspec.convert({"limit": 0}, EventFilter)
    with pytest.raises(msgspec.ValidationError, match="topic"):
        msgspec.convert({"topic": "misspelt"}, EventFilter)


@pytest.mark.parametrize("limit", [1, 1_000])
def test_a_limit_at_either_bound_is_taken(limit: int) -> None:
    assert EventFilter(limit=limit).limit == limit


def test_a_page_is_a_hundred_messages_newest_first_unless_asked_otherwise() -> None:
    assert (EventFilter().limit, EventFilter().order) == (100, Order.NEWEST_FIRST)


def test_a_filter_knows_the_row_its_page_begins_after() -> None:
    assert EventFilter().after is None
    assert EventFilter(cursor=Cursor(-5, 9).encode()).after == Cursor(-5, 9)


@pytest.mark.parametrize("text", ["", "é", "AAAA", Cursor(1, 2).encode() + "!", Cursor(1, 2).encode() + "="])
def test_a_cursor_that_we_did_not_write_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="use next_cursor of the previous page"):
        Cursor.decode(text)


def test_free_text_searches_headers_only_and_never_across_two_of_them() -> None:
    lines = searchable_text(MESSAGE).split("\n")
    assert {"msg-1", "admin.users.created", "region", "eu-west", "user-123"} <= set(lines)
    assert "payload-word" not in lines


def test_words_are_of_all_headers_but_ids() -> None:
    assert {"admin", "users", "created", "json", "region", "eu", "blue"} <= set(searchable_words(MESSAGE))
    for id_ in ("message_id", "correlation_id", "trace_id"):
        assert not EventFilter(match=getattr(MESSAGE, id_)).matches(MESSAGE)


def test_bodies_are_searched_for_words_where_they_were_opted_in() -> None:
    body = build_envelope(
        message_id="m", topic="t", namespace="", published_at_us=0, payload=b"Refund 7", attrs={}
    )
    message = msgspec.structs.replace(MESSAGE, envelope_blob=body)
    wanted = EventFilter(match="refund user")
    assert not wanted.matches(message)
    assert wanted.matches(message, BodyRules(("x", "admin.*")))
    assert not wanted.matches(message, BodyRules(("x", "admin")))
    assert not EventFilter(text="refund").matches(message, BodyRules(("*",)))


def test_a_found_message_is_a_mailbox_item_whose_repr_hides_the_envelope() -> None:
    assert "envelope_blob=<12 bytes>" in repr(MESSAGE)
    assert "mailbox='admin@p1'" in repr(MESSAGE)


@pytest.mark.parametrize("status", Status)
def test_a_status_is_known_by_its_name_in_lower_case(status: Status) -> None:
    assert parse_status(status.name.lower()) is status


def test_an_unknown_status_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        InvalidRequest, match=r"Unknown status 'lost'; expected one of ready, in_flight, acked, dead"
    ):
        parse_status("lost")
