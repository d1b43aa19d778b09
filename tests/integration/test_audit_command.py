"""`postroom audit`, and the audit log in `postroom verify`."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from postroom.adapters.cli import inspect, verification
from postroom.adapters.cli.output import Output
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import load_settings
from postroom.adapters.cli.values import WrongUsage
from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.access import AuditSettings, open_audit_log
from postroom.adapters.compose.store import open_store
from postroom.application.access.audit import AuditEntry
from postroom.domain.errors import BrokenLog, InvalidRequest, NotFound
from tests.conformance.audit_log import entry
from tests.support.altered_commits import alter
from tests.support.stores import MAILBOX, message

Open = Callable[..., Session]
Captured = pytest.CaptureFixture[str]
ID = "0199d2c4-6f00-7a10-8c21-3b5b0f6f9e01"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return a function that opens the session of a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    def open_session(*, as_json: bool = False, wide: bool = False, **flags: str) -> Session:
        settings = load_settings({"store": "store.db"} | flags, {})
        return Session("audit", settings, Output(as_json, wide=wide))

    return open_session


async def record(*entries: AuditEntry) -> None:
    """Record entries in the store of the working directory, which has a mailbox, too."""
    async with open_mailbox("store.db", MAILBOX, durability="relaxed") as mailbox:
        await mailbox.send_message(message())
    async with open_audit_log(open_store("store.db")) as log:
        await log.record(entries)


def document(captured: Captured) -> Any:
    return json.loads(captured.readouterr().out)


async def test_the_table_has_whole_ids_and_fits_the_terminal(session: Open, capsys: Captured) -> None:
    await record(
        entry(principal="p" * 200, target=ID, operation="read-payload", outcome="E_CAP_SCOPE"),
        entry(principal="ada", target="", topics=("orders." + "t" * 200,), matches=17),
        entry(target="", topics=()),
    )
    verification.audit(session())
    shown = capsys.readouterr().out
    assert all(cell_len(line) <= 80 for line in shown.splitlines())
    newest, search, read = (line.split() for line in shown.splitlines()[2:])
    assert newest[1:] == ["ada", "read-headers", "all", "topics", "allowed"]
    assert search[3].startswith("orders.ttt")
    assert ID in read
    verification.audit(session(wide=True))
    shown = capsys.readouterr().out
    assert "orders." + "t" * 200 in shown
    assert "p" * 200 in shown
    assert "match" in shown


async def test_options_select_entries(session: Open, capsys: Captured) -> None:
    await record(
        entry(1), entry(2, principal="bob"), entry(3, outcome="E_CAP_SCOPE"), entry(4, topics=("a",))
    )

    def targets(**options: Any) -> list[str]:
        verification.audit(session(as_json=True), **options)
        return [each["target"] for each in document(capsys)["entries"]]

    assert targets() == ["m-4", "m-3", "m-2", "m-1"]
    assert targets(principal="bob") == ["m-2"]
    assert targets(outcome="E_CAP_SCOPE") == ["m-3"]
    assert targets(topic="orders", operation="read-headers") == ["m-3", "m-2", "m-1"]
    assert targets(id_="m-1") == ["m-1"]
    assert targets(since="1h", capability="00" * 16) == ["m-4", "m-3", "m-2", "m-1"]
    assert targets(until="1h") == []


async def test_pages_continue_with_a_cursor(session: Open, capsys: Captured) -> None:
    await record(entry(1), entry(2), entry(3))
    verification.audit(session(), limit=2)
    assert "There is more; continue with --cursor 2." in capsys.readouterr().err
    verification.audit(session(as_json=True), limit=2, cursor="2")
    page = document(capsys)
    assert ([each["target"] for each in page["entries"]], page["next_cursor"]) == (["m-1"], None)
    assert page["entries"][0]["at"].endswith("Z")


async def test_a_store_without_audited_accesses_has_none(session: Open, capsys: Captured) -> None:
    with pytest.raises(NotFound, match=r"no store at store\.db"):
        verification.audit(session())
    async with open_mailbox("store.db", MAILBOX, durability="relaxed"):
        pass
    verification.audit(session())
    verification.verify(session())
    assert capsys.readouterr().out.splitlines() == ["(none)", "Nothing was audited yet."]
    verification.verify(session(as_json=True))
    assert document(capsys) == {"log": None}
    inspect.verify(session(as_json=True))
    assert document(capsys)["logs"] == []


async def test_verification_detects_entries_that_were_altered_or_removed(
    session: Open, capsys: Captured
) -> None:
    await record(entry(1))
    await record(entry(2))
    verification.verify(session())
    expect = capsys.readouterr().out.rpartition("--expect ")[2].strip()
    inspect.verify(session(as_json=True))
    verified = document(capsys)
    assert [each["mailbox"] for each in verified["mailboxes"]] == [MAILBOX]
    assert [(each["mailbox"], each["last"]) for each in verified["logs"]] == [("$audit", 2)]
    inspect.verify(session(as_json=True, mailbox=MAILBOX))
    assert document(capsys)["logs"] == []
    with closing(sqlite3.connect("store.db")) as connection, connection:
        (id_,) = connection.execute("SELECT id FROM mailbox_names WHERE name = '$audit'").fetchone()
        connection.execute("DELETE FROM log WHERE place = ?", ((id_ << 40) + 2,))
        connection.execute("DELETE FROM seal")
    with pytest.raises(BrokenLog, match="leads to position 2"):
        verification.verify(session())
    with closing(sqlite3.connect("store.db")) as connection, connection:
        connection.execute("DELETE FROM log_index WHERE mailbox = ? AND position = 2", (id_,))
    verification.verify(session())
    with pytest.raises(BrokenLog, match="its end was cut off"):
        verification.verify(session(), expect)
    alter("store.db", "events", lambda events: events.replace(b"principal", b"Principal"))
    for verify in (verification.verify, inspect.verify):
        with pytest.raises(BrokenLog, match="positions 1 to 1 does not match its hash"):
            verify(session())
    with pytest.raises(BrokenLog, match="can't be read at position 1"):
        verification.audit(session())
    with pytest.raises(WrongUsage, match="POSITION:CHAIN"):
        verification.verify(session(), "2")


async def test_a_retention_out_of_bounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="retention_ms must be at least 3600000"):
        async with open_audit_log(open_store(str(tmp_path / "store.db")), AuditSettings(retention_ms=1)):
            pass
