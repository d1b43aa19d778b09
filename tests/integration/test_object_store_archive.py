"""The archive in an object store: the same files and promises as in a folder."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.archive import build_segments
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.compose.store import open_log_reader, open_store
from postroom.adapters.parquet import log_archive
from postroom.adapters.parquet.log_archive import ParquetLogArchive
from postroom.application.messages import NewMessage
from postroom.domain.errors import BrokenLog, InvalidRequest, Unavailable
from postroom.domain.policy import DAY_MS, MailboxLimits
from postroom.domain.settings import SettingsChanges
from postroom.projections.log_reader import Range
from tests.conformance.log_archive import BOX, LogArchiveConformance, keep
from tests.support.servers.object_store import BUCKET, ObjectStoreServer

NUMBERS = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStoreServer]:
    with pytest.MonkeyPatch.context() as patch, ObjectStoreServer(tmp_path_factory.mktemp("moto")) as server:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def url(server: ObjectStoreServer) -> str:  # it must run
    return f"s3://{BUCKET}/{next(NUMBERS)}/archive"


class TestObjectStoreArchive(LogArchiveConformance):
    @pytest.fixture
    def archive(self, url: str) -> ParquetLogArchive:
        return ParquetLogArchive(url)


def test_a_missing_object_and_another_one_are_named(url: str) -> None:
    archive = ParquetLogArchive(url)
    keep(archive, 1, 20)
    (file,) = archive.files(BOX)
    content = file.folder.read(file.path).to_pybytes()
    with file.folder.files.open_output_stream(file.path) as stream:
        stream.write(content[:-20] + bytes(20))
    with pytest.raises(BrokenLog, match=r"\.v3\.parquet .* is not the one that the manifest\.json"):
        archive.check_files(BOX)
    file.folder.remove(file.path)
    with pytest.raises(BrokenLog, match="The archive lacks the file"):
        archive.check_files(BOX)


def test_segments_are_merged_while_they_are_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_archive, "KEEP_MERGED_SECONDS", 0)
    archive = ParquetLogArchive(url)
    keep(archive, 1, 10)
    keep(archive, 11, 40)
    commits = archive.commits(BOX)
    read = [next(commits)]
    assert archive.compact(BOX) == 2
    read += commits
    assert [each.first for each in read] == [1, *(each.last + 1 for each in read[:-1])]
    assert len(archive.segments(BOX)) == len(archive.files(BOX)) == 1


@pytest.mark.parametrize("address", ["nothing://bucket/x", "s3://"])
def test_a_wrong_address_is_named(address: str) -> None:
    with pytest.raises(InvalidRequest, match="Name a folder, or an object store as s3://BUCKET/PREFIX"):
        ParquetLogArchive(address)


def test_a_bucket_that_does_not_exist_is_named(server: ObjectStoreServer) -> None:
    archive = ParquetLogArchive("s3://no-such-bucket/archive")
    with pytest.raises(Unavailable, match=r"no-such-bucket/archive.* can't be written.*Check the bucket"):
        keep(archive, 1, 20)


async def settle(mailbox: OwnedMailbox, number: int) -> None:
    await mailbox.send_batch([NewMessage(topic="orders", payload=b"%d" % each) for each in range(number)])
    while taken := await mailbox.receive_messages("orders", max_messages=100):
        await mailbox.ack_messages([each.receipt for each in taken])


async def test_retention_archives_to_an_object_store_what_queries_and_projections_read(
    tmp_path: Path, url: str
) -> None:
    store = str(tmp_path / "store.db")
    async with open_mailbox(store, archive=url, limits=MailboxLimits(history_retention_ms=DAY_MS)) as mailbox:
        await settle(mailbox, 20)
        name = mailbox.engine.log.mailbox
        built = build_segments(store, name, ParquetLogArchive(url), is_whole=True)
        assert (built.added, built.remaining) == (1, 0)
        await mailbox.set_settings(SettingsChanges({"history_retention_ms": 1}))
        assert await mailbox.retention.enforce_age() > 40
        last = mailbox.engine.mailbox.position
    with read_mailbox(store, archive=url) as reader:
        assert next(iter(reader.log.commits())).first == 1
    log = open_log_reader(open_store(store), url)
    (extent,) = log.extents()
    batches = log.read([Range(extent, 1, last)], ["position", "topic"])
    assert [each for batch in batches for each in batch["position"].to_pylist()] == list(range(1, last + 1))
