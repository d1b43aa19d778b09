"""Segments and the log are read as one log, whatever else goes on."""

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.adapters.compose.store import open_log_reader, open_store
from postroom.adapters.parquet import log_archive, segment_checks
from postroom.adapters.parquet.archive_folder import ArchiveFolder
from postroom.adapters.parquet.log_archive import ParquetLogArchive
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.mailbox import segments
from postroom.application.mailbox.archived_log import ArchivedEventLog
from postroom.application.mailbox.segments import build_closed_segments, build_segments
from postroom.domain.errors import BrokenLog, Unavailable
from postroom.domain.record import Record
from postroom.projections import commit_columns
from postroom.projections.log_reader import Condition, IsIn, Range
from tests.conformance.records import append
from tests.projections.stored_logs import ONE, past
from tests.support.examples import examples

COLUMNS = ("position", "event", "stream", "topic", "distance", "envelope")


class World:
    """A log that is written, copied to segments, truncated and compacted while it is read."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.store, self.folder = str(folder / "store.db"), folder / "archive"
        self.log = stack.enter_context(closing(SqliteEventLog(self.store, ONE, durability="relaxed")))
        self.archive = ParquetLogArchive(self.folder)
        self.records: list[Record] = []
        self._next = 1
        self.write(3)

    def write(self, count: int) -> None:
        self.records += append(self.log, past(ONE, count, self._next))
        self._next += count

    def build(self, count: int) -> None:
        deque(islice(build_segments(self.log, self.archive), count), 0)

    def close(self, _: int) -> None:
        build_closed_segments(self.log, self.archive, is_whole=True)

    def retain(self, count: int) -> None:
        first = self.log.first_position() or 1
        ends = [each.last for each in islice(self.log.commits(first - 1, envelopes=False), count)]
        deque(build_segments(self.log, self.archive, ends[-1]), 0)
        if ends[-1] < self.records[-1].position:
            self.log.truncate(ends[-1], 1_000)

    def compact(self, _: int) -> None:
        self.archive.compact(ONE)

    def do(self, steps: list[tuple[str, int]]) -> None:
        for name, count in steps:
            getattr(self, name)(count)


STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "build", "close", "retain", "compact"]), st.integers(1, 5)),
    max_size=4,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes so small that each step makes files, and each read several batches."""
    monkeypatch.setattr(segments, "SEGMENT_POSITIONS", 5)
    monkeypatch.setattr(segment_checks, "MERGED_POSITIONS", 25)
    monkeypatch.setattr(log_archive, "KEEP_MERGED_SECONDS", 0)
    monkeypatch.setattr(commit_columns, "ROWS_PER_BATCH", 3)
    monkeypatch.setattr("postroom.adapters.parquet.log_reader.POSITIONS_PER_READ", 12)
    monkeypatch.setattr("postroom.adapters.parquet.segment_files.ROWS_PER_BATCH", 3)


@pytest.mark.usefixtures("small")
@given(
    before=st.lists(STEPS, max_size=3),
    pauses=st.lists(STEPS, min_size=1, max_size=8),
    where=st.sampled_from([[], [IsIn("event", ("MessageSent", "MessageReceived"))]]),
)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_record_is_read_once_while_segments_are_built_compacted_and_retained(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[list[tuple[str, int]]],
    pauses: list[list[tuple[str, int]]],
    where: list[Condition],
) -> None:
    with ExitStack() as stack:
        world = World(tmp_path_factory.mktemp("world"), stack)
        for steps in before:
            world.do(steps)
        reader = open_log_reader(open_store(world.store), str(world.folder))
        (extent,) = reader.extents()
        expected = [each for each in world.records if each.position <= extent.last]
        archived = ArchivedEventLog(world.log, world.archive).commits()
        rows: list[dict[str, Any]] = []
        commits: list[tuple[int, int]] = []
        batches = reader.read([Range(extent, extent.first, extent.last)], COLUMNS, where)
        rest: Iterator[list[tuple[str, int]]] = iter(pauses)
        while (batch := next(batches, None)) is not None:
            rows += batch.to_pylist()
            commits += [(each.first, each.last) for each in islice(archived, 1)]
            world.do(next(rest, []))
        commits += [(each.first, each.last) for each in archived]
        if where:
            expected = [each for each in expected if each.type in ("MessageSent", "MessageReceived")]
        assert [(row["position"], row["event"], row["stream"]) for row in rows] == [
            (each.position, each.type, each.stream) for each in expected
        ]
        assert [row["envelope"] for row in rows] == [
            getattr(each.event, "envelope", None) for each in expected
        ]
        assert [row["distance"] for row in rows] == [each.distance for each in expected]
        assert [first for first, _ in commits] == [1, *(last + 1 for _, last in commits[:-1])]
        assert commits[-1][1] == world.records[-1].position
        world.archive.update_manifest(ONE)
        world.archive.check_files(ONE)
        for segment in world.archive.segments(ONE):
            world.archive.verify(segment)


@pytest.mark.usefixtures("small")
def test_a_segment_that_was_lost_is_built_again_while_the_log_has_its_records(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack)
        world.write(8)
        world.close(0)
        lost = world.archive.files(ONE)[2]
        Path(lost.path).unlink()
        with pytest.raises(BrokenLog, match=f"lacks the file .*{lost.name}"):
            world.archive.check_files(ONE)
        world.retain(10)
        world.archive.check_files(ONE)
        assert [each.last for each in world.archive.commits(ONE)][-1] == world.records[-1].position
        reader = open_log_reader(open_store(world.store), str(world.folder))
        (extent,) = reader.extents()
        batches = reader.read([Range(extent, 1, extent.last)], ["position"])
        positions = [position for batch in batches for position in batch["position"].to_pylist()]
        assert positions == [each.position for each in world.records]


class Killed(BaseException):
    """The end of a process."""


@pytest.mark.usefixtures("small")
@given(
    steps=st.lists(STEPS, min_size=2, max_size=5),
    deaths=st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=4),
)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_is_lost_or_wrong_after_a_process_was_killed_between_two_changes_of_the_folder(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[list[tuple[str, int]]],
    deaths: list[tuple[int, bool]],
) -> None:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        world = World(tmp_path_factory.mktemp("killed"), stack)
        for (countdown, fails), each in zip(deaths * len(steps), steps, strict=False):
            left = countdown

            def change(folder: ArchiveFolder, *args: Any, original: Any) -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Unavailable("The disk is full.") if fails else Killed  # noqa: B023  # called in this round
                original(folder, *args)

            for name in ("write", "remove"):
                original = getattr(ArchiveFolder, name)
                patch.setattr(
                    ArchiveFolder,
                    name,
                    lambda folder, *args, original=original: change(folder, *args, original=original),
                )
            with suppress(Killed, Unavailable):
                world.do(each)
            patch.undo()
        reader = open_log_reader(open_store(world.store), str(world.folder))
        (extent,) = reader.extents()
        batches = reader.read([Range(extent, 1, extent.last)], ["position"])
        positions = [position for batch in batches for position in batch["position"].to_pylist()]
        assert positions == [each.position for each in world.records]
        world.close(0)
        world.compact(0)
        world.archive.check_files(ONE)
        assert [each.last for each in world.archive.commits(ONE)][-1] == world.records[-1].position
