"""The log archive conformance suite on Parquet files, and what only files can promise."""

import stat
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from postroom.adapters.parquet.log_archive import SCHEMA, ParquetLogArchive
from postroom.domain.errors import BrokenLog, Unavailable
from postroom.domain.record import GENESIS, Record
from tests.conformance.log_archive import BOX, RECORDS, LogArchiveConformance, keep


class TestParquetLogArchive(LogArchiveConformance):
    @pytest.fixture
    def archive(self, tmp_path: Path) -> ParquetLogArchive:
        return ParquetLogArchive(tmp_path / "archive")


@pytest.fixture
def archive(tmp_path: Path) -> ParquetLogArchive:
    return ParquetLogArchive(tmp_path / "archive")


@pytest.fixture
def file(archive: ParquetLogArchive, tmp_path: Path) -> Path:
    """A file with the records 1 to 10."""
    keep(archive, 1, 10)
    return tmp_path / "archive" / BOX / "0000000000001-0000000000010.parquet"


def test_any_parquet_reader_reads_the_columns_of_the_log(file: Path) -> None:
    table = pq.read_table(file)
    assert tuple(table.column_names) == Record._fields
    assert table.schema.equals(SCHEMA)
    assert [tuple(row.values()) for row in table.to_pylist()] == [tuple(record) for record in RECORDS[:10]]


def test_a_file_says_what_it_holds_and_what_it_is_chained_to(file: Path) -> None:
    assert pq.read_schema(file).metadata == {
        b"postroom.format": b"1",
        b"postroom.mailbox": BOX.encode(),
        b"postroom.first": b"1",
        b"postroom.last": b"10",
        b"postroom.before": GENESIS.hex().encode(),
        b"postroom.chain": RECORDS[9].chain.hex().encode(),
    }


def test_files_and_folders_are_for_their_owner_only(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_what_a_crash_left_unfinished_is_not_read_nor_kept(archive: ParquetLogArchive, file: Path) -> None:
    unfinished = file.with_name(".abc.tmp")
    unfinished.write_bytes(file.read_bytes()[:100])
    assert [segment.last for segment in archive.segments(BOX)] == [10]
    keep(archive, 11, 12)
    assert not unfinished.exists()


def test_a_file_of_another_name_is_refused(archive: ParquetLogArchive, file: Path) -> None:
    file.rename(file.with_name("0000000000011-0000000000020.parquet"))
    for ask in (archive.segments, archive.last_segment, lambda box: list(archive.read(box))):
        with pytest.raises(BrokenLog, match="renamed or not written by Postroom"):
            ask(BOX)


def test_a_file_that_lost_its_last_records_is_noticed(archive: ParquetLogArchive, file: Path) -> None:
    table = pq.read_table(file)
    pq.write_table(table.slice(0, 9), file)
    with pytest.raises(BrokenLog, match="its own last hash"):
        list(archive.read(BOX))


def test_an_edited_record_is_noticed(archive: ParquetLogArchive, file: Path) -> None:
    table = pq.read_table(file)
    at = table.schema.get_field_index("at")
    edited = pa.array([value + 1 for value in table["at"].to_pylist()], pa.int64())
    pq.write_table(table.set_column(at, table.schema.field(at), edited), file)
    with pytest.raises(BrokenLog, match=r"0000000000010.parquet was altered.*position 1"):
        list(archive.read(BOX))


def test_a_damaged_file_and_a_folder_that_can_not_be_made_are_named(
    archive: ParquetLogArchive, file: Path, tmp_path: Path
) -> None:
    file.write_bytes(b"PAR1 this is not what it was PAR1")
    with pytest.raises(Unavailable, match="parquet can't be read"):
        list(archive.read(BOX))
    (tmp_path / "taken").touch()
    with pytest.raises(Unavailable, match="can't be written"):
        keep(ParquetLogArchive(tmp_path / "taken"), 1, 2)
