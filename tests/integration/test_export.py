"""What the file of an export holds, whatever happens while it is written."""

import asyncio
import csv
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def export(store: Path, format_: Format, file: Path, *topics: str, **options: Any) -> int:
    source, _ = export_messages(str(store), EventFilter(topics=topics), format_, file, **options)
    return source.messages


def ids(format_: Format, file: Path) -> set[str]:
    return {row["message_id"] for row in read_back(format_, file)}


def is_left(file: Path) -> bool:
    """Return whether there is anything beside `file` that an export left."""
    return any(each.name.startswith(".") for each in file.parent.iterdir())


@BY_FORMAT
def test_the_file_of_an_export_is_for_its_owner_only(store: Path, format_: Format, tmp_path: Path) -> None:
    file, umask = tmp_path / "out", os.umask(0o022)
    try:
        export(store, format_, file, "topic-1")
        file.chmod(0o644)
        export(store, format_, file, "topic-1", overwrite=True)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@BY_FORMAT
def test_an_export_is_only_replaced_where_that_is_asked_for(
    store: Path, format_: Format, tmp_path: Path
) -> None:
    file = tmp_path / "deep" / "out"
    export(store, format_, file, "topic-0")
    before = ids(format_, file)
    with pytest.raises(InvalidRequest, match="exists; add --overwrite"):
        export(store, format_, file, "topic-1")
    assert ids(format_, file) == before == {f"m-{n}" for n in range(0, 500, 5)}
    export(store, format_, file, "topic-1", overwrite=True, envelope=False)
    assert ids(format_, file) == {f"m-{n}" for n in range(1, 500, 5)}
    assert not is_left(file)


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "'quoted", '=HYPERLINK("http://x")']


def test_csv_holds_no_text_that_a_spreadsheet_evaluates(tmp_path: Path) -> None:
    path, out = tmp_path / "store.db", tmp_path / "out"
    sent = [
        NewMessage(topic="-t", payload=text.encode(), principal=text.strip(), message_id=f"={n}")
        for n, text in enumerate(FORMULAS)
    ]
    histories.send(path, "main@test", sent)
    histories.build_without_spark(path)
    export(path, "csv", out, payload=True)
    with open(out, encoding="utf-8", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))] == []
    read = {(row["topic"], row["message_id"], row["payload"]) for row in read_back("csv", out)}
    assert read == {("-t", f"={n}", text.encode()) for n, text in enumerate(FORMULAS)}


@BY_FORMAT
def test_nothing_but_an_export_is_ever_replaced(store: Path, format_: Format, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidRequest, match=rf"thesis\.txt is not an export as {format_}"):
        export(store, format_, tmp_path / "thesis.txt", overwrite=True)
    with pytest.raises(InvalidRequest, match="is a folder"):
        export(store, format_, tmp_path, overwrite=True)
    with pytest.raises(Unavailable, match="can't be written"):
        export(store, format_, tmp_path / "thesis.txt" / "deeper")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("thesis.txt", "years of work")]


@BY_FORMAT
def test_an_export_of_another_format_is_not_replaced(store: Path, format_: Format, tmp_path: Path) -> None:
    export(store, format_, tmp_path / "out", "topic-0")
    for other in FORMATS:
        if other != format_:
            with pytest.raises(InvalidRequest, match=f"is not an export as {other}"):
                export(store, other, tmp_path / "out", overwrite=True)
    assert len(ids(format_, tmp_path / "out")) == 100


@BY_FORMAT
def test_a_failed_export_leaves_what_was_there(store: Path, format_: Format, tmp_path: Path) -> None:
    def fail(done: int) -> None:
        if done > 300:
            raise RuntimeError("a defect")

    file = tmp_path / "out"
    with pytest.raises(RuntimeError):
        export(store, format_, file, progress=fail)
    assert list(tmp_path.iterdir()) == []
    export(store, format_, file, "topic-0")
    content = file.read_bytes()
    with pytest.raises(RuntimeError):
        export(store, format_, file, progress=fail, overwrite=True)
    assert file.read_bytes() == content
    assert not is_left(file)


@BY_FORMAT
def test_a_killed_export_leaves_nothing_that_looks_complete(
    store: Path, format_: Format, tmp_path: Path
) -> None:
    file = tmp_path / "out"
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
    arguments = [sys.executable, "-c", script, str(store), format_, str(file)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 300
        assert not file.exists()
        process.send_signal(signal.SIGKILL)
    assert not file.exists()
    assert is_left(file)
    assert export(store, format_, file) == 500
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@BY_FORMAT
def test_of_two_exports_to_one_file_at_a_time_one_is_refused(
    store: Path, format_: Format, tmp_path: Path
) -> None:
    refusals: list[object] = []

    def meanwhile(done: int) -> None:
        if done > 300 and not refusals:
            with pytest.raises(InvalidRequest, match="exports to") as refused:
                export(store, format_, tmp_path / "out", "topic-0")
            refusals.append(refused)

    assert export(store, format_, tmp_path / "out", progress=meanwhile) == 500
    assert len(ids(format_, tmp_path / "out")) == 500
    assert not is_left(tmp_path / "out")
    assert refusals


@BY_FORMAT
def test_a_file_that_appears_meanwhile_is_kept(store: Path, format_: Format, tmp_path: Path) -> None:
    file = tmp_path / "out"
    with pytest.raises(InvalidRequest, match="is not an export"):
        export(store, format_, file, progress=lambda done: file.write_text("mine") and None)
    assert file.read_text() == "mine"
    assert not is_left(file)


@BY_FORMAT
def test_small_parts_and_row_groups_change_no_row(
    store: Path, format_: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(store, format_, tmp_path / "one", payload=True)
    monkeypatch.setattr("postroom.adapters.export.file.PART_BYTES", 1_000)
    monkeypatch.setattr("postroom.adapters.export.file.ROW_GROUP_MESSAGES", 7)
    export(store, format_, tmp_path / "two", payload=True)
    assert read_back(format_, tmp_path / "two") == read_back(format_, tmp_path / "one")


def test_an_export_says_where_its_messages_come_from(store: Path, tmp_path: Path) -> None:
    wanted = EventFilter(topics=("topic-1", "topic-2"))
    source, size = export_messages(str(store), wanted, "json", tmp_path / "out")
    assert (source.filter, source.version) == ({"topics": ("topic-1", "topic-2")}, 1)
    assert (source.positions, source.messages) == ({"main@test": 502}, 200)
    assert size == (tmp_path / "out").stat().st_size


def test_no_message_is_an_export_too(store: Path, tmp_path: Path) -> None:
    for format_ in FORMATS:
        for _ in range(2):
            assert export(store, format_, tmp_path / format_, "nothing", overwrite=True) == 0
            assert read_back(format_, tmp_path / format_) == []


def test_before_the_first_rebuild_there_is_nothing_to_export(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    histories.send(store, "main@test", MESSAGES[:1])
    (tmp_path / "exports").mkdir()
    with pytest.raises(NotFound, match="postroom views rebuild"):
        export(store, "parquet", tmp_path / "exports" / "out")
    assert list((tmp_path / "exports").iterdir()) == []


@pytest.mark.extended
def test_a_database_is_exported_as_a_file_is(postgres_store: str, store: Path, tmp_path: Path) -> None:
    histories.send(postgres_store, "main@test", MESSAGES)
    histories.build_without_spark(postgres_store)
    wanted = EventFilter(topics=("topic-1", "topic-2"))
    for format_ in FORMATS:
        rows = []
        for number, each in enumerate((str(store), postgres_store)):
            file = tmp_path / f"{format_}-{number}"
            export_messages(each, wanted, format_, file, payload=True)
            rows.append(read_back(format_, file))
        assert rows[0] == rows[1]
        assert len(rows[0]) == 200


def test_a_topic_of_any_length_and_script_is_exported(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    topic = "長" * 100
    histories.send(store, "main@test", [NewMessage(topic=topic, payload=b"")])
    histories.build_without_spark(store)
    for format_ in FORMATS:
        export(store, format_, tmp_path / format_, payload=True)
        assert [row["topic"] for row in read_back(format_, tmp_path / format_)] == [topic]


@BY_FORMAT
def test_no_auth_token_and_no_encrypted_payload_leaves_in_an_export(
    sealed: Path, format_: Format, tmp_path: Path
) -> None:
    export(sealed, format_, tmp_path / "out", payload=True)
    (row,) = read_back(format_, tmp_path / "out")
    assert (row["encryption"], row["payload"]) == ("AES-256-GCM", None)
    envelope = PrismEnvelope.FromString(row["envelope"])
    assert (envelope.security.publisher_id, envelope.payload.value) == ("alice", b"\x00sealed")
    assert b"hush-hush" not in (tmp_path / "out").read_bytes()


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
