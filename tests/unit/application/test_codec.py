"""Events round-trip through commits; what could not be read again is never encoded."""

from contextlib import suppress

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from postroom.application.mailbox.codec import (
    compress,
    decode_events,
    decompress,
    is_intact,
    make_commit,
    stream_ids,
    to_records,
)
from postroom.application.mailbox.event_columns import RUNS
from postroom.domain.commit import GENESIS, Commit, IndexEntry, verify_chain
from postroom.domain.errors import BrokenLog
from postroom.domain.mailbox.events import (
    LogTruncated,
    MailboxCreated,
    MailboxSettingsChanged,
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
    MessageRescheduled,
    MessageSent,
    MessageVisibilityExtended,
)
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.record import Event, StoredEvent
from postroom.domain.redrive.job import (
    RedriveAdvanced,
    RedriveCancelled,
    RedriveCompleted,
    RedrivePaused,
    RedriveResumed,
    RedriveSkipped,
    RedriveStarted,
    RedriveUndoAdvanced,
    RedriveUndone,
    RedriveUndoStarted,
)
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.schedule import (
    ScheduleDeleted,
    SchedulePaused,
    ScheduleRan,
    ScheduleResumed,
    ScheduleSet,
    ScheduleSpec,
)
from postroom.domain.settings import MailboxSettings
from postroom.domain.subject import SubjectPolicy
from postroom.domain.subscription import (
    SubscriptionAdvanced,
    SubscriptionDeleted,
    SubscriptionFilter,
    SubscriptionRewound,
    SubscriptionSet,
)

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
        name: {
            bool: st.booleans(),
            int: st.integers(1, 2**40),
            dict: st.dictionaries(texts, st.integers(1, 1_000)),
        }[type(getattr(TopicPolicy(), name))]
        for name in TopicPolicy.__struct_fields__
    },
)
settings = st.builds(
    MailboxSettings,
    st.builds(MailboxLimits, topics=counts, max_store_bytes=st.none() | counts),
    policies,
    st.dictionaries(texts, st.dictionaries(st.sampled_from(["shards", "max_attempts"]), counts, min_size=1)),
    st.dictionaries(texts, st.builds(SubjectPolicy, texts, st.lists(texts, max_size=2).map(tuple))),
)
expiry_reasons = st.sampled_from(["retention", "capacity", "purged", "archived"])
dead_reasons = st.sampled_from(["max_attempts", "rejected", "ttl_expired", "retention_expired", "integrity"])
redrive_specs = st.builds(
    RedriveSpec,
    action=st.sampled_from(["redrive", "archive", "purge"]),
    topics=st.lists(texts, max_size=2).map(tuple),
    headers=st.dictionaries(texts, texts, max_size=2),
    text=optional,
    rate=st.none() | counts,
    delay_ms=counts,
)

filters = st.builds(
    SubscriptionFilter, st.lists(texts, max_size=2).map(tuple), st.dictionaries(texts, texts, max_size=2)
)
schedules = st.builds(
    ScheduleSpec,
    texts,
    optional,
    every_ms=st.none() | counts,
    missed=st.sampled_from(["skip", "last", "all"]),
    payload=st.binary(max_size=99),
    headers=st.dictionaries(texts, texts, max_size=2),
)

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
        *[optional] * 3,
    ),
    MessageReceived: st.builds(MessageReceived, *base, counts, times, optional),
    MessageVisibilityExtended: st.builds(MessageVisibilityExtended, *base, counts, times),
    MessageAcked: st.builds(MessageAcked, *base, counts, st.none() | st.binary(max_size=99), optional),
    MessageRequeued: st.builds(
        MessageRequeued,
        *base,
        counts,
        times,
        st.sampled_from(["nacked", "visibility_expired", "released"]),
        optional,
    ),
    MessageDeadLettered: st.builds(
        MessageDeadLettered, *base, counts, dead_reasons, optional, times, st.none() | st.binary()
    ),
    MessageRedriven: st.builds(MessageRedriven, *base, times, times),
    MessageRescheduled: st.builds(MessageRescheduled, *base, times, times, optional),
    MessageExpired: st.builds(
        MessageExpired,
        *base,
        st.sampled_from(["retention", "capacity", "purged", "archived", "cancelled", "rewound"]),
        optional,
        optional,
    ),
    MailboxCreated: st.builds(
        MailboxCreated, *base, texts, st.sampled_from(["queue", "archive"]), st.none() | settings
    ),
    MailboxSettingsChanged: st.builds(MailboxSettingsChanged, *base, settings),
    OwnershipTaken: st.builds(OwnershipTaken, *base, counts, texts, texts, times, st.booleans()),
    TopicPolicySet: st.builds(TopicPolicySet, *base, texts, policies),
    TopicPaused: st.builds(TopicPaused, *base, texts),
    TopicResumed: st.builds(TopicResumed, *base, texts),
    LogTruncated: st.builds(LogTruncated, *base, times, digests),
    RedriveStarted: st.builds(RedriveStarted, *base, redrive_specs, counts, counts, optional),
    RedriveSkipped: st.builds(RedriveSkipped, *base, streams, st.sampled_from(["settled", "not_an_object"])),
    RedriveAdvanced: st.builds(RedriveAdvanced, *base, counts, counts, counts),
    RedrivePaused: st.builds(RedrivePaused, *base, optional),
    RedriveResumed: st.builds(RedriveResumed, *base, optional),
    RedriveCancelled: st.builds(RedriveCancelled, *base, optional),
    RedriveCompleted: st.builds(RedriveCompleted, *base),
    RedriveUndoStarted: st.builds(RedriveUndoStarted, *base, optional),
    RedriveUndoAdvanced: st.builds(RedriveUndoAdvanced, *base, counts, counts, counts),
    RedriveUndone: st.builds(RedriveUndone, *base),
    ScheduleSet: st.builds(ScheduleSet, *base, texts, schedules, st.booleans(), optional),
    SchedulePaused: st.builds(SchedulePaused, *base, texts, optional),
    ScheduleResumed: st.builds(ScheduleResumed, *base, texts, optional),
    ScheduleRan: st.builds(ScheduleRan, *base, texts, times, st.none() | streams, optional),
    ScheduleDeleted: st.builds(ScheduleDeleted, *base, texts, optional),
    SubscriptionSet: st.builds(SubscriptionSet, *base, texts, filters, counts, optional),
    SubscriptionRewound: st.builds(SubscriptionRewound, *base, texts, counts, optional),
    SubscriptionAdvanced: st.builds(
        SubscriptionAdvanced, *base, texts, st.sampled_from(["live", "clearing", "copying"]), counts, counts
    ),
    SubscriptionDeleted: st.builds(SubscriptionDeleted, *base, texts, optional),
}


def encoded(events: list[Event], previous: bytes = GENESIS, **place: int) -> Commit:
    """Return the commit of events; each is the second or later of its stream."""
    return make_commit(events, [1] * len(events), first=place.get("first", 1), epoch=1, previous=previous)


def same_time(events: list[Event]) -> list[Event]:
    return [msgspec.structs.replace(event, at=events[0].at) for event in events]


def test_every_event_has_a_strategy_here() -> None:
    assert set(EVENTS) | {StoredEvent} == set(RUNS)


def test_the_names_and_versions_of_events_are_stable() -> None:
    tags = {f"{kind.__name__}.1" for kind in RUNS} - {"MailboxCreated.1"} | {"MailboxCreated.2"}
    assert {run.__struct_config__.tag for run in RUNS.values()} == tags


@given(events=st.lists(st.one_of(*EVENTS.values()), min_size=1, max_size=8).map(same_time), first=counts)
def test_events_round_trip(events: list[Event], first: int) -> None:
    commit = encoded(events, first=first)
    records = list(to_records(commit))
    assert [record.event for record in records] == events
    assert [record.position for record in records] == list(range(first, first + len(events)))
    assert (commit.first, commit.last, commit.at) == (first, first + len(events) - 1, events[0].at)
    assert verify_chain([commit], GENESIS, first) == (commit.last, commit.chain)


@given(events=st.lists(EVENTS[MessageSent], min_size=1, max_size=4).map(same_time))
def test_folding_reads_no_envelopes(events: list[Event]) -> None:
    commit = encoded(events)
    assert list(decode_events(commit._replace(envelopes=b""))) == [
        msgspec.structs.replace(event, envelope=b"") for event in events
    ]


@given(events=st.lists(EVENTS[MessageAcked], min_size=2, max_size=2).map(same_time))
def test_events_that_are_alike_take_the_space_of_one(events: list[Event]) -> None:
    pair = [events[0], msgspec.structs.replace(events[0], stream=events[1].stream)]
    assert len(encoded(pair).events) == len(encoded(pair[:1]).events) + 16


def test_the_index_has_the_first_events_of_streams() -> None:
    sent, acked = (MessageAcked(stream * 16, 2, 5, 1) for stream in (b"a", b"b"))
    commit = make_commit([sent, acked], [0, 7], first=9, epoch=1, previous=GENESIS)
    assert commit.entries == [IndexEntry(b"a" * 16, 2, 9)]


def test_a_commit_has_one_log_time() -> None:
    with pytest.raises(ValueError, match="different log times"):
        encoded([MessageAcked(bytes(16), 2, 5, 1), MessageAcked(bytes(16), 3, 6, 1)])


UNREADABLE: dict[str, Event] = {
    "a fraction": MessageAcked(bytes(16), 2, 5, 1.5),  # type: ignore[arg-type]
    "a number beyond 64 bits": MessageAcked(bytes(16), 2, 5, 2**63),
    "half of a surrogate pair": TopicPaused(bytes(16), 2, 5, "\ud800"),
    "bytes for text": TopicPaused(bytes(16), 2, 5, b"orders"),  # type: ignore[arg-type]
    "a short stream id": MessageAcked(b"short", 2, 5, 1),
    "text for a stream id": MessageAcked("a" * 16, 2, 5, 1),  # type: ignore[arg-type]
    "an unknown mode": MailboxCreated(bytes(16), 1, 5, "acme@one", "heap"),  # type: ignore[arg-type]
    "a list for a number": MessageAcked(bytes(16), 2, 5, [1]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("event", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside another"])
def test_an_event_that_could_not_be_read_again_is_not_encoded(event: Event, others: int) -> None:
    good = MessageAcked(bytes(16), 2, 5, 1)
    with pytest.raises((TypeError, ValueError, OverflowError, msgspec.MsgspecError)):
        encoded([good] * others + [event])


def test_a_run_with_too_few_streams_has_no_stream_ids() -> None:
    commit = encoded([MessageAcked(bytes(16), 2, 5, 1)])
    (run,) = runs_of(commit)
    run[STREAMS] = bytes(8)
    with pytest.raises(BrokenLog, match="can't be decoded"):
        list(stream_ids(commit._replace(events=msgspec.msgpack.encode([run]))))


def test_an_event_of_an_unknown_version_is_refused_with_its_position() -> None:
    commit = encoded([MessageAcked(bytes(16), 2, 5, 1)], first=7)
    newer = commit._replace(events=commit.events.replace(b"MessageAcked.1", b"MessageAcked.2"))
    with pytest.raises(BrokenLog, match=r"positions 7 to 7 can't be decoded .*MessageAcked\.2") as error:
        list(to_records(newer))
    assert error.value.position == 7


def runs_of(commit: Commit) -> list[list[object]]:
    runs: list[list[object]] = msgspec.msgpack.decode(commit.events)
    return runs


SENT = [
    MessageSent(
        bytes([n]) * 16, 1, 5, "t", 0, n, 9, 1, None, b"p" * 32, b"h" * 32, Headers(n), b"envelope %d" % n
    )
    for n in (1, 2, 3)
]
COUNT, STREAMS, VERSIONS, DISTANCES, DUE, PAYLOAD_HASHES, ENVELOPE_HASHES = 1, 2, 3, 4, 7, 11, 13
LIES: dict[str, dict[int, object]] = {
    "a greater count": {COUNT: 4},
    "no count": {COUNT: 0},
    "a negative count": {COUNT: -3},
    "a huge count": {COUNT: 2**40},
    "a stream too few": {STREAMS: bytes(32)},
    "a byte too many": {STREAMS: bytes(49)},
    "a short column": {DUE: [1, 2]},
    "a long column": {DUE: [1, 2, 3, 4]},
    "an empty column": {DUE: []},
    "a column of text": {DUE: ["1", "2", "3"]},
    "versions for others": {VERSIONS: [1, 1]},
    "half a hash": {PAYLOAD_HASHES: bytes(80)},
    "distances for others": {DISTANCES: [0, 0]},
    "an envelope's hash too few": {ENVELOPE_HASHES: bytes(64)},
}


@pytest.mark.parametrize("lies", LIES.values(), ids=LIES)
def test_a_run_whose_columns_do_not_fit_together_is_refused(lies: dict[int, object]) -> None:
    commit = encoded(list(SENT))
    (run,) = runs_of(commit)
    for field, value in lies.items():
        run[field] = value
    with pytest.raises(BrokenLog, match="can't be decoded"):
        list(to_records(commit._replace(events=msgspec.msgpack.encode([run]))))


@pytest.mark.parametrize(
    "envelopes", [b"", b"\xc1", *(msgspec.msgpack.encode([b"envelope"] * n) for n in (0, 1, 2, 4))]
)
def test_envelopes_that_are_not_those_of_the_messages_count_as_empty_and_altered(envelopes: bytes) -> None:
    records = list(to_records(encoded(list(SENT))._replace(envelopes=envelopes)))
    assert [record.event.envelope for record in records if isinstance(record.event, MessageSent)] == [b""] * 3
    assert not any(is_intact(record) for record in records)


@given(blob=st.binary(max_size=60))
def test_any_bytes_are_decoded_or_refused(blob: bytes) -> None:
    commit = Commit(1, 1, 1, 5, bytes(32), blob, blob)
    with suppress(BrokenLog):
        list(to_records(commit))


@given(part=st.binary(max_size=2_000) | st.binary(max_size=40).map(lambda unit: unit * 500))
def test_parts_round_trip_through_compression(part: bytes) -> None:
    packed = msgspec.msgpack.encode([part])  # no part begins as a compressed one does
    assert decompress(compress(packed), 1) == packed
    assert len(compress(packed)) <= len(packed)


def test_a_compressed_part_that_is_not_what_it_states_is_refused() -> None:
    whole = compress(b"\x90" * 10_000)
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 24))
    huge = b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little")
    frame = zstandard.ZstdCompressor(write_checksum=False).compress(b"\x90" * 70_000)
    small = frame.replace((70_000).to_bytes(4, "little"), (60_000).to_bytes(4, "little"))
    assert small != frame
    for altered in (whole[:-1], whole + b"x", whole[:6], bomb, huge, small):
        with pytest.raises(BrokenLog, match="position 7 can't be decompressed") as error:
            decompress(altered, 7)
        assert error.value.position == 7
