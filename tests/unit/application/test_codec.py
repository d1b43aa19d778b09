"""Events round-trip through records, of every schema version."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.application.mailbox.codec import KINDS, to_event, to_events, to_record
from postroom.domain.errors import BrokenLog
from postroom.domain.event import Event
from postroom.domain.integrity import message_checksum
from postroom.domain.mailbox.events import (
    LogTruncated,
    MailboxCreated,
    OwnershipTaken,
    TopicPaused,
    TopicPolicySet,
    TopicResumed,
)
from postroom.domain.message import (
    Headers,
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageReceived,
    MessageRedriven,
    MessageRequeued,
    MessageSent,
    MessageVisibilityExtended,
)
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import CHAIN, GENESIS, HEADERS, verify_chain

streams = st.binary(min_size=16, max_size=16)
digests = st.binary(min_size=32, max_size=32)
times = st.integers(0, 2**62)
counts = st.integers(0, 2**31)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
optional = st.none() | texts
base = (streams, counts, times)

headers = st.builds(
    Headers,
    times,
    *[optional] * 10,
    custom_headers=st.none() | st.dictionaries(texts, texts, min_size=1, max_size=4),
)
policies = st.builds(
    TopicPolicy,
    **{
        name: st.booleans() if name == "priorities" else st.integers(1, 2**40)
        for name in TopicPolicy.__struct_fields__
    },
)
dead_reasons = st.sampled_from(["max_attempts", "rejected", "ttl_expired", "retention_expired", "integrity"])

EVENTS: dict[type[Event], st.SearchStrategy[Event]] = {
    MessageSent: st.builds(
        MessageSent,
        *base,
        texts,
        counts,
        st.none() | times,
        times,
        counts,
        optional,
        digests,
        digests,
        headers,
        st.binary(min_size=1, max_size=200),
        st.integers(0, 10),
    ),
    # An empty consumer is none.
    MessageReceived: st.builds(
        MessageReceived, *base, counts, times, st.none() | texts.filter(lambda text: text != "")
    ),
    MessageVisibilityExtended: st.builds(MessageVisibilityExtended, *base, counts, times),
    MessageAcked: st.builds(MessageAcked, *base, counts),
    MessageRequeued: st.builds(
        MessageRequeued, *base, counts, times, st.sampled_from(["nacked", "visibility_expired"]), optional
    ),
    MessageDeadLettered: st.builds(MessageDeadLettered, *base, counts, dead_reasons, optional, times),
    MessageRedriven: st.builds(MessageRedriven, *base, times, times),
    MessageExpired: st.builds(MessageExpired, *base, st.sampled_from(["retention", "capacity", "purged"])),
    MailboxCreated: st.builds(MailboxCreated, *base, texts, st.sampled_from(["queue", "archive"])),
    OwnershipTaken: st.builds(OwnershipTaken, *base, counts, texts, texts, times, st.booleans()),
    TopicPolicySet: st.builds(TopicPolicySet, *base, texts, policies),
    TopicPaused: st.builds(TopicPaused, *base, texts),
    TopicResumed: st.builds(TopicResumed, *base, texts),
    LogTruncated: st.builds(LogTruncated, *base, times, digests),
}


VERSIONS: dict[type[Event], int] = {MessageSent: 3, TopicPolicySet: 2}
"""Schema versions above 1."""


def test_every_event_has_a_strategy_here() -> None:
    assert set(EVENTS) == {kind.cls for kind in KINDS}


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
@given(data=st.data(), position=st.integers(1, 2**39), epoch=counts, previous=digests)
def test_events_round_trip(
    kind: type[Event], data: st.DataObject, position: int, epoch: int, previous: bytes
) -> None:
    event = data.draw(EVENTS[kind])
    record = to_record(event, position, epoch, previous)
    assert to_event(record) == event
    assert (record.position, record.stream, record.version, record.at, record.epoch) == (
        position,
        event.stream,
        event.version,
        event.at,
        epoch,
    )
    assert verify_chain([record], previous, position) == (position, record.chain)


@given(event=EVENTS[MessageSent])
def test_folding_reads_neither_headers_nor_envelope(event: MessageSent) -> None:
    record = to_record(event, 1, 1, GENESIS)
    (folded,) = to_events([record[:CHAIN]])
    assert folded == msgspec.structs.replace(event, headers=Headers(0), envelope=b"")


@pytest.mark.parametrize(
    "kind", [kind for kind in EVENTS if kind is not MessageSent], ids=lambda kind: kind.__name__
)
@given(data=st.data())
def test_only_a_sent_message_uses_the_header_columns(kind: type[Event], data: st.DataObject) -> None:
    record = to_record(data.draw(EVENTS[kind]), 1, 1, GENESIS)
    assert set(record[HEADERS:]) == {None}


def test_type_names_are_stable() -> None:
    assert {kind.cls.__name__: kind.name for kind in KINDS} == {
        kind.__name__: f"{kind.__name__}.{VERSIONS.get(kind, 1)}" for kind in EVENTS
    }


def test_an_event_of_an_unknown_type_is_named_in_the_error() -> None:
    record = to_record(MessageAcked(bytes(16), 1, 1, 1), 7, 1, GENESIS)._replace(type="MessageAcked.2")
    with pytest.raises(
        BrokenLog, match=r"unknown type MessageAcked.2 at position 7; read it with the Postroom"
    ) as error:
        to_event(record)
    assert error.value.position == 7


def test_records_of_version_1_are_readable() -> None:
    acked = (b"s" * 16, 3, 99)
    written: dict[str, tuple[tuple[object, ...], Event]] = {
        "MessageReceived.1": (
            (None, None, 2, 5, None, b"\x91\xa8worker-1"),
            MessageReceived(*acked, 2, 5, "worker-1"),
        ),
        "MessageAcked.1": ((None, None, 2, None, None, b"\x90"), MessageAcked(*acked, 2)),
        "MessageRequeued.1": (
            (None, None, 2, 5, "nacked", b"\x91\xa4boom"),
            MessageRequeued(*acked, 2, 5, "nacked", "boom"),
        ),
        "MessageDeadLettered.1": (
            (None, None, 2, None, "max_attempts", b"\x92\xc0\x07"),
            MessageDeadLettered(*acked, 2, "max_attempts", None, 7),
        ),
        "MessageRedriven.1": ((None, None, None, 5, None, b"\x91\x07"), MessageRedriven(*acked, 5, 7)),
        "MessageExpired.1": ((None, None, None, None, "purged", b"\x90"), MessageExpired(*acked, "purged")),
        "TopicPaused.1": (("t", None, None, None, None, b"\x90"), TopicPaused(*acked, "t")),
        "TopicResumed.1": (("t", None, None, None, None, b"\x90"), TopicResumed(*acked, "t")),
        "LogTruncated.1": (
            (None, None, None, None, None, b"\x92\x04\xc4\x01l"),
            LogTruncated(*acked, 4, b"l"),
        ),
        "MailboxCreated.1": (
            (None, None, None, None, None, b"\x92\xa3a@b\xa5queue"),
            MailboxCreated(*acked, "a@b", "queue"),
        ),
    }
    written["OwnershipTaken.1"] = (
        (None, None, None, None, None, b"\x95\x02\xa2me\xa4boot\x07\xc3"),
        OwnershipTaken(*acked, 2, "me", "boot", 7, True),
    )
    written["MessageSent.1"] = (
        ("t", 4, None, 5, None, b"\x95\t\x01\xa1k\xc4\x01p\xc4\x01h"),
        MessageSent(*acked, "t", 4, 5, 9, 1, "k", b"p", b"h", Headers(0), b""),
    )
    numbers = dict.fromkeys(TopicPolicy.__struct_fields__[:12], 7)  # the fields of version 1
    written["TopicPolicySet.1"] = (
        ("t", None, None, None, None, msgspec.msgpack.encode([numbers])),
        TopicPolicySet(*acked, "t", msgspec.convert(numbers, TopicPolicy)),
    )
    for name, (columns, event) in written.items():
        row = (1, b"s" * 16, 3, 1, name, 99, *columns)
        assert list(to_events([row])) == [event]
        if type(event) not in VERSIONS:
            assert to_record(event, 1, 1, GENESIS)[:CHAIN] == row


def test_a_sent_message_of_version_2_has_the_default_priority_and_a_valid_checksum() -> None:
    sent = MessageSent(b"s" * 16, 1, 99, "t", 4, 5, 9, 1, "k", b"p" * 32, b"h" * 32, Headers(7), b"e")
    state = msgspec.msgpack.encode((9, 1, "k", b"p" * 32, b"h" * 32, message_checksum(sent)))
    written = to_record(sent, 1, 1, GENESIS)._replace(type="MessageSent.2", state=state)
    assert to_event(written) == sent
    assert sent.priority == 5
    # The checksum that version 2 stored of this message.
    assert message_checksum(sent).hex() == "c4a5df1d088d98c206b2dea88334b3b7c345145d74c7a261962d23124fd34e6c"
