"""A log whose beginning is archived: each record once, wherever it is, and only what is wanted is read."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.adapters.compose.store import open_log_reader, open_store
from postroom.adapters.parquet import segment_files
from postroom.adapters.parquet.log_archive import ParquetLogArchive
from postroom.adapters.parquet.log_reader import ArchivedLogReader
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.ports.event_log import EventLog
from postroom.domain.commit import GENESIS, Commit
from postroom.domain.errors import BrokenLog, NotFound, Unavailable
from postroom.domain.record import Event, Record
from postroom.projections import commit_columns
from postroom.projections.log_reader import Bucket, Condition, IsIn, LogExtent, LogReader, Range
from postroom.projections.projection import COLUMNS
from postroom.projections.spark.columns import EVENTS, arrow_schema, select_columns
from postroom.projections.spark.event_rows import EventRows
from tests.conformance.records import append, append_each
from tests.projections.histories import read_range
from tests.projections.log_rows import log_row
from tests.projections.stored_logs import ONE, TWO, move, past, rows
from tests.support.examples import examples

COUNT = 30
Append = Callable[[EventLog, Sequence[Event]], list[Record]]


class Place:
    """A store of one or more mailboxes, and an archive."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.store = str(folder / "store.db")
        self.folder = folder / "archive"
        self.archive = ParquetLogArchive(self.folder)
        self._stack = stack
        self.logs: dict[str, SqliteEventLog] = {}
        self.records: dict[str, list[Record]] = {}
        self.commits: dict[str, list[Commit]] = {}

    def write(
        self, mailbox: str = ONE, count: int = COUNT, skip: int = 0, *, append: Append = append_each
    ) -> None:
        if mailbox not in self.logs:
            log = SqliteEventLog(self.store, mailbox, durability="relaxed")
            self.logs[mailbox] = self._stack.enter_context(closing(log))
        self.records[mailbox] = append(self.logs[mailbox], past(mailbox, count)[skip:])
        self.commits[mailbox] = list(self.logs[mailbox].commits())

    def keep(self, first: int, last: int, mailbox: str = ONE) -> None:
        """Archive the commits that hold positions without removing them."""
        commits = [each for each in self.commits[mailbox] if each.last >= first and each.first <= last]
        start = commits[0].first
        before = GENESIS if start == 1 else self.records[mailbox][start - 2].chain
        self.archive.store(mailbox, commits, before)

    def move(self, through: int, mailbox: str = ONE) -> None:
        """Archive and remove records as retention does."""
        move(self.logs[mailbox], self.archive, self.records[mailbox], through)

    @property
    def log(self) -> LogReader:
        return open_log_reader(open_store(self.store), str(self.folder))

    def file(self, mailbox: str = ONE) -> Path:
        (file,) = (self.folder / mailbox).glob("*.parquet")
        return file


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        place = Place(tmp_path, stack)
        place.write()
        yield place


def positions(log: LogReader, extent: LogExtent, first: int = 1, last: int | None = None) -> list[int]:
    """Return the positions that are read."""
    found = rows(read_range(log, extent, first, last or extent.last, ["position"]))
    return [row["position"] for row in found]


@given(
    kept=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 30)), max_size=4),
    removed=st.integers(0, 60),
    bounds=st.tuples(st.integers(1, 80), st.integers(1, 80)).map(sorted),
    how=st.sampled_from([append, append_each]),
)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_segments_that_overlap_each_other_and_the_store_give_each_record_once(
    tmp_path_factory: pytest.TempPathFactory,
    kept: list[tuple[int, int]],
    removed: int,
    bounds: list[int],
    how: Append,
) -> None:
    with ExitStack() as stack:
        place = Place(tmp_path_factory.mktemp("overlap"), stack)
        place.write(append=how)
        if removed:
            place.keep(1, removed)
        for first, more in kept:
            if first <= removed + 1:  # an archive has no gaps but where records went without it
                place.keep(first, min(first + more, len(place.records[ONE])))
        place.logs[ONE].truncate(removed, 1_000)
        (extent,) = place.log.extents()
        assert (extent.first, extent.last, extent.at) == (
            1,
            len(place.records[ONE]),
            place.records[ONE][-1].at,
        )
        found = rows(read_range(place.log, extent, bounds[0], bounds[1], list(COLUMNS)))
        wanted = [
            log_row(extent, each) for each in place.records[ONE] if bounds[0] <= each.position <= bounds[1]
        ]
        assert found == [{name: row[name] for name in COLUMNS} for row in wanted]


def test_a_mailbox_whose_log_was_emptied_is_read_from_the_archive_alone(place: Place) -> None:
    records = place.records[ONE]
    place.move(len(records))
    place.write(TWO, 1)
    assert place.log.heads() == {ONE: len(records), TWO: len(place.records[TWO])}
    extent = next(extent for extent in place.log.extents() if extent.name == ONE)
    assert (extent.first, extent.last, extent.at) == (1, len(records), records[-1].at)
    assert positions(place.log, extent) == list(range(1, len(records) + 1))
    assert place.log.extents({ONE: 5})[0].at == records[4].at


def test_an_archived_mailbox_that_the_store_never_had_is_left_out(place: Place, tmp_path: Path) -> None:
    with ExitStack() as stack:
        other = Place(tmp_path / "archive" / "..", stack)
        assert other.folder.resolve() == place.folder.resolve()
        place.move(5)
        other.archive.store("gone@away", place.commits[ONE][:3], GENESIS)
    assert [extent.name for extent in place.log.extents()] == [ONE]


def test_an_archive_that_is_empty_or_not_there_adds_nothing(place: Place) -> None:
    assert place.log.extents() == open_store(place.store).log_reader().extents()
    (extent,) = place.log.extents()
    assert positions(place.log, extent) == list(range(1, extent.last + 1))


def test_what_went_before_there_was_an_archive_is_missing_at_the_beginning_only(place: Place) -> None:
    place.logs[ONE].truncate(10, 1_000)
    place.archive.store(ONE, place.commits[ONE][10:20], None)
    place.logs[ONE].truncate(20, 1_000)
    (extent,) = place.log.extents()
    assert extent.first == 11
    assert positions(place.log, extent, 11) == list(range(11, extent.last + 1))


def test_positions_missing_between_archive_and_store_are_named(place: Place) -> None:
    place.keep(1, 10)
    place.logs[ONE].truncate(12, 1_000)
    with pytest.raises(BrokenLog, match="lacks positions 11 to 12, and its log does not hold them either"):
        place.log.extents()


def test_positions_missing_inside_the_archive_are_named(place: Place) -> None:
    place.keep(1, 4)
    place.keep(8, 20)
    place.logs[ONE].truncate(20, 1_000)
    with pytest.raises(BrokenLog, match=r"lacks positions 5 to 7.* to read from 8 on"):
        place.log.extents()


@pytest.mark.parametrize("archived", [20, 60, 120])
def test_an_archive_of_another_store_is_refused(place: Place, tmp_path: Path, archived: int) -> None:
    with ExitStack() as stack:
        (tmp_path / "other").mkdir()
        other = Place(tmp_path / "other", stack)
        other.write(count=COUNT + 20, skip=1)
        other.keep(1, archived)
        place.logs[ONE].truncate(20, 1_000)
        with pytest.raises(Unavailable, match=f"ends at position {archived} with another history"):
            open_log_reader(open_store(place.store), str(other.folder)).extents()


def test_a_file_of_another_mailbox_is_not_read(place: Place) -> None:
    place.write(TWO)
    for mailbox in (ONE, TWO):
        place.keep(1, 20, mailbox)
    one, two = place.file(), place.folder / TWO / place.file().name
    one.write_bytes(two.read_bytes())
    (place.folder / ONE / "manifest.json").unlink()
    with pytest.raises(BrokenLog, match=f"does not describe positions 1 to 20 of mailbox {ONE}"):
        positions(place.log, LogExtent(1, ONE, 1, 20, 0))


def test_a_file_of_another_store_among_those_of_this_one_is_noticed(place: Place, tmp_path: Path) -> None:
    place.keep(1, 20)
    place.keep(21, 40)
    with ExitStack() as stack:
        (tmp_path / "other").mkdir()
        other = Place(tmp_path / "other", stack)
        other.write(count=COUNT + 20, skip=1)
        other.keep(1, 20)
        (place.folder / ONE / other.file().name).write_bytes(other.file().read_bytes())
    (place.folder / ONE / "manifest.json").unlink()
    with pytest.raises(
        BrokenLog, match=f"{ONE}/0000000000021-.* does not match the hashes of the files before it"
    ):
        place.log.extents()


def test_a_file_that_was_damaged_is_named(place: Place) -> None:
    place.move(20)
    place.file().write_bytes(b"PAR1 and then nothing of the kind PAR1")
    (place.folder / ONE / "manifest.json").unlink()
    with pytest.raises(Unavailable, match=r"0000000000001-0000000000020\.v3\.parquet can't be read"):
        positions(place.log, LogExtent(1, ONE, 1, 20, 0))


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_reader_that_verifies_takes_no_column_that_was_forged(place: Place, *, is_listed: bool) -> None:
    place.move(20)
    file = place.file()
    table = pq.read_table(file)
    index = table.schema.get_field_index("topic")
    forged = pa.array(["forged"] * table.num_rows, pa.string())
    pq.write_table(table.set_column(index, table.schema.field(index), forged), file)
    manifest = file.parent / "manifest.json"
    if is_listed:
        entries = json.loads(manifest.read_bytes())
        entries["segments"][0]["bytes"] = file.stat().st_size
        manifest.write_text(json.dumps(entries), "utf-8")
    else:
        manifest.unlink()
    log = open_log_reader(open_store(place.store), str(place.folder), verify=True)
    batches = log.read([Range(LogExtent(1, ONE, 1, 20, 0), 1, 20)], ["topic"])
    if is_listed:
        with pytest.raises(BrokenLog, match=r"is not the one that the manifest\.json beside it lists"):
            rows(batches)
    else:
        assert "forged" not in [row["topic"] for row in rows(batches)]


def test_a_segment_has_the_topics_of_messages_that_an_earlier_one_has(place: Place) -> None:
    columns = select_columns("postroom_events", EVENTS, "position,message_id,topic,shard,sent_position")
    (extent,) = place.log.extents()

    def events(first: int) -> list[dict[str, Any]]:
        return rows(EventRows(place.log, arrow_schema(columns)).read([Range(extent, first, 40)]))

    log_rows = events(1)
    later = next(row["position"] for row in log_rows if row["sent_position"] not in (None, row["position"]))
    place.keep(1, later - 1)
    earlier = place.file()
    place.keep(later, 40)
    place.logs[ONE].truncate(40, 1_000_000)
    earlier.unlink()
    assert events(later) == log_rows[later - 1 :]


def test_a_file_of_another_size_is_named_by_every_read(place: Place) -> None:
    place.move(20)
    with place.file().open("ab") as file:
        file.write(b"more")
    with pytest.raises(BrokenLog, match="of positions 1 to 20 is not the one"):
        positions(place.log, LogExtent(1, ONE, 1, 20, 0))


# -- retention goes on meanwhile ---


def test_records_that_move_to_the_archive_while_they_are_read_are_read_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_columns, "POSITIONS_PER_READ", 5)
    log = place.log
    (extent,) = log.extents()
    found: list[int] = []
    moved = 0
    for batch in log.read([Range(extent, 1, extent.last)], ["position"]):
        found += batch["position"].to_pylist()
        if found[-1] % 2:
            moved = min(found[-1] + 8, len(place.records[ONE]))
            place.move(moved)
    assert moved > 20
    assert found == list(range(1, extent.last + 1))


@pytest.mark.parametrize("through", [12, 30, 91])
def test_records_that_moved_after_the_archive_was_looked_at_are_found_in_it(
    place: Place, through: int
) -> None:
    class Moving:
        """A store whose retention removes records just when a reader turns to it."""

        def __init__(self, live: LogReader) -> None:
            self.live = live

        def __getattr__(self, name: str) -> object:
            return getattr(self.live, name)

        def commits(self, range_: Range, *, envelopes: bool) -> Iterator[Commit]:
            place.move(through)
            return self.live.commits(range_, envelopes=envelopes)

    (extent,) = place.log.extents()
    log = ArchivedLogReader(Moving(open_store(place.store).log_reader()), str(place.folder))  # type: ignore[arg-type]
    events = ("MailboxCreated", "MessageSent", "MessageAcked")
    where = [IsIn("event", events)]
    found = rows(log.read([Range(extent, 3, extent.last)], ["position"], where))
    assert [row["position"] for row in found] == [
        each.position for each in place.records[ONE] if each.position >= 3 and each.type in events
    ]


def test_records_that_went_without_being_archived_while_they_were_read_are_missed(place: Place) -> None:
    (extent,) = place.log.extents()
    place.logs[ONE].truncate(10, 1_000)
    with pytest.raises(BrokenLog, match="lacks positions 1 to 10"):
        positions(place.log, extent)


# -- what is not wanted is not read: it may as well be damaged ---


def damage(file: Path, *, columns: set[str], groups: set[int]) -> None:
    """Overwrite what a file holds of these columns in these row groups."""
    metadata = pq.ParquetFile(file).metadata
    content = bytearray(file.read_bytes())
    for group in groups:
        for number in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(number)
            if chunk.path_in_schema in columns:
                start = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)))
                content[start : start + chunk.total_compressed_size] = bytes(chunk.total_compressed_size)
    file.write_bytes(content)


@pytest.fixture
def groups(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A place whose archive has row groups of 10 records."""
    monkeypatch.setattr(segment_files, "ROW_GROUP_ROWS", 10)
    place.move(40)
    return place


def test_envelopes_are_read_of_a_file_only_if_they_are_wanted(groups: Place) -> None:
    damage(groups.file(), columns={"envelope", "commit"}, groups={0, 1, 2, 3})
    columns = [name for name in COLUMNS if name != "envelope"]
    extent = LogExtent(1, ONE, 1, 40, 0)
    found = rows(read_range(groups.log, extent, 1, 40, columns))
    wanted = [log_row(extent, each) for each in groups.records[ONE][:40]]
    assert found == [{name: row[name] for name in columns} for row in wanted]
    with pytest.raises(Unavailable, match="can't be read"):
        rows(read_range(groups.log, extent, 1, 40, ["envelope"]))


@pytest.mark.parametrize("where", [[], [Bucket("stream", 0, 256)]])
def test_only_the_row_groups_with_the_positions_wanted_are_read(
    groups: Place, where: list[Condition]
) -> None:
    damage(groups.file(), columns=set(segment_files.SCHEMA.names), groups={0, 1, 3})
    found = rows(read_range(groups.log, LogExtent(1, ONE, 1, 40, 0), 21, 30, list(COLUMNS), where))
    assert [row["position"] for row in found] == list(range(21, 31))


def test_a_log_whose_archived_beginning_is_nowhere_is_not_read_without_it(place: Place) -> None:
    absent = str(place.folder.parent / "absent")
    reader = open_log_reader(open_store(place.store), absent)
    assert [each.first for each in reader.extents()] == [1]
    place.move(10)
    with pytest.raises(
        NotFound, match=f"There is no archive at {absent}, but retention removed .* Pass --arch"
    ):
        reader.extents()
    assert open_log_reader(open_store(place.store), absent, allow_gaps=True).extents()
    assert open_log_reader(open_store(place.store)).extents()
