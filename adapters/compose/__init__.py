"""The one place that wires ports to adapters: open a store, get its handlers."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uuid_utils

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.memory.ownership import MemoryOwnership
from postroom.adapters.postgres.url import is_url
from postroom.adapters.sqlite.database import Durability
from postroom.adapters.sqlite.event_log import SqliteEventLog, mailbox_names
from postroom.adapters.sqlite.ownership import FileOwnership
from postroom.adapters.system.clock import SystemClock
from postroom.application.archived_log import ArchivedEventLog
from postroom.application.commands.operate import PurgeTopic, ReprocessDeadLetters, SetTopicPolicy
from postroom.application.commands.receive import ReceiveMessages
from postroom.application.commands.send import SendBatch, SendEnvelopes, SendMessage
from postroom.application.commands.settle import AckMessages, ExtendVisibility, NackMessages
from postroom.application.engine import MailboxEngine
from postroom.application.fold import fold
from postroom.application.ports.clock import Clock
from postroom.application.ports.event_log import EventLog
from postroom.application.ports.log_archive import LogArchive
from postroom.application.ports.ownership import Ownership
from postroom.application.ports.read_models import ReadModels
from postroom.application.prepare import Preparer
from postroom.application.queries.at import StateAt
from postroom.application.queries.explain_message import ExplainMessage
from postroom.application.queries.get_message import GetMessage
from postroom.application.queries.get_projection_status import GetProjectionStatus
from postroom.application.queries.get_table_stats import GetTableStats
from postroom.application.queries.get_topic_policy import GetTopicPolicy
from postroom.application.queries.live import GetBacklog, ListDeadLetters
from postroom.application.queries.search_messages import SearchMessages
from postroom.application.queries.simulate_policy import SimulatePolicy
from postroom.application.queries.verify import VerifyLog
from postroom.application.retention import keep_enforcing_retention
from postroom.domain.errors import Unavailable
from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.mailbox.state import TopicCount
from postroom.domain.names import check_mailbox
from postroom.domain.policy import MailboxLimits, TopicPolicy

if TYPE_CHECKING:
    from postroom.projections.rebuild import Progress, RebuildReport
    from postroom.projections.verify import VerifyReport

MEMORY = "memory:"
DEFAULT_MAILBOX = "main@local"
OWNERSHIP_WAIT_MS = 2_000


class Postroom:
    """The command handlers of one mailbox that this process owns; each is a plain async callable."""

    def __init__(self, engine: MailboxEngine, clock: Clock) -> None:
        preparer = Preparer(engine.log.mailbox, clock.wall, uuid_utils.uuid7)
        self.engine = engine
        self.send_message = SendMessage(engine, preparer)
        self.send_batch = SendBatch(engine, preparer)
        self.send_envelopes = SendEnvelopes(engine, preparer)
        self.receive_messages = ReceiveMessages(engine)
        self.ack_messages = AckMessages(engine)
        self.nack_messages = NackMessages(engine)
        self.extend_visibility = ExtendVisibility(engine)
        self.reprocess_dead_letters = ReprocessDeadLetters(engine)
        self.purge_topic = PurgeTopic(engine)
        self.set_topic_policy = SetTopicPolicy(engine)
        self.get_message = GetMessage(engine.log, engine.now)
        self.explain_message = ExplainMessage(engine.log, engine.now)
        state_at = StateAt(engine.log, engine.now, lambda: engine.mailbox)
        self.get_backlog = GetBacklog(state_at)
        self.get_topic_policy = GetTopicPolicy(lambda: engine.mailbox)
        self.list_dead_letters = ListDeadLetters(state_at, engine.log)


class Reader:
    """The queries on one mailbox, for a process that does not own it; readers are never turned away."""

    def __init__(self, log: EventLog, clock: Clock) -> None:
        self.log = log
        self.get_message = GetMessage(log, clock.wall)
        self.explain_message = ExplainMessage(log, clock.wall)
        state_at = StateAt(log, clock.wall)
        self.get_backlog = GetBacklog(state_at)
        self.get_topic_policy = GetTopicPolicy(lambda: fold(log))
        self.list_dead_letters = ListDeadLetters(state_at, log)
        self.verify_log = VerifyLog(log)
        self.simulate_policy = SimulatePolicy(log)


class Projections:
    """The queries on the read models of a store, which show it as of the last rebuild."""

    def __init__(self, read_models: ReadModels) -> None:
        self.search_messages = SearchMessages(read_models)
        self.get_table_stats = GetTableStats(read_models)
        self.get_projection_status = GetProjectionStatus(read_models)


@asynccontextmanager
async def open_mailbox(
    store: str,
    mailbox: str = DEFAULT_MAILBOX,
    *,
    mode: MailboxMode = "queue",
    durability: Durability = "full",
    limits: MailboxLimits | None = None,
    default_policy: TopicPolicy | None = None,
    wait_ms: int = OWNERSHIP_WAIT_MS,
    owner: str | None = None,
    archive: str | Path | None = None,
) -> AsyncIterator[Postroom]:
    """Own a mailbox for as long as the context lasts.

    Arguments:
        store: path of a SQLite file, made where missing; `postgresql://...`, migrated before; or `memory:`,
            which forgets everything at the end.
        mailbox: `namespace@proxy`; made with `mode` where missing.
        durability: `full` survives power cuts, `relaxed` only process crashes.
        wait_ms: how long to wait for the present owner to leave.
        archive: folder for what retention removes, as Parquet; None lets it go.

    Raises: MailboxOwned, InvalidRequest for a malformed name, Unavailable when the store can't be used.
    """
    check_mailbox(mailbox)
    owner = owner or f"process {os.getpid()} on {socket.gethostname()}"
    clock = SystemClock()
    can_shrink = limits is not None and limits.max_store_bytes is not None
    log, ownership = await asyncio.to_thread(_storage, store, mailbox, durability, can_shrink)
    try:
        async with ownership.acquire(mailbox, owner, wait_ms):
            kept = None if archive is None else open_archive(archive)
            engine = MailboxEngine(log, clock, limits=limits, default_policy=default_policy, archive=kept)
            await engine.open(owner, mode)
            retention = asyncio.create_task(keep_enforcing_retention(engine))
            try:
                yield Postroom(engine, clock)
            finally:
                retention.cancel()
                await engine.close()
    finally:
        log.close()


@contextmanager
def read_mailbox(
    store: str, mailbox: str = DEFAULT_MAILBOX, *, archive: str | Path | None = None
) -> Iterator[Reader]:
    """Query a mailbox without owning it.

    Arguments:
        archive: folder in which retention stored what it removed, to be read as the log's beginning.

    Raises: NotFound when the store or the mailbox does not exist; Unavailable when it can't be read, or the
        archive is of another store; BrokenLog when records are missing between the two.
    """
    log = _existing_log(store, check_mailbox(mailbox))
    try:
        # Looked for first, as PyArrow takes long to load.
        if archive is not None and (Path(archive) / mailbox).is_dir():
            yield Reader(ArchivedEventLog(log, open_archive(archive)), SystemClock())
        else:
            yield Reader(log, SystemClock())
    finally:
        log.close()


@contextmanager
def read_projections(store: str) -> Iterator[Projections]:
    """Query the read models of a store.

    Raises: Unavailable when they can't be read; the queries raise NotFound before the first rebuild.
    """
    read_models = open_read_models(store)
    try:
        yield Projections(read_models)
    finally:
        read_models.close()


def open_read_models(store: str) -> ReadModels:
    """Return the read models of a store: a SQLite file or a PostgreSQL database."""
    # Imported here, as SQLAlchemy takes long to load.
    if is_url(store):
        from postroom.adapters.postgres.read_models import PostgresReadModels

        return PostgresReadModels(store)
    from postroom.adapters.sqlite.read_models import SqliteReadModels

    return SqliteReadModels(store)


def rebuild_projections(
    store: str, progress: "Callable[[Progress], None]", **options: Any
) -> "RebuildReport":
    """Rebuild the read models of a store with Spark; see `postroom.projections.rebuild.rebuild`."""
    from postroom.projections.rebuild import rebuild

    return rebuild(store, progress=progress, **options)


def verify_projections(store: str, progress: "Callable[[Progress], None]", **options: Any) -> "VerifyReport":
    """Compare the read models of a store with its log; see `postroom.projections.verify.verify`."""
    from postroom.projections.verify import verify

    def backlog_at(mailbox: str, position: int) -> list[TopicCount]:
        with read_mailbox(store, mailbox) as reader:
            return reader.get_backlog(at=position).shards

    return verify(store, backlog_at=backlog_at, progress=progress, **options)


def roll_back_projections(store: str, to: int | None = None) -> int:
    """Serve an earlier version of a store's read models again; see `projections.sinks.Sink.roll_back`."""
    from postroom.projections.sinks import open_sink

    return open_sink(store).roll_back(to)


def is_database(store: str) -> bool:
    """Tell whether a store is a PostgreSQL database, not a file or memory."""
    return is_url(store)


def shown_store(store: str) -> str:
    """Return a store's name as it may be shown: a database's without the password."""
    if is_url(store):
        from postroom.adapters.postgres.database import shown

        return shown(store)
    return store


def list_mailboxes(store: str) -> list[str]:
    """Return the names of the mailboxes in a store, sorted; a file that does not exist yet has none."""
    if is_url(store):
        from postroom.adapters.postgres.event_log import mailbox_names as postgres_mailbox_names

        return postgres_mailbox_names(store)
    return mailbox_names(store)


def open_archive(folder: str | Path) -> LogArchive:
    """Return the archive in which retention stores what it removes.

    Raises: Unavailable when PyArrow is missing.
    """
    try:
        from postroom.adapters.parquet.log_archive import ParquetLogArchive
    except ImportError:
        raise Unavailable(
            "Archiving what retention removes needs PyArrow, which is not installed; "
            "run: pip install 'postroom[archive]'."
        ) from None
    return ParquetLogArchive(folder)


def _storage(
    store: str, mailbox: str, durability: Durability, can_shrink: bool
) -> tuple[EventLog, Ownership]:
    if store == MEMORY:
        return MemoryEventLog(mailbox), MemoryOwnership()
    if is_url(store):
        from postroom.adapters.postgres.event_log import PostgresEventLog  # psycopg takes long to load
        from postroom.adapters.postgres.ownership import PostgresOwnership

        return PostgresEventLog(store, mailbox, durability=durability), PostgresOwnership(store)
    log = SqliteEventLog(store, mailbox, durability=durability, can_shrink=can_shrink)
    return log, FileOwnership(store)


def _existing_log(store: str, mailbox: str) -> EventLog:
    if is_url(store):
        from postroom.adapters.postgres.event_log import PostgresEventLog

        return PostgresEventLog(store, mailbox, create_missing=False)
    return SqliteEventLog(store, mailbox, create_missing=False)
