"""The log archive conformance suite on Parquet files, and what only files can promise."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from postroom.adapters.parquet import segment_checks
from postroom.adapters.parquet.log_archive import ParquetLogArchive
from postroom.adapters.parquet.segment_files import SCHEMA
from postroom.application.mailbox.codec import to_records
from postroom.domain.commit import GENESIS
from postroom.domain.errors import BrokenLog, InvalidRequest, Unavailable
from postroom.projections.log_reader import LogExtent
from postroom.projections.projection import SENT_COLUMNS
from tests.conformance.log_archive import BOX, COMMITS, LogArchiveConformance, keep
from tests.projections.log_rows import log_row

LAST = COMMITS[9].last


class TestParquetLogArchive(LogArchiveConformance):
    @pytest.fixture
    def archive(self, tmp_path: Path) -> ParquetLogArchive:
        return ParquetLogArchive(tmp_path / "archive")


@pytest.fixture
def archive(tmp_path: Path) -> ParquetLogArchive:
    return ParquetLogArchive(tmp_path / "archive")


@pytest.fixture
def file(archive: ParquetLogArchive, tmp_path: Path) -> Path:
    """A file with the first ten commits."""
    segment = keep(archive, 1, COMMITS[9].first)
    return tmp_path / "archive" / BOX / f"0000000000001-{segment.last:013}.v3.parquet"


@pytest.fixture
def unlisted(file: Path) -> Path:
    """The same file, without a manifest that lists it."""
    (file.parent / "manifest.json").unlink()
    return file


def test_any_parquet_reader_reads_the_columns_of_the_log(file: Path) -> None:
    table = pq.read_table(file)
    assert table.schema.equals(SCHEMA)
    extent = LogExtent(0, BOX, 1, LAST, 0)
    rows = [log_row(extent, record) for commit in COMMITS[:10] for record in to_records(commit)]
    commits = {commit.first: {"last": commit.last, "commit": commit.events} for commit in COMMITS}
    nothing = {"last": None, "commit": None}
    names = [name for name in SCHEMA.names if name not in (*SENT_COLUMNS, *nothing)]
    assert table.select([*names, *nothing]).to_pylist() == [
        {name: row[name] for name in names} | commits.get(row["position"], nothing) for row in rows
    ]


def test_a_file_says_what_it_holds_and_what_it_is_chained_to(file: Path) -> None:
    assert pq.read_schema(file).metadata == {
        b"postroom.format": b"3",
        b"postroom.mailbox": BOX.encode(),
        b"postroom.first": b"1",
        b"postroom.last": str(LAST).encode(),
        b"postroom.before": GENESIS.hex().encode(),
        b"postroom.chain": COMMITS[9].chain.hex().encode(),
    }


def test_files_and_folders_are_for_their_owner_only(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_what_a_crash_left_unfinished_is_not_read_nor_kept(archive: ParquetLogArchive, file: Path) -> None:
    unfinished = file.with_name(".abc.tmp")
    unfinished.write_bytes(file.read_bytes()[:100])
    os.utime(unfinished, (0, 0))
    beginning = file.with_name(".def.tmp")  # of another process, which has yet to lock it
    beginning.touch()
    assert [segment.last for segment in archive.segments(BOX)] == [LAST]
    keep(archive, LAST + 1, LAST + 2)
    assert not unfinished.exists()
    assert beginning.exists()


def test_a_file_of_another_name_is_refused(archive: ParquetLogArchive, file: Path) -> None:
    file.rename(file.with_name("0000000000011-0000000000099.v3.parquet"))
    for ask in (archive.segments, archive.last_segment, lambda box: list(archive.commits(box))):
        with pytest.raises(BrokenLog, match="renamed or not written by Postroom"):
            ask(BOX)


def test_a_file_that_lost_its_last_records_is_noticed(archive: ParquetLogArchive, unlisted: Path) -> None:
    table = pq.read_table(unlisted)
    pq.write_table(table.slice(0, COMMITS[9].first - 1), unlisted)
    with pytest.raises(BrokenLog, match="its own last hash"):
        list(archive.commits(BOX))


def test_an_edited_record_is_noticed(archive: ParquetLogArchive, unlisted: Path) -> None:
    table = pq.read_table(unlisted)
    at = table.schema.get_field_index("at")
    edited = pa.array([value + 1 for value in table["at"].to_pylist()], pa.int64())
    pq.write_table(table.set_column(at, table.schema.field(at), edited), unlisted)
    with pytest.raises(BrokenLog, match=r"parquet was altered.*positions 1 to 1 "):
        list(archive.commits(BOX))


@pytest.mark.parametrize(("column", "value"), [("topic", "other"), ("envelope", b"other"), ("due", 7)])
def test_a_column_that_differs_from_its_commit_is_found_by_verifying_the_segment(
    archive: ParquetLogArchive, unlisted: Path, column: str, value: object
) -> None:
    (segment,) = archive.segments(BOX)
    archive.verify(segment)
    table = pq.read_table(unlisted)
    number = table.schema.get_field_index(column)
    values = table[column].to_pylist()
    position = next(at for at, each in enumerate(values, 1) if each is not None)
    values[position - 1] = value
    edited = pa.array(values, table.schema.field(number).type)
    pq.write_table(table.set_column(number, table.schema.field(number), edited), unlisted)
    with pytest.raises(BrokenLog, match=f"differs at position {position} from the commit"):
        archive.verify(segment)


def test_a_damaged_file_and_a_folder_that_can_not_be_made_are_named(
    archive: ParquetLogArchive, unlisted: Path, tmp_path: Path
) -> None:
    unlisted.write_bytes(b"PAR1 this is not what it was PAR1")
    with pytest.raises(Unavailable, match="parquet can't be read"):
        list(archive.commits(BOX))
    (tmp_path / "taken").touch()
    with pytest.raises(Unavailable, match="can't be written"):
        keep(ParquetLogArchive(tmp_path / "taken"), 1, 2)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"first": 2}, "other positions than 2 to"),
        ({"last": LAST + 1}, "other positions than 1 to"),
        ({"file": "../other.parquet"}, "'../other.parquet' has other positions"),
        ({"chain": "zz"}, "64 hexadecimal digits"),
        ({"before": ""}, "64 hexadecimal digits"),
        ({"blake3": "00"}, "64 hexadecimal digits"),
        ({"last": str(LAST)}, "Expected `int`"),
    ],
)
def test_a_manifest_with_an_impossible_entry_is_refused(
    archive: ParquetLogArchive, file: Path, change: dict[str, Any], problem: str
) -> None:
    manifest = file.with_name("manifest.json")
    (entry,) = json.loads(manifest.read_text())["segments"]
    manifest.write_text(json.dumps({"mailbox": BOX, "segments": [entry | change]}))
    with pytest.raises(BrokenLog, match=f"manifest.json can't be used: .*{problem}"):
        archive.segments(BOX)


@pytest.mark.parametrize("content", [b"", b'{"mailbox":"\xff"}', b'{"x":' + b"[" * 100_000, b"[]"])
def test_a_manifest_that_is_none_is_refused(archive: ParquetLogArchive, file: Path, content: bytes) -> None:
    file.with_name("manifest.json").write_bytes(content)
    with pytest.raises(BrokenLog, match=r"manifest\.json can't be used"):
        archive.segments(BOX)


def test_a_manifest_lists_each_file_once(archive: ParquetLogArchive, file: Path) -> None:
    manifest = file.with_name("manifest.json")
    (entry,) = json.loads(manifest.read_text())["segments"]
    manifest.write_text(json.dumps({"mailbox": BOX, "segments": [entry, entry]}))
    with pytest.raises(BrokenLog, match="lists a file twice"):
        archive.segments(BOX)


@pytest.mark.parametrize("name", ["before", "chain"])
def test_a_forged_hash_in_a_manifest_is_noticed_and_never_merged_into_a_file(
    archive: ParquetLogArchive, file: Path, name: str
) -> None:
    keep(archive, LAST + 1, LAST + 2)
    manifest = file.with_name("manifest.json")
    manifest.write_text(manifest.read_text().replace(f'"{name}": "', f'"{name}": "{"1" * 64}", "was": "', 1))
    with pytest.raises(BrokenLog, match="is not the one that the manifest"):
        archive.check_files(BOX)
    assert archive.compact(BOX) == 2
    archive.check_files(BOX)
    assert [commit.first for commit in archive.commits(BOX)][:3] == [1, 2, 3]


def test_folders_and_pipes_with_the_name_of_a_segment_are_no_segments(
    archive: ParquetLogArchive, file: Path
) -> None:
    os.mkfifo(file.with_name("0000000000100-0000000000101.v3.parquet"))  # reading it would wait forever
    file.with_name("0000000000102-0000000000103.v3.parquet").mkdir()
    assert [segment.last for segment in archive.segments(BOX)] == [LAST]


def test_a_file_of_a_later_format_is_refused(archive: ParquetLogArchive, unlisted: Path) -> None:
    unlisted.rename(unlisted.with_name(unlisted.name.replace("v3", "v4")))
    with pytest.raises(InvalidRequest, match="format 4, of a later release"):
        archive.segments(BOX)


def test_segments_that_are_large_in_memory_are_not_merged(
    archive: ParquetLogArchive, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(archive, LAST + 1, LAST + 2)
    monkeypatch.setattr(segment_checks, "MERGED_UNCOMPRESSED_BYTES", 100)
    assert archive.compact(BOX) == 0


@pytest.mark.parametrize("address", ["gs://bucket/prefix", "ftp://host/path", "s3://"])
def test_an_address_of_another_kind_of_store_is_refused_at_once(address: str) -> None:
    with pytest.raises(InvalidRequest, match=r"Name a folder, or an object store as s3://BUCKET/PREFIX"):
        ParquetLogArchive(address)
