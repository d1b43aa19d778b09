"""What the folder of an export holds, whatever happens while it is written."""

import asyncio
import csv
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.export import Format, export_messages
from postroom.application.messages import NewMessage
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from postroom.domain.search import EventFilter
from tests.projections import histories
from tests.support.exports import FORMATS, read_back

DAY_US = 86_400_000_000
MESSAGES = [
    NewMessage(
        topic=f"topic-{n % 5}", payload=b"%d" % n, message_id=f"m-{n}", published_at_us=n // 250 * DAY_US + n
    )
    for n in range(500)
]
BY_FORMAT = pytest.mark.parametrize("format_", FORMATS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "store.db"
    histories.send(path, "main@test", MESSAGES)
    histories.build_without_spark(path)
    return path


def export(store: Path, format_: Format, folder: Path, *topics: str, **options: Any) -> int:
    source, _ = export_messages(str(store), EventFilter(topics=topics), format_, folder, **options)
    return source.messages


def ids(format_: Format, folder: Path) -> set[str]:
    return {row["message_id"] for row in read_back(format_, folder)}


def is_left(folder: Path) -> bool:
    """Tell whether there is anything beside `folder` that an export left."""
    return any(each.name.startswith(".") for each in folder.parent.iterdir())


@BY_FORMAT
def test_the_files_of_an_export_are_for_its_owner_only(store: Path, format_: Format, tmp_path: Path) -> None:
    folder, umask = tmp_path / "out", os.umask(0o022)
    try:
        export(store, format_, folder, "topic-1")
        export(store, format_, folder, "topic-1", overwrite=True)
    finally:
        os.umask(umask)
    modes = {(each.is_dir(), stat.S_IMODE(each.stat().st_mode)) for each in (folder, *folder.rglob("*"))}
    assert modes == {(True, 0o700), (False, 0o600)}


@BY_FORMAT
def test_an_export_is_only_replaced_where_that_is_asked_for(
    store: Path, format_: Format, tmp_path: Path
) -> None:
    folder = tmp_path / "deep" / "out"
    export(store, format_, folder, "topic-0")
    before = ids(format_, folder)
    with pytest.raises(InvalidRequest, match="already contains an export; add --overwrite"):
        export(store, format_, folder, "topic-1")
    assert ids(format_, folder) == before == {f"m-{n}" for n in range(0, 500, 5)}
    export(store, format_, folder, "topic-1", overwrite=True, envelope=False)
    assert ids(format_, folder) == {f"m-{n}" for n in range(1, 500, 5)}
    assert not is_left(folder)


def test_the_history_of_a_delta_table_has_the_exports_before(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for topic in ("topic-0", "topic-*"):
        export(store, "delta", folder, topic, overwrite=True)
    assert [pl.read_delta(str(folder), version=n).height for n in (0, 1)] == [100, 500]
    newest, _ = DeltaTable(folder).history()
    assert json.loads(newest["postroom_export"])["filter"] == {"topics": ["topic-*"]}


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "'quoted", '=HYPERLINK("http://x")']


def test_csv_holds_no_text_that_a_spreadsheet_evaluates(tmp_path: Path) -> None:
    path, folder = tmp_path / "store.db", tmp_path / "out"
    sent = [
        NewMessage(topic="-t", payload=text.encode(), principal=text.strip(), message_id=f"={n}")
        for n, text in enumerate(FORMULAS)
    ]
    histories.send(path, "main@test", sent)
    histories.build_without_spark(path)
    export(path, "csv", folder, payload=True)
    with open(next(folder.rglob("*.csv")), encoding="utf-8", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))] == []
    read = {(row["topic"], row["message_id"], row["payload"]) for row in read_back("csv", folder)}
    assert read == {("-t", f"={n}", text.encode()) for n, text in enumerate(FORMULAS)}


@BY_FORMAT
def test_nothing_but_an_export_is_ever_replaced(store: Path, format_: Format, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidRequest, match=r"thesis\.txt; name an empty folder"):
        export(store, format_, folder, overwrite=True)
    with pytest.raises(InvalidRequest, match="is a file"):
        export(store, format_, folder / "thesis.txt", overwrite=True)
    with pytest.raises(Unavailable, match="can't be written"):
        export(store, format_, folder / "thesis.txt" / "deeper")
    assert [each.name for each in folder.iterdir()] == ["thesis.txt"]


def test_an_export_of_another_format_or_with_a_file_of_the_users_own_is_not_replaced(
    store: Path, tmp_path: Path
) -> None:
    folder, table = tmp_path / "out", tmp_path / "table"
    export(store, "csv", folder, "topic-0")
    export(store, "delta", table, "topic-0")
    for format_ in ("json", "parquet", "delta"):
        with pytest.raises(InvalidRequest, match="contains an export as csv"):
            export(store, format_, folder, overwrite=True)
    with pytest.raises(InvalidRequest, match="such as _delta_log"):
        export(store, "parquet", table, overwrite=True)
    with pytest.raises(InvalidRequest, match="partitioned by day and topic"):
        export(store, "delta", table, overwrite=True, by_topic=False)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InvalidRequest, match=r"notes\.txt"):
        export(store, "csv", folder, overwrite=True)
    DeltaTable.create(tmp_path / "other", pl.DataFrame({"a": [1]}).to_arrow().schema)
    with pytest.raises(InvalidRequest, match="Delta table that is not an export"):
        export(store, "delta", tmp_path / "other", overwrite=True)


@BY_FORMAT
def test_a_failed_export_leaves_what_was_there(store: Path, format_: Format, tmp_path: Path) -> None:
    def fail(done: int) -> None:
        if done > 300:
            raise RuntimeError("a defect")

    folder = tmp_path / "out"
    with pytest.raises(RuntimeError):
        export(store, format_, folder, progress=fail)
    assert list(tmp_path.iterdir()) == []
    export(store, format_, folder, "topic-0")
    files = sorted(folder.rglob("*"))
    with pytest.raises(RuntimeError):
        export(store, format_, folder, progress=fail, overwrite=True)
    assert {path for path in folder.rglob("*") if path.is_file()} == {
        path for path in files if path.is_file()
    }
    assert len(ids(format_, folder)) == 100
    assert not is_left(folder)


@BY_FORMAT
def test_a_killed_export_leaves_nothing_that_looks_complete(
    store: Path, format_: Format, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    script = (
        "import sys, time\n"
        "from postroom.adapters.compose.export import export_messages\n"
        "from postroom.domain.search import EventFilter\n"
        "def stop(done):\n"
        "    if done > 300:\n"
        "        print(done, flush=True)\n"
        "        time.sleep(300)\n"
        "export_messages(*sys.argv[1:2], EventFilter(), *sys.argv[2:4], progress=stop)\n"
    )
    arguments = [sys.executable, "-c", script, str(store), format_, str(folder)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 300
        assert not folder.exists()
        process.send_signal(signal.SIGKILL)
    assert not folder.exists()
    assert is_left(folder)
    assert export(store, format_, folder) == 500
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@BY_FORMAT
def test_of_two_exports_into_one_folder_one_is_refused(store: Path, format_: Format, tmp_path: Path) -> None:
    folder = tmp_path / "out"

    def meanwhile(done: int) -> None:
        if done > 300 and not folder.exists():
            export(store, format_, folder, "topic-0")

    with pytest.raises(InvalidRequest, match="contains"):
        export(store, format_, folder, progress=meanwhile)
    assert len(ids(format_, folder)) == 100
    assert not is_left(folder)


@BY_FORMAT
def test_little_memory_and_few_open_files_change_no_row(
    store: Path, format_: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(store, format_, tmp_path / "one", payload=True)
    monkeypatch.setattr("postroom.adapters.export.partitions.BUFFER_BYTES", 50_000)
    monkeypatch.setattr("postroom.adapters.export.partitions.OPEN_FILES", 2)
    _, written = export_messages(str(store), EventFilter(), format_, tmp_path / "two", payload=True)
    assert read_back(format_, tmp_path / "two") == read_back(format_, tmp_path / "one")
    assert 10 < written.files < 100


def test_a_manifest_says_what_was_exported(store: Path, tmp_path: Path) -> None:
    export(store, "json", tmp_path / "out", "topic-1", "topic-2")
    files = (tmp_path / "out").rglob("part-*")
    assert json.loads((tmp_path / "out" / "_SUCCESS").read_text()) == {
        "postroom_export": "json",
        "source": {
            "filter": {"topics": ["topic-1", "topic-2"]},
            "version": 1,
            "positions": {"main@test": 502},
            "messages": 200,
        },
        "files": 4,
        "bytes": sum(path.stat().st_size for path in files),
    }


def test_no_message_is_an_export_too(store: Path, tmp_path: Path) -> None:
    for format_ in FORMATS:
        assert export(store, format_, tmp_path / format_, "nothing") == 0
        assert read_back(format_, tmp_path / format_) == []
    assert pl.read_delta(str(tmp_path / "delta")).columns[-2:] == ["day", "topic"]


def test_before_the_first_rebuild_there_is_nothing_to_export(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    histories.send(store, "main@test", MESSAGES[:1])
    (tmp_path / "exports").mkdir()
    with pytest.raises(NotFound, match="postroom project rebuild"):
        export(store, "parquet", tmp_path / "exports" / "out")
    assert list((tmp_path / "exports").iterdir()) == []


def test_a_database_is_exported_as_a_file_is(postgres_store: str, store: Path, tmp_path: Path) -> None:
    histories.send(postgres_store, "main@test", MESSAGES)
    histories.build_without_spark(postgres_store)
    wanted = EventFilter(topics=("topic-1", "topic-2"))
    for format_ in FORMATS:
        rows = []
        for number, each in enumerate((str(store), postgres_store)):
            folder = tmp_path / f"{format_}-{number}"
            export_messages(each, wanted, format_, folder, payload=True)
            rows.append(read_back(format_, folder))
        assert rows[0] == rows[1]
        assert len(rows[0]) == 200


def test_a_topic_that_no_folder_can_be_named_after_is_exported_by_day(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    topic = "長" * 100
    histories.send(store, "main@test", [NewMessage(topic=topic, payload=b"")])
    histories.build_without_spark(store)
    for format_ in FORMATS:
        out = tmp_path / "exports" / format_
        with pytest.raises(InvalidRequest, match="use --by day"):
            export(store, format_, out)
        export(store, format_, out, by_topic=False, payload=True)
        assert [row["topic"] for row in read_back(format_, out)] == [topic]


@BY_FORMAT
def test_no_auth_token_and_no_encrypted_payload_leaves_in_an_export(
    sealed: Path, format_: Format, tmp_path: Path
) -> None:
    export(sealed, format_, tmp_path / "out", payload=True)
    (row,) = read_back(format_, tmp_path / "out")
    assert (row["encryption"], row["payload"]) == ("AES-256-GCM", None)
    envelope = PrismEnvelope.FromString(row["envelope"])
    assert (envelope.security.publisher_id, envelope.payload.value) == ("alice", b"\x00sealed")
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_file() or b"hush-hush" not in path.read_bytes()


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A store with a message whose payload is encrypted and whose envelope carries an auth token."""
    envelope = PrismEnvelope(envelope_version=1)
    envelope.metadata.message_id, envelope.metadata.topic = "m", "t"
    envelope.metadata.namespace = "main"
    envelope.metadata.published_at.seconds = 1_750_000_000
    envelope.security.publisher_id, envelope.security.auth_token = "alice", "hush-hush"
    envelope.security.encryption.algorithm = "AES-256-GCM"
    envelope.payload.value = b"\x00sealed"

    async def send() -> None:
        async with open_mailbox(str(tmp_path / "store.db"), "main@test") as postroom:
            await postroom.send_envelopes([envelope.SerializeToString()])

    asyncio.run(send())
    histories.build_without_spark(tmp_path / "store.db")
    return tmp_path / "store.db"
