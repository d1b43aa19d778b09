"""`postroom doctor` on the command line."""

import sqlite3
from contextlib import closing

from postroom import MailboxOutbox, NewMessage
from tests.e2e.conftest import Postroom


def test_doctor_fails_when_a_check_does_and_says_what_to_do_within_80_columns(postroom: Postroom) -> None:
    (postroom.folder / "postroom.toml").write_text(
        'store = "folder/orders.db"\n[nats]\nurl = "nats://127.0.0.1:1"\n[inbox]\nconcurency = 3\n'
    )
    done = postroom("doctor", "--json", "--within", "120s")
    assert done.code == 1
    failures = {each["check"]: each for each in done.json["checks"] if each["status"] == "failure"}
    assert not done.json["ok"]
    assert {"settings", "store", "nats"} <= set(failures)
    assert "did you mean concurrency?" in failures["settings"]["finding"]
    assert failures["store"]["advice"].startswith("Run: mkdir -p ")
    lines = postroom("doctor", "--within", "120s").out.splitlines()
    assert lines[0].split() == ["check", "status", "finding", "what", "to", "do"]
    assert max(map(len, lines)) <= 80
    assert sorted(each.name for each in postroom.folder.iterdir()) == ["postroom.toml"]


def test_doctor_succeeds_in_an_empty_folder(postroom: Postroom) -> None:
    done = postroom.ok("doctor", "--json", "--within", "120s")
    assert done.json["ok"]


def test_doctor_and_backlog_name_the_setting_that_reads_recorded_messages(postroom: Postroom) -> None:
    with closing(sqlite3.connect(postroom.folder / "shop.db")) as shop, shop:
        message = NewMessage(topic="orders", payload=b"", message_id="order-1")
        MailboxOutbox(wall=lambda: 1_000_000).record(shop, message)
    postroom.ok("send", "orders", "hello")
    assert postroom.ok("backlog", "--json").json["outboxes"] == []
    there = "--outbox", "shop.db"
    (counted,) = postroom.ok("backlog", "--json", *there).json["outboxes"]
    database = counted["database"]
    assert {each: counted[each] for each in ("mailbox", "waiting", "oldest_at", "exact")} == {
        "mailbox": "main@local",
        "waiting": 1,
        "oldest_at": 1_000_000,
        "exact": True,
    }
    assert f'Add "{database}" to [relay] databases' in counted["advice"]
    text = " ".join(postroom.ok("backlog", *there).out.split())
    assert f"outbox {database}: 1 message for main@local, the oldest" in text
    assert "no owner reads this database." in text
    (finding,) = [
        each
        for each in postroom.ok("doctor", "--json", "--within", "120s", *there).json["checks"]
        if each["check"] == "outboxes"
    ]
    assert finding["status"] == "warning"
    assert finding["finding"] == f"1 message for main@local in {database}: no owner reads this database"
    assert "outboxes" not in postroom.ok("backlog", "--json", "--at", "1", "--mailbox", "main@local").json
