"""Anchors: what `verify --anchor` finds that a log alone can't show."""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.anchors.file import AnchorFile
from postroom.adapters.cli import inspect, log
from postroom.adapters.cli.output import Output
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import load_settings
from postroom.adapters.cli.values import WrongUsage
from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.access import open_audit_log
from postroom.adapters.compose.store import open_store
from postroom.domain.errors import BrokenLog, IntegrityFailure, InvalidRequest, NotFound, Unavailable
from tests.conformance.audit_log import entry
from tests.support.replaced_logs import cut, run_sql
from tests.support.servers.timestamps import Authority, timestamp_authority
from tests.support.stores import MAILBOX, message

Captured = pytest.CaptureFixture[str]
Run = Callable[..., Any]
ANCHORS = Path("anchors.jsonl")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authority]:
    with timestamp_authority(tmp_path_factory.mktemp("authority")) as running:
        yield running


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> Run:
    """Return a function that runs `anchor` or `verify` on the store of the working directory."""
    monkeypatch.chdir(tmp_path)

    def run_command(command: Run, *args: str, mailbox: str | None = None, **options: Any) -> Any:
        settings = load_settings({"store": "store.db"} | ({"mailbox": mailbox} if mailbox else {}), {})
        command(Session("anchor", settings, Output(as_json=True)), *args, **options)
        return json.loads(capsys.readouterr().out)

    return run_command


def send(count: int = 1, mailbox: str = MAILBOX) -> None:
    async def send_messages() -> None:
        async with open_mailbox("store.db", mailbox, durability="relaxed") as opened:
            for _ in range(count):
                await opened.send_message(message())

    asyncio.run(send_messages())


def settle() -> None:
    async def ack_next() -> None:
        async with open_mailbox("store.db", MAILBOX, durability="relaxed") as opened:
            (received,) = await opened.receive_messages("orders", max_messages=1)
            await opened.ack_messages([received.receipt])

    asyncio.run(ack_next())


def delete_old_events() -> None:
    async def delete() -> None:
        async with open_mailbox("store.db", MAILBOX, durability="relaxed") as opened:
            await opened.delete_old_events(time.time_ns() // 1_000)

    asyncio.run(delete())


async def record_access() -> None:
    async with open_audit_log(open_store("store.db")) as log:
        await log.record([entry()])


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", folder, *arguments], check=True, capture_output=True, text=True
    ).stdout


def refuse(error: type[Exception], text: str, run: Run) -> None:
    """Expect that neither `verify` nor `anchor` accepts the anchors."""
    with pytest.raises(error, match=text):
        run(inspect.verify, anchor=str(ANCHORS))
    with pytest.raises(error, match=text):
        run(log.anchor, str(ANCHORS))


def test_anchors_of_every_log_are_appended_when_it_has_changed(run: Run) -> None:
    send()
    asyncio.run(record_access())
    first = run(log.anchor, str(ANCHORS))
    assert ([each["log"] for each in first["anchors"]], first["unchanged"]) == ([MAILBOX, "$audit"], 0)
    assert run(log.anchor, str(ANCHORS)) == {"file": str(ANCHORS), "anchors": [], "unchanged": 2}
    send()
    assert [each["log"] for each in run(log.anchor, str(ANCHORS))["anchors"]] == [MAILBOX]

    verified = run(inspect.verify, anchor=str(ANCHORS))
    assert [each["anchors"] for each in verified["mailboxes"] + verified["logs"]] == [2, 1]


def test_a_log_that_was_cut_off_together_with_its_seal_is_known_by_its_anchor(run: Run) -> None:
    send()
    earlier = Path("store.db").read_bytes()
    send()
    run(log.anchor, str(ANCHORS))
    Path("store.db").write_bytes(earlier)

    run(inspect.verify)  # by itself the log is intact
    before = ANCHORS.read_bytes()
    refuse(BrokenLog, "its end was cut off", run)
    send(5)  # it grows beyond the anchor, with other commits
    refuse(BrokenLog, "it was rewritten", run)
    assert ANCHORS.read_bytes() == before


def test_a_log_that_was_removed_is_missed(run: Run) -> None:
    send()
    send(mailbox="acme@two")
    run(log.anchor, str(ANCHORS))
    Path("store.db").unlink()
    send()
    refuse(BrokenLog, "has no log of acme@two", run)


def test_anchors_older_than_what_retention_left_are_counted_and_do_not_fail(run: Run) -> None:
    for _ in range(3):
        send()
        settle()
        run(log.anchor, str(ANCHORS), mailbox=MAILBOX)
    delete_old_events()
    (verified,) = run(inspect.verify, anchor=str(ANCHORS), mailbox=MAILBOX)["mailboxes"]
    assert verified["first"] > 1
    assert verified["older_anchors"] >= 1
    assert verified["anchors"] + verified["older_anchors"] == 3
    assert len(run(log.anchor, str(ANCHORS))["anchors"]) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line[:-1],
        lambda line: line.replace(b'"position":', b'"position": '),
        lambda line: line.replace(b'"position":', b'"position":-'),
        lambda line: line.replace(b'"chain":"', b'"chain":"zz'),
        lambda line: b"[" * 100_000,
        lambda line: b"\xff\x00",
    ],
    ids=["cut", "blank", "negative", "chain", "deep", "bytes"],
)
def test_another_line_than_an_anchor_is_named_and_nothing_is_written(
    run: Run, change: Callable[[bytes], bytes]
) -> None:
    send()
    run(log.anchor, str(ANCHORS))
    ANCHORS.write_bytes(change(ANCHORS.read_bytes().strip()) + b"\n")
    before = ANCHORS.read_bytes()
    refuse(InvalidRequest, r"Line 1 of anchors\.jsonl is not an anchor", run)
    assert ANCHORS.read_bytes() == before


def test_a_line_that_a_crash_left_incomplete_is_replaced_by_the_next_anchor(run: Run) -> None:
    send()
    run(log.anchor, str(ANCHORS))
    whole = ANCHORS.read_bytes()
    ANCHORS.write_bytes(whole + whole[:30])
    with pytest.raises(
        InvalidRequest, match=r"last line of anchors\.jsonl is incomplete.* run postroom anchor"
    ):
        run(inspect.verify, anchor=str(ANCHORS))
    send()
    run(log.anchor, str(ANCHORS))
    assert ANCHORS.read_bytes().startswith(whole + b'{"log":')
    assert len(AnchorFile(ANCHORS).read()) == 2


@pytest.mark.parametrize("end", [0, -1, 40], ids=["empty", "without its line break", "cut"])
def test_an_anchor_file_that_was_cut_verifies_nothing(run: Run, end: int) -> None:
    send()
    run(log.anchor, str(ANCHORS))
    ANCHORS.write_bytes(ANCHORS.read_bytes()[:end])
    with pytest.raises(InvalidRequest, match=r"is empty, so no log|is incomplete: the file was cut"):
        run(inspect.verify, anchor=str(ANCHORS))


def test_an_anchor_file_without_the_mailbox_verifies_nothing(run: Run) -> None:
    send()
    run(log.anchor, str(ANCHORS))
    send(mailbox="acme@two")
    with pytest.raises(InvalidRequest, match="has no anchor of acme@two"):
        run(inspect.verify, anchor=str(ANCHORS), mailbox="acme@two")


def test_a_store_without_logs_is_not_verified(run: Run) -> None:
    send()
    cut("store.db", 0)
    with pytest.raises(NotFound, match=r"store\.db has no log with a record, so nothing was verified"):
        run(inspect.verify)
    run_sql("store.db", "DELETE FROM mailbox_names")
    with pytest.raises(NotFound, match=r"store\.db has no log with a record, so nothing was verified"):
        run(inspect.verify)


def test_a_log_under_the_name_of_another_mailbox_is_named(run: Run) -> None:
    send()
    run_sql("store.db", "UPDATE mailbox_names SET name = 'acme@other'")
    with pytest.raises(BrokenLog, match=f"the log of {MAILBOX} under the name acme@other"):
        run(inspect.verify)


def test_files_that_can_not_be_used_are_refused(run: Run) -> None:
    send()
    with pytest.raises(NotFound, match="create it with postroom anchor"):
        run(inspect.verify, anchor="missing")
    os.mkfifo("pipe")
    with pytest.raises(InvalidRequest, match="not an anchor file"):
        run(log.anchor, "pipe")
    with pytest.raises(Unavailable, match="can't be used"):
        run(log.anchor, "no/folder")
    with ANCHORS.open("w") as held:
        flock(held, LOCK_EX)
        with pytest.raises(Unavailable, match="Another process is writing"):
            run(log.anchor, str(ANCHORS))


def test_anchors_are_committed_to_git_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    send()
    with pytest.raises(InvalidRequest, match="not in a git repository"):
        run(log.anchor, str(ANCHORS), git=True)
    assert not ANCHORS.exists()

    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "Ada")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "ada@example.com")
    repository = Path("repository")
    repository.mkdir()
    git(repository, "init", "-q")
    (repository / "other").write_text("staged by somebody else")
    git(repository, "add", "other")
    file = repository / "anchors.jsonl"
    run(log.anchor, str(file), git=True)
    send()
    run(log.anchor, str(file), git=True)
    run(log.anchor, str(file), git=True)
    history = git(repository, "log", "--format=%s", "--name-only").split("\n")
    assert [line for line in history if line] == ["Anchor 1 log", "anchors.jsonl"] * 2

    (repository / ".git" / "index.lock").touch()
    send()
    with pytest.raises(Unavailable, match=r"are in repository/anchors\.jsonl, but git add failed"):
        run(log.anchor, str(file), git=True)
    (repository / ".git" / "index.lock").unlink()
    assert run(log.anchor, str(file), git=True)["anchors"] == []
    assert git(repository, "diff", "HEAD", "--", file.name) == ""


def test_an_authority_certifies_when_an_anchor_existed(run: Run, authority: Authority) -> None:
    send()
    run(log.anchor, str(ANCHORS))
    send()
    run(log.anchor, str(ANCHORS), timestamp=authority.url)
    verified = run(inspect.verify, anchor=str(ANCHORS), timestamp_ca=str(authority.root))
    assert len(verified["timestamps"]) == 1

    lines = [json.loads(line) for line in ANCHORS.read_text().splitlines()]
    lines[1]["anchored_at"] += 1
    ANCHORS.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    with pytest.raises(IntegrityFailure, match="The time stamp of the anchor"):
        run(inspect.verify, anchor=str(ANCHORS), timestamp_ca=str(authority.root))


def test_a_time_stamp_of_an_unknown_authority_is_refused(
    run: Run, authority: Authority, tmp_path: Path
) -> None:
    send()
    run(log.anchor, str(ANCHORS), timestamp=authority.url)
    other = tmp_path / "other"
    other.mkdir()
    with timestamp_authority(other) as stranger, pytest.raises(IntegrityFailure, match="is not valid"):
        run(inspect.verify, anchor=str(ANCHORS), timestamp_ca=str(stranger.root))
    with pytest.raises(InvalidRequest, match="no PEM certificate"):
        run(inspect.verify, anchor=str(ANCHORS), timestamp_ca="store.db")
    with pytest.raises(WrongUsage, match="--anchor"):
        run(inspect.verify, timestamp_ca=str(authority.root))


@pytest.mark.parametrize("fault", ["refuse", "garbage", "other"])
def test_without_a_time_stamp_nothing_is_anchored(run: Run, authority: Authority, fault: str) -> None:
    send()
    authority.faults.append(fault)
    with pytest.raises(Unavailable, match="time stamp authority"):
        run(log.anchor, str(ANCHORS), timestamp=authority.url)
    assert ANCHORS.read_bytes() == b""
    with pytest.raises(InvalidRequest, match="not the URL"):
        run(log.anchor, str(ANCHORS), timestamp="ftp://example.com")
