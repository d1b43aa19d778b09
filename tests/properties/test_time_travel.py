"""The past is folded from the log exactly as the live engine saw it when it was the present."""

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings

from postroom.adapters.compose.queries import Reader
from postroom.application.mailbox import log_writer
from postroom.application.mailbox.stored_snapshots import decode_part, fold_at
from postroom.application.query_results import Moment
from postroom.domain.errors import NotFound, Rejected
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.policy import TopicPolicy
from tests.properties.pasts import (
    Past,
    Receive,
    Reopen,
    Retain,
    Seen,
    Send,
    Settle,
    Step,
    as_time,
    histories,
    live,
    without_retention,
)
from tests.support.snapshots import take_snapshot
from tests.support.steps import Operate, Wait
from tests.support.stores import MAILBOX, memory_place, postgres_place, sqlite_place


@pytest.fixture(autouse=True, scope="module")
def snapshots_of_short_logs() -> Iterator[None]:
    """Snapshots are taken of logs as short as generated ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_writer, "CLOSING_SNAPSHOT_EVENTS", 6)
        yield


def known_from(past: Past) -> int:
    """Return the first position of the log that anything is known of."""
    for position in range((past.log.head() or (0,))[0] + 1):
        try:
            fold_at(past.log, position)
        except NotFound:
            continue
        return position
    raise AssertionError("nothing is known, not even the present")


def agree(past: Past, reader: Reader, seen: Seen) -> None:
    """Check that the log tells of this moment what the engine told then."""
    told = reader.get_backlog(at=seen.position)
    assert (told.position, told.shards) == (seen.position, seen.at_last_event)
    assert (told.epoch, told.owner, told.at) == (seen.backlog.epoch, seen.backlog.owner, seen.backlog.at)
    if past.log.position_before(seen.now + 1) == seen.position:  # no later event bears the same time
        # A reader's logs are durable, though those of this test may be in memory.
        expected = msgspec.structs.replace(seen.backlog, dlq_profile="durable")
        assert reader.get_backlog(at=as_time(seen.now)) == expected


def check(past: Past) -> None:
    reader = Reader(past.log, past.place.clock)
    known = known_from(past)
    for seen in past.seen:
        if seen.position < known:
            with pytest.raises(NotFound, match=f"begins at position {known}"):
                reader.get_backlog(at=seen.position)
            continue
        agree(past, reader, seen)
        try:
            dead = reader.list_dead_letters(at=seen.position).items
        except NotFound:  # some that were dead then are gone from the log: it says since when none is
            assert known > 0
        else:
            assert dead == seen.dead
    final = past.seen[-1]
    assert reader.list_dead_letters(at=final.position).items == final.dead


@given(histories)
def test_what_was_the_present_is_told_of_the_past(taken: list[Step]) -> None:
    past = live(memory_place(), taken)
    check(past)


@settings(max_examples=15)
@given(histories)
def test_a_store_on_disk_tells_the_same_of_the_past(taken: list[Step]) -> None:
    with TemporaryDirectory() as folder:
        past = live(sqlite_place(Path(folder)), taken)
        check(past)
        past.log.close()


def test_a_store_in_postgres_tells_the_same_of_the_past(postgres_store: str) -> None:
    poison: list[Step] = [Receive("mail"), Settle("nack", 0, 0)] * 3
    story: list[Step] = [
        Send("mail", outside_id=True),
        Send("orders", delay_ms=400),
        *poison,
        Reopen(),
        Wait(500),
    ]
    story += [Receive("orders"), Wait(300), Operate("redrive", "mail"), Reopen(reboot=True), *poison]
    past = live(postgres_place(postgres_store), [*story, Operate("purge", "mail"), Retain(), *story])
    assert known_from(past) > 0
    check(past)
    past.log.close()


@given(histories.map(without_retention))
def test_every_position_is_folded_the_same_from_a_snapshot_and_from_the_start(taken: list[Step]) -> None:
    past = live(memory_place(), taken)
    mailbox = Mailbox(MAILBOX)
    for record in past.log.read():
        evolve(mailbox, record.event)
        assert told(fold_at(past.log, record.position)) == told(mailbox)


def told(mailbox: Mailbox) -> object:
    """Return all that a mailbox knows, but for idempotency keys, which snapshots drop when over."""
    part = decode_part(take_snapshot(mailbox))
    assert part is not None
    topics = {name: topic.dead_letterings for name, topic in part.head.topics.items()}
    return (
        msgspec.structs.replace(part.head, topics={}),
        topics,
        [message for chunk in part.chunks for message in msgspec.msgpack.decode(chunk)[0]],
    )


def test_dead_letters_that_retention_removed_since_are_counted_but_not_listed() -> None:
    died: list[Step] = [
        Send("mail", outside_id=True),
        Receive("mail"),
        Settle("nack", 0),
        Send("orders"),
        Reopen(),
    ]
    past = live(
        memory_place(),
        [*died, Operate("purge", "mail"), Retain(), Send("orders")],
        TopicPolicy(max_attempts=1),
    )
    reader = Reader(past.log, past.place.clock)
    reopened = next(seen for seen in past.seen if seen.dead and seen.backlog.epoch == 2)
    assert reader.get_backlog("mail", at=reopened.position).shards == reopened.backlog.shards[:1]
    with pytest.raises(NotFound, match="dead letters of mailbox acme@one can be listed from position 9 on"):
        reader.list_dead_letters(at=reopened.position)
    assert reader.list_dead_letters(at=9).items == ()


@pytest.mark.parametrize(
    ("at", "error"),
    [
        (-1, "at must be at least 0; it was -1"),
        (4, "ends at position 3; it has no 4"),
        (as_time(2_000_000_000_000_000), "2033-05-18T03:33:20.000000Z is in the future"),
        (
            datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))),
            "not within the years 1 to 9999 in UTC",
        ),
        (datetime.min.replace(tzinfo=timezone(timedelta(hours=14))), "not within the years 1 to 9999 in UTC"),
        (datetime(2026, 1, 1), "has no UTC offset"),  # noqa: DTZ001  # what is refused
    ],
)
def test_a_moment_that_the_log_has_not_reached_is_refused(at: Moment, error: str) -> None:
    past = live(memory_place(), [Send("orders")])
    with pytest.raises(Rejected, match=error):
        Reader(past.log, past.place.clock).get_backlog(at=at)


def test_before_its_first_event_a_mailbox_held_nothing() -> None:
    past = live(memory_place(), [Send("orders")])
    for at in (0, as_time(1_000_000)):
        backlog = Reader(past.log, past.place.clock).get_backlog(at=at)
        assert (backlog.position, backlog.owner, backlog.at, backlog.shards) == (0, "", "", [])
