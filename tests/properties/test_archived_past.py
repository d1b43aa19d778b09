"""A log whose beginning is archived tells of every moment what the whole log tells."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from postroom.adapters.compose.queries import Reader
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.parquet.log_archive import ParquetLogArchive
from postroom.application.mailbox import log_writer
from postroom.application.mailbox.archived_log import ArchivedEventLog
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.simulate_policy import Simulation
from postroom.domain.commit import GENESIS, Commit
from postroom.domain.errors import BrokenLog, Unavailable
from postroom.domain.message import MessageSent
from postroom.domain.names import message_id
from postroom.domain.policy import Changes
from postroom.domain.record import Event, Record
from tests.conformance.records import append, commits_after, mixed
from tests.properties.pasts import Past, Step, as_time, histories, live, without_retention
from tests.support.commits import as_appended
from tests.support.stores import MAILBOX, Place, memory_place

COUNT = 40


@pytest.fixture(autouse=True, scope="module")
def snapshots_of_short_logs() -> Iterator[None]:
    """Snapshots are taken of logs as short as generated ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_writer, "CLOSING_SNAPSHOT_EVENTS", 6)
        yield


def archived(log: MemoryEventLog, folder: Path, cuts: Sequence[int], removed: int) -> ArchivedEventLog:
    """Return what a log would be had retention archived it after some commits and removed it through one.

    Arguments:
        cuts, removed: numbers of commits.
    """
    commits = as_appended(log.commits())
    archive = ParquetLogArchive(folder)
    first = 0
    for end in sorted({min(cut, len(commits)) for cut in (*cuts, removed)} - {0}):
        before = commits[first - 1].chain if first else GENESIS
        archive.store(log.mailbox, commits[first:end], before)
        first = max(0, end - 2)  # the next segment holds some of this one's commits, too
    rest = MemoryEventLog(log.mailbox)
    rest.append(commits)
    for snapshot in reversed(list(log.snapshots())):
        rest.save_snapshot(snapshot)
    if (seal := log.read_seal()) is not None:
        rest.seal(seal)
    rest.truncate(commits[removed - 1].last if removed else 0, 10**6)
    return ArchivedEventLog(rest, archive)


def fill(events: int = COUNT) -> MemoryEventLog:
    log = MemoryEventLog(MAILBOX)
    times = (event.at + 10 * (number // 3) for number, event in enumerate(mixed(events, MAILBOX)))
    append(log, [replace(event, at=at) for event, at in zip(mixed(events, MAILBOX), times, strict=True)])
    return log


def batched(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """Return events of one log time in commits of three."""
    return (events[start : start + 3] for start in range(0, len(events), 3))


WHOLE = fill()
_commits = st.integers(0, len(list(WHOLE.commits())))
_positions = st.integers(0, COUNT)


@given(
    cuts=st.lists(_commits, max_size=3),
    removed=_commits,
    asked=st.lists(st.integers(-1, COUNT + 2), max_size=6),
    limit=st.none() | _positions,
    at=st.integers(990, 1_150),
)
def test_every_read_of_it_gives_what_the_whole_log_gives(
    cuts: list[int], removed: int, asked: list[int], limit: int | None, at: int
) -> None:
    with TemporaryDirectory() as folder:
        log = archived(WHOLE, Path(folder), cuts, removed)
        after = max(0, asked[0]) if asked else 0
        assert list(log.read(after, limit)) == list(WHOLE.read(after, limit))
        assert list(log.replay(after)) == list(WHOLE.replay(after))
        assert log.at_positions(asked) == WHOLE.at_positions(asked)
        assert log.position_before(at) == WHOLE.position_before(at)
        assert (log.head(), log.first_position()) == (WHOLE.head(), WHOLE.first_position())
        streams = {record.stream for record in WHOLE.read()} | {b"nobody's stream."}
        assert log.existing_streams(streams) == WHOLE.existing_streams(streams)
        assert [log.read_stream(each) for each in sorted(streams)] == [
            WHOLE.read_stream(each) for each in sorted(streams)
        ]


@settings(max_examples=max(10, settings().max_examples // 10))
@given(taken=histories.map(without_retention), cuts=st.lists(st.integers(1, 60), max_size=2), data=st.data())
def test_every_question_about_the_past_has_the_same_answer(
    taken: list[Step], cuts: list[int], data: st.DataObject
) -> None:
    past = live(memory_place(), taken)
    assert isinstance(past.log, MemoryEventLog)
    records = list(past.log.read())
    removed = data.draw(st.integers(0, len(list(past.log.commits())) - 1), label="removed")
    with TemporaryDirectory() as folder:
        log = archived(past.log, Path(folder), cuts, removed)
        assert answers(log, past, records) == answers(past.log, past, records)


def answers(log: EventLogReader, past: Past, records: list[Record]) -> list[Any]:
    """Return what readers are told of a log."""
    reader = Reader(log, past.place.clock)
    moments = [*range(len(records) + 1), *(as_time(at) for at in {record.at for record in records})]
    told: list[Any] = [(reader.get_backlog(at=at), reader.list_dead_letters(at=at).items) for at in moments]
    for record in records:
        event = record.event
        if isinstance(event, MessageSent):
            id_ = message_id(event.stream, event.headers.message_id)
            told.append((reader.explain_message(id_), reader.get_message(id_)))
    for changes in (Changes(max_attempts=1), Changes(visibility_ms=250, max_attempts=9)):
        for start in (None, len(records) // 2):
            simulation = Simulation(changes)
            reader.simulate_policy(simulation, start=start)
            told.append(simulation.comparison())
    return [*told, reader.verify_log()]


@settings(max_examples=max(10, settings().max_examples // 10))
@given(histories)
def test_what_was_the_present_is_told_of_the_past_that_retention_archived(taken: list[Step]) -> None:
    with TemporaryDirectory() as folder:
        archive = ParquetLogArchive(Path(folder))
        place = Place(memory_place().open_log, archive)
        past = live(place, taken)
        log = ArchivedEventLog(past.log, archive)
        reader = Reader(log, place.clock)
        for seen in past.seen:
            told = reader.get_backlog(at=seen.position)
            assert (told.position, told.shards) == (seen.position, seen.at_last_event)
            assert reader.list_dead_letters(at=seen.position).items == seen.dead
        verified, head = reader.verify_log(), past.log.head()
        assert head is not None
        assert (verified.first, verified.last, verified.chain) == (1, head.position, head.chain.hex())


# -- what can't be ---


def test_events_that_neither_holds_are_named(tmp_path: Path) -> None:
    commits = list(WHOLE.commits())
    archive = ParquetLogArchive(tmp_path)
    archive.store(MAILBOX, commits[:4], GENESIS)
    rest = fill()
    rest.truncate(commits[5].last, COUNT)
    lacks = f"lacks positions {commits[4].first} to {commits[5].last}, .* to read from {commits[6].first} on"
    with pytest.raises(BrokenLog, match=lacks):
        ArchivedEventLog(rest, archive)


@pytest.mark.parametrize("count", [4, 8, None])
def test_the_archive_of_another_log_is_refused(tmp_path: Path, count: int | None) -> None:
    other = MemoryEventLog(MAILBOX)
    commits = commits_after(other, batched(mixed(COUNT, "acme@other")))
    archive = ParquetLogArchive(tmp_path)
    archive.store(MAILBOX, commits[:count], GENESIS)
    rest = fill(COUNT - 5)
    rest.truncate(10, COUNT)
    with pytest.raises(Unavailable, match="another history than the log holds"):
        ArchivedEventLog(rest, archive)


def test_what_retention_moves_while_the_log_is_read_is_read_once(tmp_path: Path) -> None:
    commits = as_appended(WHOLE.commits())
    archive = ParquetLogArchive(tmp_path)

    class Paged(MemoryEventLog):
        """A log that reads three commits at a time, as databases do."""

        def commits(self, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
            while page := list(islice(super().commits(after, envelopes=envelopes), 3)):
                yield from page
                after = page[-1].last

    rest = Paged(MAILBOX)
    rest.append(commits)
    found: list[Record] = []
    number = 0
    for record in ArchivedEventLog(rest, archive).read():
        found.append(record)
        if record.position == commits[number].last:
            number += 1
            if number % 2 == 0:
                moved = commits[: number + 3]
                archive.store(MAILBOX, moved, GENESIS)
                rest.truncate(moved[-1].last, COUNT)
    assert found == list(WHOLE.read())
