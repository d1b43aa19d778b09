"""Mailboxes in every kind of store, under a clock that the test controls."""

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.postgres.event_log import PostgresEventLog
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.stored_snapshots import fold
from postroom.application.ports.event_log import EventLog, LogArchive
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.settings import SettingsChanges
from tests.support.clocks import ManualClock
from tests.support.commits import as_appended
from tests.support.envelopes import build_envelope
from tests.support.messages import MAILBOX, message, receive_one

__all__ = [
    "MAILBOX",
    "Place",
    "copy_store",
    "envelope",
    "folded_whole",
    "jetstream_place",
    "live",
    "memory_place",
    "message",
    "postgres_place",
    "receive_one",
    "sqlite_place",
]


def envelope(id_: str, topic: str = "orders", **fields: object) -> bytes:
    """Return a serialized envelope that came from outside."""
    values: dict[str, object] = {
        "namespace": "acme",
        "published_at_us": 1_700_000_000_000_000,
        "payload": b"hi",
        "attrs": {},
    }
    return build_envelope(message_id=id_, topic=topic, **(values | fields))  # type: ignore[arg-type]


class Place:
    """A store whose mailbox can be opened, closed and opened again, under a manual clock.

    Arguments:
        archive: of every mailbox that is opened without one of its own.
    """

    def __init__(self, open_log: Callable[[], EventLog], archive: LogArchive | None = None) -> None:
        self.clock = ManualClock()
        self.open_log = open_log
        self.archive = archive

    @asynccontextmanager
    async def open(
        self,
        *,
        mode: MailboxMode | None = None,
        limits: MailboxLimits | None = None,
        policy: TopicPolicy | None = None,
        cache_bytes: int = 64 << 20,
        archive: LogArchive | None = None,
    ) -> AsyncIterator[OwnedMailbox]:
        """Own the mailbox while the context lasts."""
        log = self.open_log()
        engine = MailboxEngine(log, self.clock, cache_bytes=cache_bytes)
        try:
            await engine.open("test", mode, SettingsChanges.of(limits, policy))
            yield OwnedMailbox(engine, self.clock, archive or self.archive)
        finally:
            await engine.close()
            log.close()


def memory_place() -> Place:
    """Return a place that lasts as long as it is referred to."""
    log = MemoryEventLog(MAILBOX)
    return Place(lambda: log)


def sqlite_place(folder: Path) -> Place:
    """Return a place in a SQLite file of this folder."""
    return Place(lambda: SqliteEventLog(folder / "store.db", MAILBOX))


def postgres_place(url: str) -> Place:
    """Return a place in a migrated PostgreSQL database."""
    return Place(lambda: PostgresEventLog(url, MAILBOX))


def jetstream_place(url: str) -> Place:
    """Return a place in a stream of JetStream."""
    from postroom.adapters.jetstream.store import JetStreamStore

    store = JetStreamStore(url)
    return Place(lambda: store.event_log(MAILBOX))


def copy_store(store: Path, folder: Path) -> Path:
    """Copy a SQLite store that nobody has open, its read models included, and return the path of the copy."""
    for file in store.parent.glob(f"{store.name}*"):
        shutil.copy(file, folder)
    return folder / store.name


async def live(mailbox: OwnedMailbox, count: int, topic: str = "orders") -> None:
    """Send messages, settle a third, nack a third, and leave a third in flight."""
    await mailbox.send_batch([message(b"%d" % n, topic, sticky_key=str(n)) for n in range(count)])
    received: list[ReceivedMessage] = []
    while more := await mailbox.receive_messages(topic, max_messages=200):
        received += more
    await mailbox.ack_messages([each.receipt for each in received[::3]])
    await mailbox.nack_messages([each.receipt for each in received[1::3]], reason="boom")


def folded_whole(log: MemoryEventLog) -> Mailbox:
    """Fold all of a log, as if it had no snapshot."""
    bare = MemoryEventLog(log.mailbox)
    bare.append(as_appended(log.commits()))
    return fold(bare)
