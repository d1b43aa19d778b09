"""What a factory makes of a message does not depend on the messages that it was given before."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import msgspec
from hypothesis import given, target
from hypothesis import strategies as st

from postroom.application.mailbox.message_factory import MessageFactory, SendRequest
from postroom.application.messages import NewMessage
from postroom.application.tracing import correlate
from postroom.domain.envelope.headers import extract_mailbox_item
from postroom.domain.errors import InvalidRequest
from tests.support.envelopes import build_envelope

NOW = 1_760_000_000_123_456


def choices(*values: Any) -> st.SearchStrategy[Any]:
    # Few values, so that neighbours often have the same; some are equal to valid ones, and of another type.
    return st.sampled_from([None, *values])


HEADERS: dict[str, st.SearchStrategy[Any]] = {
    "content_type": choices("text/plain", "", 0),
    "correlation_id": choices("a", "b", "", 0, b"a"),
    "causality_parent": choices("a", "b", b"a"),
    "principal": choices("a", "b"),
    "priority": st.sampled_from([5, 5.0, 1, True, 11]),
    "ttl_seconds": st.sampled_from([0, False, 60, 60.0]),
    "trace_id": choices("a", "b", ""),
    "span_id": choices("a", "b", ""),
    "schema_url": choices("a", "b"),
    "schema_version": choices("a", "b", 1),
}
MESSAGES = st.builds(
    lambda fields: NewMessage(**fields),
    st.fixed_dictionaries(
        {"topic": st.sampled_from(["a", "b", "a b", ""]), "payload": st.binary(max_size=5)},
        optional=HEADERS
        | {
            "idem_key": choices("k", ""),
            "message_id": choices("own", "0198c0de-0000-7000-8000-00000000000a"),
            "published_at_us": choices(NOW, NOW + 1, float(NOW), -1),
            "attrs": st.sampled_from([{}, {"b": "1", "a": b"\xff"}, {"a": 1}]),
        },
    ),
)


def new_factory() -> MessageFactory:
    return MessageFactory("acme@local", lambda: NOW, lambda: UUID(int=7))


@given(st.lists(MESSAGES, max_size=6), st.lists(choices("x", "y"), min_size=1, max_size=3))
def test_a_message_becomes_the_same_command_whatever_came_before(
    messages: list[NewMessage], corr_ids: list[str | None]
) -> None:
    factory = new_factory()
    for corr_id in corr_ids:
        with correlate(corr_id or "generated"):
            make = factory.for_call()
            for message in messages:
                request = request_or_error(make, message)
                assert request == request_or_error(new_factory().from_message, message)
                if isinstance(request, SendRequest):
                    assert request.command.envelope == expected_envelope(message, corr_id or "generated")
                    assert_headers_are_those_of_the_envelope(request)


KEYS = choices(None, None, "k", "l", "\xe9", "", "x" * 256, 0)
VARIATIONS = st.fixed_dictionaries(
    {"payload": st.sampled_from([b"", b"a", b"a", b"b" * 200, b"b" * 200, "a"])},
    optional={
        "idem_key": KEYS,
        "sticky_key": KEYS,
        "unique_key": KEYS,
        "priority": st.sampled_from([5, 5, 5, 1, True]),
        "attrs": st.sampled_from([{}, {}, {}, {"a": "1"}]),
    },
)


@given(MESSAGES, st.lists(VARIATIONS, min_size=2, max_size=6), choices("x"))
def test_the_commands_of_a_batch_are_those_of_its_messages_one_by_one(
    message: NewMessage, variations: list[dict[str, Any]], corr_id: str | None
) -> None:
    messages = [msgspec.structs.replace(message, **each) for each in variations]
    with correlate(corr_id or "generated"):
        together = new_factory().from_batch(messages)
        one_by_one = [request_or_error(new_factory().from_message, each) for each in messages]
    assert together is None or together == one_by_one
    target(together is not None)


def request_or_error(make: Callable[[object], SendRequest], message: NewMessage) -> SendRequest | str:
    try:
        return make(message)
    except InvalidRequest as error:
        return str(error)


def expected_envelope(message: NewMessage, corr_id: str) -> bytes:
    names = [*HEADERS.keys() - {"correlation_id"}, "topic", "payload", "attrs"]
    return build_envelope(
        **{name: getattr(message, name) for name in names},
        namespace="acme",
        message_id=message.message_id or str(UUID(int=7)),
        published_at_us=NOW if message.published_at_us is None else message.published_at_us,
        correlation_id=message.correlation_id or corr_id,
        trace_flags=1 if message.span_id else 0,
    )


def assert_headers_are_those_of_the_envelope(request: SendRequest) -> None:
    item, headers = extract_mailbox_item(request.command.envelope), request.command.headers
    for name in headers.__struct_fields__:
        if name not in ("message_id", "custom_headers"):
            assert getattr(headers, name) == getattr(item, name)
    assert (headers.custom_headers or {}) == item.custom_headers
    assert item.message_id == request.message_id
