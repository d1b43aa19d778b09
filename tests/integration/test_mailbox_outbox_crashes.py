"""Every committed message is in the mailbox once, and none rolled back, whoever is killed.

`python -m tests.integration.test_mailbox_outbox_crashes 10000` makes 10,000 transactions on SQLite and
on PostgreSQL.
"""

import asyncio
import random
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import psycopg

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.postgres.migrate import migrate
from postroom.adapters.sql.mailbox_outbox import MailboxOutbox
from postroom.application.messages import NewMessage
from postroom.domain.envelope.build import open_envelope
from postroom.domain.message import MessageSent
from tests.support.fork_server import popen
from tests.support.servers.postgres import PostgresServer
from tests.support.waiting import SECONDS

TRANSACTIONS = 600
WRITERS = 4
TOPIC = "orders"
WAIT_SECONDS = 60


def connect(shop: str) -> Any:
    return psycopg.connect(shop) if "://" in shop else sqlite3.connect(shop, timeout=60)


# -- the processes that get killed ---


def write(shop: str, run: str) -> None:
    """Place orders, each in a transaction with its message; roll a third of them back."""
    outbox = MailboxOutbox()
    with closing(connect(shop)) as connection:
        for number in count():
            order = f"{run}-{number}"
            connection.execute(f"INSERT INTO orders VALUES ('{order}')")
            outbox.record(connection, NewMessage(topic=TOPIC, payload=order.encode()))
            if number % 3 == 0:
                connection.rollback()
            else:
                connection.commit()


async def handle(store: str, shop: str) -> None:
    """Own the mailbox, and say which orders it handles."""
    async with open_mailbox(store, outboxes=[shop], wait_ms=30_000) as mailbox:
        while True:
            received = await mailbox.receive_messages(TOPIC, visibility_ms=250, wait_ms=1_000)
            for each in received:
                # A kill may end a line early: it begins with a line break, and its end is marked.
                print(f"\n{each.message_id} {each.payload.decode()} handled", end="", flush=True)
            await mailbox.ack_messages([each.receipt for each in received])


# -- the test ---


class Workers:
    """Processes of this module that are replaced when they are killed."""

    def __init__(self, store: str, shop: str, log: Path) -> None:
        self._store, self._shop, self._log = store, shop, log
        self._runs = count()
        self.handler = self._start("handle")
        self.writers = [self._start("write") for _ in range(WRITERS)]

    def kill_writer(self) -> None:
        victim = random.randrange(WRITERS)
        self._end(self.writers[victim])
        self.writers[victim] = self._start("write")

    def kill_handler(self) -> None:
        self._end(self.handler)
        self.handler = self._start("handle")

    def end_writers(self) -> None:
        while self.writers:
            self._end(self.writers.pop())

    def close(self) -> None:
        self.end_writers()
        self._end(self.handler)

    def _start(self, role: str) -> "subprocess.Popen[bytes]":
        arguments = [role, self._store, self._shop, f"r{next(self._runs)}"]
        with self._log.open("ab") as log:
            return popen([sys.executable, "-m", __spec__.name, *arguments], stdout=log)

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        process.kill()
        process.wait(SECONDS)


def query(shop: str, statement: str) -> list[Any]:
    with closing(connect(shop)) as connection:
        return [value for (value,) in connection.execute(statement).fetchall()]


def handled(log: Path) -> list[tuple[str, str]]:
    """Return message id and order of every message that was handled."""
    return re.findall(r"^(\S{36}) (\S+) handled$", log.read_text(), re.MULTILINE)


def wait_for_writers(shop: str) -> None:
    """Return when PostgreSQL has ended the transactions of killed writers; some are still committed."""
    if "://" in shop:
        with closing(connect(shop)) as connection:
            connection.execute("LOCK TABLE orders IN EXCLUSIVE MODE")


def wait_until(is_true: Callable[[], bool], meanwhile: Callable[[], None], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        meanwhile()
        time.sleep(0.1)


def run(store: str, shop: str, log: Path, transactions: int) -> dict[str, int]:
    with closing(connect(shop)) as connection:
        connection.execute("CREATE TABLE orders (id TEXT PRIMARY KEY)")
        connection.commit()
    workers, step = Workers(store, shop, log), transactions // 20
    written = handled_bytes = kills = 0
    patience = WAIT_SECONDS + transactions / 10

    def kill() -> None:
        nonlocal written, handled_bytes, kills
        if (progress := count_orders()) >= written + step:
            written = progress
            workers.kill_writer()
            kills += 1
        if (progress := log.stat().st_size) > handled_bytes:
            handled_bytes = progress
            workers.kill_handler()
            kills += 1

    def count_orders() -> int:
        return int(query(shop, "SELECT count(*) FROM orders")[0])

    try:
        wait_until(lambda: count_orders() >= transactions * 2 // 3, kill, patience)
        workers.end_writers()
        wait_for_writers(shop)
        orders = set(query(shop, "SELECT id FROM orders"))
        wait_until(lambda: not query(shop, "SELECT id FROM outbox_messages"), lambda: None, patience)
    finally:
        workers.close()
    with read_mailbox(store) as reader:
        events = [record.event for record in reader.log.read()]
    sent = [
        open_envelope(event.envelope).payload.decode() for event in events if isinstance(event, MessageSent)
    ]
    assert {order for _, order in handled(log)} <= orders, "an order that was rolled back was handled"
    assert sorted(sent) == sorted(orders), "every order is sent once"
    asyncio.run(finish(store, log))
    ids: dict[str, set[str]] = {}
    for id_, order in handled(log):
        ids.setdefault(order, set()).add(id_)
    assert {order: found for order, found in ids.items() if len(found) > 1} == {}
    assert set(ids) == orders
    return {"committed": len(orders), "sent": len(sent), "kills": kills}


async def finish(store: str, log: Path) -> None:
    """Handle what the killed handler had not."""
    async with asyncio.timeout(WAIT_SECONDS), open_mailbox(store, wait_ms=1_000 * WAIT_SECONDS) as mailbox:
        with log.open("a") as file:
            while any(s.ready or s.delayed or s.in_flight for s in (await mailbox.get_backlog(TOPIC)).shards):
                received = await mailbox.receive_messages(TOPIC, wait_ms=1_000)
                await mailbox.ack_messages([each.receipt for each in received])
                file.writelines(f"\n{each.message_id} {each.payload.decode()} handled" for each in received)


def test_on_sqlite(tmp_path: Path) -> None:
    run(str(tmp_path / "store.db"), str(tmp_path / "shop.db"), tmp_path / "log", TRANSACTIONS)


def test_on_postgresql(messaging_database: str, tmp_path: Path) -> None:
    migrate(messaging_database, "store")
    run(messaging_database, messaging_database, tmp_path / "log", TRANSACTIONS)


def main(transactions: int) -> None:
    with tempfile.TemporaryDirectory(prefix="postroom-") as name:
        folder = Path(name)
        start = time.monotonic()
        figures = run(str(folder / "store.db"), str(folder / "shop.db"), folder / "log", transactions)
        print("sqlite", figures, f"{time.monotonic() - start:.1f} s")
        with PostgresServer(folder / "postgres") as server:
            url = server.create_database()
            migrate(url, "store")
            migrate(url, "messaging")
            start = time.monotonic()
            figures = run(url, url, folder / "log2", transactions)
            print("postgresql", figures, f"{time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", _, shop_, run_]:
            write(shop_, run_)
        case ["handle", store_, shop_, _]:
            asyncio.run(handle(store_, shop_))
        case [transactions_]:
            main(int(transactions_))
