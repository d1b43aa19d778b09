"""Definitions of streams and consumers, and how they differ from what is there."""

import msgspec
import pytest

from postroom.adapters.nats.definitions import ConsumerDefinition, StreamDefinition, compare, with_defaults
from postroom.domain.errors import InvalidRequest

EVENTS = StreamDefinition(name="SEA_EVENTS", subjects=("sea.event.>",), max_age_ms=7 * 86_400_000)
READER = ConsumerDefinition(stream="SEA_EVENTS", durable="reader", max_deliver=20)


def test_what_is_missing_is_made_with_the_defaults_of_the_specification() -> None:
    made = {each.field: each.desired for each in compare(READER, None)}
    assert made == {
        "filter_subjects": (),
        "ack_policy": "explicit",
        "deliver_policy": "all",
        "ack_wait_ms": 120_000,
        "max_deliver": 20,
        "server_max_deliver": None,
        "max_ack_pending": 50,
    }


def test_what_is_as_defined_differs_in_nothing() -> None:
    assert compare(EVENTS, with_defaults(EVENTS)) == []
    assert compare(READER, with_defaults(READER)) == []


def test_what_a_definition_leaves_out_stays_as_it_is() -> None:
    present = msgspec.structs.replace(with_defaults(EVENTS), max_msgs=5, compression="s2", discard="new")
    assert compare(EVENTS, present) == []


def test_a_lower_limit_is_announced_to_delete_messages_and_a_higher_one_is_not() -> None:
    (lower,) = compare(EVENTS, msgspec.structs.replace(with_defaults(EVENTS), max_age_ms=8 * 86_400_000))
    (higher,) = compare(EVENTS, msgspec.structs.replace(with_defaults(EVENTS), max_age_ms=86_400_000))
    (first,) = compare(EVENTS, msgspec.structs.replace(with_defaults(EVENTS), max_age_ms=None))
    assert lower.note == first.note == "messages beyond it are deleted at once"
    assert higher.note is None


@pytest.mark.parametrize(
    ("field", "value", "refused"),
    [("storage", "memory", True), ("retention", "workqueue", True), ("retention", "interest", False)],
)
def test_what_nats_can_not_change_is_marked(field: str, value: str, refused: bool) -> None:
    wanted = msgspec.structs.replace(EVENTS, **{field: value})
    (difference,) = compare(wanted, with_defaults(EVENTS))
    assert bool(difference.refusal) is refused


def test_a_limit_that_the_server_keeps_is_taken_from_it() -> None:
    present = msgspec.structs.replace(with_defaults(READER), server_max_deliver=20)
    (difference,) = compare(READER, present)
    assert (difference.field, difference.current, difference.desired) == ("server_max_deliver", 20, None)
    assert difference.note is not None


@pytest.mark.parametrize("name", ["", "a.b", "a b", "a*", "a>", "a/b"])
def test_a_name_that_nats_can_not_take_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="can't be the name of a stream"):
        StreamDefinition(name=name)


def test_limits_are_at_least_one() -> None:
    with pytest.raises(InvalidRequest, match="Stream SEA_EVENTS: max_bytes must be at least 1; it was 0"):
        StreamDefinition(name="SEA_EVENTS", max_bytes=0)


def test_a_new_stream_needs_subjects() -> None:
    with pytest.raises(InvalidRequest, match="its definition has no subjects"):
        compare(StreamDefinition(name="SEA_EVENTS"), None)


def test_a_new_stream_knows_message_ids_no_longer_than_it_keeps_messages() -> None:
    made = with_defaults(StreamDefinition(name="S", subjects=("s",), max_age_ms=1_000))
    assert isinstance(made, StreamDefinition)
    assert made.duplicate_window_ms == 1_000
