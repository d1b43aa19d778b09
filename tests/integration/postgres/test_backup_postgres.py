"""Backup and restore of PostgreSQL stores, and from one kind of store to the other."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from postroom import MailboxOutbox
from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.backup import back_up, verify_backup
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.compose.restore import restore
from postroom.adapters.postgres.migrate import migrate
from postroom.domain.errors import (
    Fenced,
    InvalidRequest,
    MailboxOwned,
    Rejected,
    StaleReceipt,
    Unavailable,
    WrongPosition,
)
from tests.support.stores import MAILBOX, live, message, postgres_place, receive_one

ODD = "a\x00b\x1a\x1a0\N{SNOWMAN}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def database(postgres_store: str) -> Iterator["psycopg.Connection[Any]"]:
    with psycopg.connect(postgres_store, autocommit=True) as connection:
        yield connection


def records(store: str, mailbox: str = MAILBOX) -> list[object]:
    with read_mailbox(store, mailbox) as reader:
        return list(reader.log.read())


async def fill(store: str) -> None:
    async with open_mailbox(store, MAILBOX, durability="relaxed") as mailbox:
        await mailbox.send_message(message(b"to be removed"))
        await mailbox.ack_messages([(await receive_one(mailbox)).receipt])
        await mailbox.delete_old_events(mailbox.engine.now() + 1)
        await live(mailbox, 9)
        await mailbox.send_batch([message(b"odd", correlation_id=ODD, attrs={"x-odd": ODD})])


async def test_a_backup_of_a_database_is_restored_into_a_file_and_from_there_into_a_database(
    postgres_store: str, create_database: Any, postgres_store_template: str
) -> None:
    await fill(postgres_store)
    expected = records(postgres_store)
    manifest = back_up(postgres_store, Path("one"))
    await restore(Path("one"), "store.db")
    back_up("store.db", Path("two"))
    other = create_database(postgres_store_template)
    await restore(Path("two"), other)

    assert manifest.store == "postgresql"
    assert verify_backup(Path("one"))[0] == manifest
    head = manifest.mailboxes[0]
    assert head.first > 1
    for store in ("store.db", other):
        assert records(store)[: len(expected)] == expected
        with read_mailbox(store, MAILBOX) as reader:
            reader.verify_log(expected_last=head.position, expected_chain=head.chain)
    async with open_mailbox(other, MAILBOX, durability="relaxed") as mailbox:
        assert (await receive_one(mailbox)).payload


async def test_a_backup_of_a_database_under_load_is_a_whole_past_of_it(postgres_store: str) -> None:
    accepted: list[str] = []
    async with open_mailbox(postgres_store, MAILBOX, durability="relaxed") as mailbox:

        async def load() -> None:
            while True:
                sent = await mailbox.send_batch([message(b"x" * 200, topic="busy") for _ in range(20)])
                accepted.extend(each.message_id for each in sent if not isinstance(each, Rejected))

        sender = asyncio.create_task(load())
        while len(accepted) < 200:
            await asyncio.sleep(0)
        before = len(accepted)
        manifest = await asyncio.to_thread(back_up, postgres_store, Path("backup"))
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
    await restore(Path("backup"), "restored.db")

    (head,) = manifest.mailboxes
    with read_mailbox("restored.db", MAILBOX) as reader:
        reader.verify_log(expected_last=head.position, expected_chain=head.chain)
        assert reader.get_backlog("busy").ready >= before


async def test_a_database_with_newer_records_is_replaced_only_knowingly(postgres_store: str) -> None:
    async with open_mailbox(postgres_store, MAILBOX, durability="relaxed") as mailbox:
        await mailbox.send_batch([message(b"old")])
        back_up(postgres_store, Path("backup"))
        lost = await receive_one(mailbox)
        await mailbox.send_batch([message(b"new")])
        with pytest.raises(MailboxOwned):
            await restore(Path("backup"), postgres_store, replace=True, discard_newer=2)
    with pytest.raises(InvalidRequest, match="is not empty"):
        await restore(Path("backup"), postgres_store)
    with pytest.raises(InvalidRequest, match=r"2 records with 1 message .* --discard-newer 2"):
        await restore(Path("backup"), postgres_store, replace=True)
    await restore(Path("backup"), postgres_store, replace=True, discard_newer=2)

    async with open_mailbox(postgres_store, MAILBOX, durability="relaxed") as mailbox:
        again = await receive_one(mailbox)
        (refusal,) = await mailbox.ack_messages([lost.receipt])
        assert isinstance(refusal, StaleReceipt)
        assert await mailbox.ack_messages([again.receipt]) == [None]


async def test_an_owner_that_lost_its_lock_and_runs_on_appends_nothing_to_a_restored_log(
    postgres_store: str,
) -> None:
    async with postgres_place(postgres_store).open() as old:  # a place has no lock
        await old.send_message(message(b"one"))
        manifest = back_up(postgres_store, Path("backup"))
        await old.send_message(message(b"two"))
        await restore(Path("backup"), postgres_store, replace=True, discard_newer=1)
        with pytest.raises((Fenced, WrongPosition)):
            await old.send_message(message(b"three"))

    with read_mailbox(postgres_store, MAILBOX) as reader:
        verification = reader.verify_log()
    assert verification.last == manifest.mailboxes[0].position + 1  # the record that begins new epochs


async def test_a_session_that_reads_the_log_makes_a_restore_fail_and_change_nothing(
    postgres_store: str, database: "psycopg.Connection[Any]"
) -> None:
    await fill(postgres_store)
    back_up(postgres_store, Path("backup"))
    before = records(postgres_store)
    with database.transaction():
        database.execute("SELECT count(*) FROM postroom.log")
        with pytest.raises(Unavailable, match="A session reads the log"):
            await restore(Path("backup"), postgres_store, replace=True)

    assert records(postgres_store) == before
    await restore(Path("backup"), postgres_store, replace=True)
    assert records(postgres_store)[: len(before)] == before


async def test_the_tables_of_outbox_and_inbox_are_part_of_a_backup(
    postgres_store: str, create_database: Any, postgres_store_template: str
) -> None:
    await fill(postgres_store)
    migrate(postgres_store, "messaging")
    with psycopg.connect(postgres_store) as connection:
        MailboxOutbox(MAILBOX).record(connection, message(b"recorded"))
        connection.execute(
            "INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload, publish_error)"
            " VALUES (gen_random_uuid(), 'order', '7', 'Placed', %s, '')",
            ['{"text": "a,\\"b\\n"}'],
        )
    with closing(psycopg.connect(postgres_store)) as connection:
        events = connection.execute("SELECT * FROM outbox_events").fetchall()
    manifest = back_up(postgres_store, Path("backup"))
    with pytest.raises(InvalidRequest, match=r"only PostgreSQL can hold \(outbox_events\.csv\)"):
        await restore(Path("backup"), "restored.db")
    other = create_database(postgres_store_template)
    with pytest.raises(InvalidRequest, match="has no table outbox_"):
        await restore(Path("backup"), other)
    migrate(other, "messaging")
    await restore(Path("backup"), other)

    assert [file.name for file in manifest.files] == ["outbox_events.csv", "store.db"]
    with psycopg.connect(other) as connection:
        assert connection.execute("SELECT * FROM outbox_events").fetchall() == events
        rows = connection.execute("SELECT mailbox, topic FROM outbox_messages").fetchall()
        assert rows == [(MAILBOX, "orders")]
    with pytest.raises(InvalidRequest, match="has rows in outbox_messages, outbox_events"):
        await restore(Path("backup"), other, replace=True, discard_newer=1)
