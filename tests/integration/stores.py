"""Mailboxes to try the handlers on, in every kind of store, whose time the test tells."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from postroom.adapters.compose import Postroom
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.postgres.event_log import PostgresEventLog
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.engine import MailboxEngine
from postroom.application.messages import NewMessage
from postroom.application.ports.event_log import EventLog
from postroom.application.ports.log_archive import LogArchive
from postroom.domain.envelope.build import build_envelope
from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.policy import MailboxLimits, TopicPolicy

MAILBOX = "acme@one"


def message(payload: bytes = b"hello", topic: str = "orders", **fields: object) -> NewMessage:
    """Return a message to send."""
    return NewMessage(topic=topic, payload=payload, **fields)  # type: ignore[arg-type]


def envelope(id_: str, topic: str = "orders", **fields: object) -> bytes:
    """Return a serialized envelope that came from outside."""
    values: dict[str, object] = {
        "namespace": "acme",
        "published_at_us": 1_700_000_000_000_000,
        "payload": b"hi",
        "attrs": {},
    }
    return build_envelope(message_id=id_, topic=topic, **(values | fields))  # type: ignore[arg-type]


class ManualClock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.wall_us = 1_800_000_000_000_000
        self.uptime_us = 60_000_000
        self.boot_id = "boot-1"

    def wall(self) -> int:
        return self.wall_us

    def uptime(self) -> int:
        return self.uptime_us

    def boot(self) -> str:
        return self.boot_id

    def advance(self, ms: int) -> None:
        """Let time pass."""
        self.wall_us += ms * 1_000
        self.uptime_us += ms * 1_000

    def reboot(self, *, after_ms: int = 0) -> None:
        """Start the machine again."""
        self.wall_us += after_ms * 1_000
        self.uptime_us = 1_000_000
        self.boot_id += "'"


class Place:
    """A store whose mailbox can be opened, closed and opened again, under a manual clock."""

    def __init__(self, open_log: Callable[[], EventLog]) -> None:
        self.clock = ManualClock()
        self.open_log = open_log

    @asynccontextmanager
    async def open(
        self,
        *,
        mode: MailboxMode = "queue",
        limits: MailboxLimits | None = None,
        policy: TopicPolicy | None = None,
        cache_bytes: int = 64 << 20,
        archive: LogArchive | None = None,
    ) -> AsyncIterator[Postroom]:
        """Own the mailbox while the context lasts."""
        log = self.open_log()
        engine = MailboxEngine(
            log, self.clock, limits=limits, default_policy=policy, cache_bytes=cache_bytes, archive=archive
        )
        await engine.open("test", mode)
        try:
            yield Postroom(engine, self.clock)
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
