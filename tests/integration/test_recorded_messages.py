"""Messages that transactions recorded and that no owner reads are counted, with the remedy."""

import asyncio
import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from threading import Event
from time import time_ns
from typing import Any
from urllib.request import Request, urlopen

import psycopg
import pytest

from postroom import MailboxOutbox, NewMessage, Unavailable, open_mailbox
from postroom.adapters.compose.schedule import OutboxDatabases
from postroom.adapters.compose.serve import HttpSettings, open_http_surface, serve_mailbox
from postroom.application.metrics import Metric
from postroom.application.operations.mailbox import Mailbox
from postroom.application.outbox.events import OutboxCounter, RecordedMessages
from postroom.application.ports.outbox import MAX_COUNTED, MAX_MAILBOXES
from postroom.application.service import OpenSession, Search, SurfaceMetrics
from tests.support.access import controlled_mailbox

HOUR = 3_600_000_000
WAIT_SECONDS = 240
NUMBERS = {
    "sqlite": "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})",
    "postgresql": "WITH n (i) AS (SELECT generate_series(1, {count}))",
}
INSERT = (
    "{numbers} INSERT INTO outbox_messages (id, mailbox, topic, message)"
    " SELECT 'id-' || i, {mailbox}, 'orders', 'no JSON' FROM n"
)


class Shop:
    """The database of a service."""

    def __init__(self, kind: str, address: str) -> None:
        self.kind = kind
        self.address = address

    def record(self, *messages: NewMessage, mailbox: str = "main@local", age: int = HOUR) -> None:
        outbox = MailboxOutbox(mailbox, wall=lambda: time_ns() // 1_000 - age)
        with closing(self._connect()) as connection:
            outbox.record(connection, *messages)
            connection.commit()

    def execute(self, *statements: str) -> None:
        with closing(self._connect()) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    def insert(self, count: int, mailbox: str = "'main@local'") -> None:
        """Insert rows; the name of the mailbox is an expression over their number, i."""
        self.record(NewMessage(topic="orders", payload=b"", message_id="first"))
        numbers = NUMBERS[self.kind].format(count=count - 1)
        self.execute(INSERT.format(numbers=numbers, mailbox=mailbox))

    def _connect(self) -> Any:
        return sqlite3.connect(self.address) if self.kind == "sqlite" else psycopg.connect(self.address)


@pytest.fixture(params=["sqlite", "postgresql"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    is_file = request.param == "sqlite"
    return Shop(
        request.param,
        str(tmp_path / "shop.db") if is_file else request.getfixturevalue("messaging_database"),
    )


@pytest.fixture
async def store(tmp_path: Path) -> str:
    path = str(tmp_path / "store.db")
    async with open_mailbox(path):
        return path


def message(id_: str, **fields: Any) -> NewMessage:
    return NewMessage(topic="orders", payload=b"", message_id=id_, **fields)


def count(store: str, relayed: Sequence[str] = (), others: Sequence[str] = ()) -> list[RecordedMessages]:
    """Return what was counted, without databases that have no messages."""
    counted = OutboxDatabases(store, relayed, others).count_messages()
    return [each for each in counted if each.mailbox or each.problem]


async def test_messages_of_a_database_that_no_owner_reads_are_counted_with_the_setting_that_reads_them(
    shop: Shop, store: str
) -> None:
    shop.record(message("a"), message("b"))
    (found,) = count(store, others=[shop.address])
    assert (found.mailbox, found.waiting, found.refused, found.exact) == ("main@local", 2, 0, True)
    assert found.oldest_at is not None
    assert abs(time_ns() // 1_000 - HOUR - found.oldest_at) < HOUR
    assert found.problem == "no owner reads this database"
    assert "[relay] databases" in found.advice
    async with open_mailbox(store, outboxes=[shop.address]), asyncio.timeout(WAIT_SECONDS):
        while count(store, others=[shop.address]):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("place", ["database of the store", "database of the settings"])
async def test_messages_for_a_mailbox_that_nobody_owns_are_counted_by_its_name(
    place: str, tmp_path: Path, store: str
) -> None:
    address = store if place == "database of the store" else str(tmp_path / "shop.db")
    shop = Shop("sqlite", address)
    shop.record(message("a"), mailbox="mian@local")
    shop.record(message("b"))
    async with open_mailbox(store, outboxes=[address]), asyncio.timeout(WAIT_SECONDS):
        while len(found := count(store, [address])) > 1:
            await asyncio.sleep(0.02)
    assert [(each.mailbox, each.waiting) for each in found] == [("mian@local", 1)]
    assert found[0].problem == f"the store {store} has no such mailbox"
    assert "MailboxOutbox" in found[0].advice


async def test_messages_whose_owner_is_down_are_late_and_recent_ones_are_not(shop: Shop, store: str) -> None:
    shop.record(message("a"), age=0)
    (found,) = count(store, [shop.address])
    assert (found.waiting, found.problem) == (1, "")
    shop.execute("DELETE FROM outbox_messages")
    shop.record(message("a"))
    (found,) = count(store, [shop.address])
    assert found.problem == "its owner does not send them"


async def test_refused_messages_are_counted_apart(shop: Shop, store: str) -> None:
    shop.record(message("a"), message("b"))
    shop.execute("UPDATE outbox_messages SET error = 'refused'")
    (found,) = count(store, [shop.address])
    assert (found.waiting, found.refused, found.oldest_at) == (0, 2, None)
    assert found.problem == "its owner refused 2 messages"


async def test_the_age_is_that_of_the_id_where_the_sender_says_that_it_was_published_earlier(
    shop: Shop, store: str
) -> None:
    shop.record(NewMessage(topic="orders", payload=b"", published_at_us=1))
    (found,) = count(store, [shop.address])
    assert found.problem == ""


async def test_a_count_reads_a_bounded_number_of_rows_and_says_so(shop: Shop, store: str) -> None:
    shop.insert(MAX_COUNTED + 500)
    (found,) = count(store, others=[shop.address])
    assert (found.waiting, found.exact) == (MAX_COUNTED, False)
    assert found.count_text == "at least 10,000 messages"


async def test_mailboxes_after_the_first_ones_are_counted_together(shop: Shop, store: str) -> None:
    shop.insert(500, "'no-' || i || '@local'")
    found = count(store, [shop.address])
    assert len(found) == MAX_MAILBOXES + 1
    assert (found[-1].mailbox, sum(each.waiting for each in found)) == ("*", 500)


@pytest.mark.parametrize(
    "altered",
    ["message = '{'", "message = '{\"published_at_us\": 1e300}'", "id = ''", "mailbox = ''", "topic = ''"],
)
async def test_a_row_that_record_did_not_make_is_counted(shop: Shop, store: str, altered: str) -> None:
    shop.record(message("a"))
    shop.execute(f"UPDATE outbox_messages SET {altered}")
    counted = OutboxDatabases(store, [shop.address]).count_messages()
    assert [each.waiting for each in counted if each.database != store] == [1]


@pytest.mark.parametrize("column", ["id", "mailbox", "message", "error"])
async def test_a_column_with_bytes_that_are_not_utf_8_is_counted(
    tmp_path: Path, store: str, column: str
) -> None:
    shop = Shop("sqlite", str(tmp_path / "shop.db"))
    shop.record(message("a"))
    shop.execute(f"UPDATE outbox_messages SET {column} = x'ff'")
    (found,) = count(store, [shop.address])
    assert found.waiting + found.refused == 1
    json.dumps(found.mailbox).encode()


async def test_a_database_that_can_not_be_read_is_reported_and_hides_no_other(
    tmp_path: Path, store: str
) -> None:
    shop = Shop("sqlite", str(tmp_path / "shop.db"))
    shop.record(message("a"))
    (tmp_path / "text.db").write_text("no database " * 100)
    broken = [str(tmp_path / "text.db"), "postgresql://nobody:hush@127.0.0.1:1/nothing"]
    *unreadable, found = count(store, [*broken, shop.address])
    assert [each.mailbox for each in unreadable] == ["", ""]
    assert "file is not a database" in unreadable[0].problem
    assert "can't be reached" in unreadable[1].problem
    assert "hush" not in str(unreadable)
    assert found.waiting == 1


async def test_what_has_no_messages_is_neither_created_nor_a_problem(
    create_database: Callable[[str | None], str], tmp_path: Path, store: str
) -> None:
    missing = tmp_path / "missing.db"
    assert count(store, [str(missing), create_database(None)], [store]) == []
    assert not missing.exists()
    assert count(str(tmp_path / "none.db")) == []
    assert not (tmp_path / "none.db").exists()
    assert count("memory:") == []


def values(metrics: Sequence[Metric], name: str) -> dict[tuple[str, ...], Any]:
    (metric,) = [each for each in metrics if each.name == name]
    return {tuple(labels.values()): value for labels, value in metric.samples}


async def test_a_surface_measures_them_while_the_mailbox_has_no_owner(shop: Shop, store: str) -> None:
    async def fail() -> Sequence[Metric]:
        raise Unavailable("No process owns the mailbox.")

    shop.record(message("a"), message("b"), mailbox="mian@local")
    counter = OutboxDatabases(store, [shop.address]).counter()
    async with asyncio.timeout(WAIT_SECONDS):
        while True:  # a count that takes longer than a scrape waits is for the next one
            metrics = await SurfaceMetrics(fail, None, counter.measure).collect()
            if found := values(metrics, "postroom_outbox_messages"):
                break
    assert values(metrics, "postroom_mailbox_up") == {(): False}
    assert {labels[1:]: value for labels, value in found.items()} == {
        ("mian@local", "waiting"): 2,
        ("mian@local", "refused"): 0,
    }
    (age,) = values(metrics, "postroom_outbox_messages_oldest_seconds").values()
    assert age >= HOUR / 1_000_000
    assert set(values(metrics, "postroom_outbox_database_up").values()) == {1}
    assert "postgresql://postgres:" not in str(metrics)


async def test_a_database_that_does_not_answer_delays_no_scrape_and_is_counted_once_at_a_time() -> None:
    answer, calls = Event(), []

    def count() -> list[RecordedMessages]:
        calls.append(1)
        assert answer.wait(WAIT_SECONDS)
        return [RecordedMessages("shop.db", "main@local", 1)]

    counter = OutboxCounter(count, lambda: 0)
    assert await counter.count_messages() == ()
    assert await counter.count_messages() == ()
    answer.set()
    async with asyncio.timeout(WAIT_SECONDS):
        while not (found := await counter.count_messages()):
            pass
    assert [each.waiting for each in found] == [1]
    assert await counter.count_messages() == found
    assert len(calls) == 1


async def test_a_defect_of_a_count_is_logged_and_the_metrics_are_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def count() -> list[RecordedMessages]:
        raise KeyError("a defect")

    metrics = await SurfaceMetrics(None, None, OutboxCounter(count, lambda: 0).measure).collect()
    assert values(metrics, "postroom_mailbox_up") == {(): True}
    assert "outbox.count_failed" in caplog.text


async def test_the_backlog_over_http_has_them_for_callers_of_all_topics_only(tmp_path: Path) -> None:
    shop = Shop("sqlite", str(tmp_path / "shop.db"))
    shop.record(message("a"))
    counter = OutboxDatabases("memory:", [shop.address]).counter()
    async with controlled_mailbox() as controlled:

        def access(mailbox: Mailbox, search: Search) -> OpenSession:
            return controlled.control.open_session

        surface = open_http_surface("127.0.0.1:0", HttpSettings())
        async with serve_mailbox(
            "memory:", controlled.mailbox, [surface], access=access, outboxes=counter
        ) as (url,):

            def backlog(query: str = "", **rights: Any) -> Any:
                headers = {"Authorization": f"Bearer {controlled.issue(**rights)}"}
                with urlopen(Request(f"{url}/v1/backlog{query}", headers=headers), timeout=60) as answer:
                    return json.load(answer)["outboxes"]

            async with asyncio.timeout(WAIT_SECONDS):
                while not (found := await asyncio.to_thread(backlog)):
                    pass
            assert [(each["database"], each["waiting"]) for each in found] == [(shop.address, 1)]
            assert await asyncio.to_thread(backlog, topics=["orders"]) == []
            assert await asyncio.to_thread(backlog, "?topic=orders") == []
