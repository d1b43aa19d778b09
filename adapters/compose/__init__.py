"""Composition of ports and adapters: opening stores and their handlers."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import uuid_utils

from postroom.adapters.compose.archive import open_archive
from postroom.adapters.compose.process import trace_if_used
from postroom.adapters.compose.schedule import OutboxRelays, check_outboxes
from postroom.adapters.compose.store import (
    MEMORY,
    Store,
    archive_address,
    is_on_servers,
    is_remote,
    open_protection,
    open_store,
)
from postroom.adapters.local.endpoints import socket_path as make_socket_path
from postroom.adapters.local.server import OFF, RemoteServer, check_listen, listening
from postroom.adapters.memory.amnesia_log import AmnesiaEventLog
from postroom.adapters.postgres.url import is_url
from postroom.adapters.sqlite.database import Durability
from postroom.adapters.sqlite.store import SqliteStore
from postroom.adapters.system.clock import SystemClock
from postroom.application.erasure.erase_subject import ErasureSettings, as_stored
from postroom.application.erasure.protection import MessageEncryption
from postroom.application.extras import explain_missing_extra
from postroom.application.mailbox.administer import CommandHandlers, EraseMessages, SavedSearches
from postroom.application.mailbox.command_enricher import CACHE_BYTES
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.owner_tasks import LeaseTerm, MemoryBound, own_by_lease, watch_ownership
from postroom.application.mailbox.retention import DeleteOldEvents, Retention
from postroom.application.operations.mailbox import Mailbox
from postroom.application.page import Page
from postroom.application.ports.event_log import Clock, EventLog, LogArchive
from postroom.application.queries.owner_queries import OwnerQueries
from postroom.application.redrive.jobs import RedriveJobs
from postroom.application.redrive.message_changes import MessageChanges
from postroom.application.schedules import Schedules
from postroom.application.service import Search
from postroom.application.subscriptions import Subscriptions
from postroom.application.threads import DaemonExecutor, background_task, in_query_thread
from postroom.domain.arguments import (
    check_choice,
    check_int,
    check_items,
    check_optional_text,
    check_path,
    check_type,
)
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable
from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.names import DEFAULT_MAILBOX, check_mailbox
from postroom.domain.policy import MAX_DURATION_MS, MailboxLimits, TopicPolicy
from postroom.domain.search import EventFilter, FoundMessage
from postroom.domain.settings import UNCHANGED, SettingsChanges

OWNERSHIP_WAIT_MS = 2_000


class OwnerHandlers(CommandHandlers, MessageChanges, SavedSearches, Subscriptions, Schedules, OwnerQueries):
    """The handlers of all operations of a mailbox that this process owns."""

    def __init__(
        self,
        engine: MailboxEngine,
        clock: Clock,
        archive: LogArchive | None = None,
        search: Search | None = None,
    ) -> None:
        CommandHandlers.__init__(self, engine, clock.wall, uuid_utils.uuid7)
        OwnerQueries.__init__(self, engine, search, self.schedule_lateness)
        self.engine = engine
        self.retention = Retention(engine, archive)
        self.delete_old_events = DeleteOldEvents(self.retention)
        self.erase_messages = EraseMessages(engine)
        self.redrives = RedriveJobs(engine, self.describe_dead_letters, uuid_utils.uuid7)
        self.preview_redrive = self.redrives.preview_redrive
        self.start_redrive = self.redrives.start_redrive
        self.list_redrives = self.redrives.list_redrives
        self.get_redrive = self.redrives.get_redrive
        self.list_redrive_messages = self.redrives.list_redrive_messages
        self.change_redrive = self.redrives.change_redrive


class OwnedMailbox(OwnerHandlers, Mailbox):
    """A mailbox that this process owns; see `Mailbox`."""


class OwnerSettings(NamedTuple):
    """How a process opens a mailbox that it owns; see `open_mailbox`.

    Arguments:
        settings: settings of a new mailbox; an existing mailbox must have the same.
    """

    mode: MailboxMode | None = None
    durability: Durability = "full"
    settings: SettingsChanges = UNCHANGED
    owner: str | None = None
    archive: str | Path | None = None
    accept_clock: bool = False
    outboxes: Sequence[str] = ()
    amnesia: bool = False
    listen: str | None = None
    erasure: ErasureSettings | None = None

    def check(self) -> "OwnerSettings":
        """Return the settings, with a default owner, or raise InvalidRequest."""
        if self.mode is not None:
            check_choice("mode", self.mode, get_args(MailboxMode))
        check_choice("durability", self.durability, get_args(Durability))
        owner = check_optional_text("owner", self.owner)
        if check_optional_text("listen", self.listen) is not None:
            check_listen(self.listen or "")
        if self.archive is not None:
            check_path("archive", str(self.archive) if isinstance(self.archive, Path) else self.archive)
        for address in check_items("outboxes", self.outboxes):
            check_path("An outbox", address)
        if check_type("amnesia", self.amnesia, bool):
            self._check_amnesia()
        erasure, settings = self.erasure, self.settings
        if erasure is not None:
            erasure = check_type("erasure", erasure, ErasureSettings).validate()
            settings = msgspec.structs.replace(settings, subject_policies=erasure.topics)
        return self._replace(
            settings=settings,
            erasure=erasure,
            owner=owner or f"process {os.getpid()} on {socket.gethostname()}",
            # Absolute, as another process may relay them, and this one may change its working directory.
            archive=None if self.archive is None else archive_address(self.archive),
            outboxes=[each if is_on_servers(each) else os.path.abspath(each) for each in self.outboxes],
        )

    def _check_amnesia(self) -> None:
        for name, is_set in (
            ("mode archive", self.mode == "archive"),
            ("an archive", self.archive is not None),
            ("outboxes", bool(self.outboxes)),
        ):
            if is_set:
                raise InvalidRequest(
                    "A mailbox in amnesia mode forgets settled messages and uses no disk, so it can't have "
                    f"{name}; leave that out."
                )


def make_settings(limits: MailboxLimits | None, default_policy: TopicPolicy | None) -> SettingsChanges:
    """Return the arguments with which a program opens a mailbox, or raise InvalidRequest."""
    if limits is not None:
        check_type("limits", limits, MailboxLimits).validate()
    if default_policy is not None:
        check_type("default_policy", default_policy, TopicPolicy).validate()
    return SettingsChanges.of(limits, default_policy)


@asynccontextmanager
async def open_mailbox(
    store: str,
    mailbox: str = DEFAULT_MAILBOX,
    *,
    mode: MailboxMode | None = None,
    durability: Durability = "full",
    limits: MailboxLimits | None = None,
    default_policy: TopicPolicy | None = None,
    wait_ms: int = OWNERSHIP_WAIT_MS,
    owner: str | None = None,
    archive: str | Path | None = None,
    accept_clock: bool = False,
    outboxes: Sequence[str] = (),
    amnesia: bool = False,
    listen: str | None = None,
    erasure: ErasureSettings | None = None,
) -> AsyncIterator[OwnedMailbox]:
    """Own a mailbox for as long as the context lasts; processes that `connect` to it call this one.

    Arguments:
        store: path of a SQLite file, created if it is missing; `postgresql://...`, already migrated; or
            `nats://host,host,host/NAME`, in JetStream; or `memory:`, which is lost at the end.
        mailbox: `namespace@proxy`; created if it is missing.
        mode: `queue` or `archive`; None opens a mailbox in the mode it has, and creates a queue.
        limits, default_policy: settings of a new mailbox. They are stored in it: an existing mailbox must
            have the same, and None takes its settings (ADR 0098); `set_settings` changes them.
        durability: `full` survives power cuts, `relaxed` only process crashes.
        wait_ms: how long to wait for the current owner to release it, in ms.
        archive: folder, or URL such as `s3://bucket/prefix`, for the records that retention removes, as
            Parquet; None discards them.
        accept_clock: believe the wall clock after a restart of the machine, however far ahead it is.
        outboxes: databases, other than the store, in which `MailboxOutbox` records messages for this mailbox:
            paths of SQLite files and `postgresql://...`.
        amnesia: forget the content of messages when they settle, and refuse sends above `max_store_bytes`,
            256 MiB by default (svc-mailbox I-9); for the store `memory:` only.
        listen: `host:port` where this process accepts connections from other hosts while it owns the mailbox
            of a database; None takes the interface of its connection to the database, `off` accepts none.
        erasure: encrypt the messages of data subjects, so that they can be erased; None sends none to topics
            whose messages are encrypted.

    Raises: MailboxOwned, SettingsConflict, InvalidRequest for an argument that is malformed, of a wrong type
        or out of range, Unavailable when the store can't be used, ImplausibleClock when the machine was
        restarted and its wall clock is days ahead of the last record.
    """
    check_mailbox(mailbox)
    changes = make_settings(limits, default_policy)
    settings = OwnerSettings(
        mode, durability, changes, owner, archive, accept_clock, outboxes, amnesia, listen, erasure
    ).check()
    check_int("wait_ms", wait_ms, 0, MAX_DURATION_MS)
    await check_outboxes(settings.outboxes)
    async with own_mailbox(open_owner_store(store, settings), mailbox, settings, wait_ms) as postroom:
        yield postroom


def open_owner_store(store: str, settings: OwnerSettings) -> Store:
    """Return the store of a mailbox that is owned with these settings.

    Raises: as `open_store` does; InvalidRequest for amnesia with a store that is not in memory; UnusableStore
        when this process may not write the file.
    """
    if not settings.amnesia:
        opened = open_store(store)
        if isinstance(opened, SqliteStore):  # check before looking for its owner's socket
            opened.check_writer()
        return opened
    if store != MEMORY:
        raise InvalidRequest(
            f"A mailbox in amnesia mode is in memory only, not in {shown_store(store)}; name the store "
            f"{MEMORY}, or leave amnesia out."
        )
    from postroom.adapters.memory.store import AmnesiaStore  # imported late, as in `open_store`

    return AmnesiaStore()


@asynccontextmanager
async def own_mailbox(
    store: Store,
    mailbox: str,
    settings: OwnerSettings,
    wait_ms: int,
    lease: LeaseTerm | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[OwnedMailbox]:
    """Own a mailbox, and answer other processes at its socket; see `open_mailbox`.

    A process that has the lease of the mailbox replaces an owner that has no lease. A process takes the lock
    first and opens the socket second: of many processes that try to own a mailbox, one opens the log, and the
    others soon find its socket.

    Arguments:
        clock: None for the clocks of the machine.
    """
    trace_if_used()
    owner, clock, protection = settings.owner or "", clock or SystemClock(), None
    if settings.erasure is not None:
        protection = await asyncio.to_thread(open_protection, settings.erasure)
    async with AsyncExitStack() as opened:
        last = await opened.enter_async_context(
            AsyncExitStack()
        )  # the next owner does not wait for the log to be closed
        ownership = store.ownership()
        await opened.enter_async_context(
            ownership.acquire(mailbox, owner, wait_ms)
            if lease is None
            else own_by_lease(ownership, mailbox, owner, wait_ms, lease)
        )
        path = socket_path(store, mailbox)
        server = None
        if path is not None:
            incumbent = await ownership.incumbent(mailbox)
            server = await opened.enter_async_context(listening(path, mailbox, incumbent))
        if server is not None and ownership.directory is not None and settings.listen != OFF:
            remote = RemoteServer(server, mailbox, ownership.directory, settings.listen)
            await opened.enter_async_context(background_task(remote.run()))
        log = await _open_log(store, mailbox, settings)
        last.push_async_callback(_close_log, log)
        log_archive = None if settings.archive is None else open_archive(settings.archive)
        bound = MemoryBound(log) if isinstance(log, AmnesiaEventLog) else None
        limit = settings.settings.limits.get("max_store_bytes")
        engine = MailboxEngine(
            log,
            clock,
            cache_bytes=CACHE_BYTES if bound is None else bound.cache_bytes(limit),
            admit=None if bound is None else bound.admit,
            may_append=None if lease is None else lease.may_append,
            protection=protection,
        )
        epoch = None if lease is None else lease.epoch
        await engine.open(
            owner, settings.mode, settings.settings, accept_clock=settings.accept_clock, epoch=epoch
        )
        opened.push_async_callback(engine.close)
        postroom = OwnedMailbox(engine, clock, log_archive, make_search(store, protection))
        run = postroom.retention.run() if bound is None else bound.run(engine)
        await opened.enter_async_context(background_task(run))
        await opened.enter_async_context(background_task(watch_ownership(engine)))
        await opened.enter_async_context(background_task(postroom.redrives.worker.run()))
        if engine.mailbox.subscriptions:
            postroom.run_copier()
        if engine.mailbox.schedules:
            postroom.run_schedules()
        relays = OutboxRelays(mailbox, postroom.send_batch, engine.now)
        opened.push_async_callback(relays.close)
        relays.add_store(store)
        relays.add(settings.outboxes)
        if server is not None:
            server.serve(postroom, relays)
            opened.callback(server.stop_reading)
        yield postroom


async def _open_log(store: Store, mailbox: str, settings: OwnerSettings) -> EventLog:
    """Open a log in a thread; close it again if the caller was cancelled meanwhile."""
    opening = asyncio.create_task(
        asyncio.to_thread(
            store.event_log,
            mailbox,
            durability=settings.durability,
            can_shrink=settings.settings.limits.get("max_store_bytes") is not None,
        )
    )
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        with suppress(PostroomError):
            (await opening).close()
        raise


async def _close_log(log: EventLog) -> None:
    """Close a log in a thread: the last connection to a SQLite file copies the WAL into it."""
    thread = DaemonExecutor(1, "postroom-close")
    try:
        await asyncio.get_running_loop().run_in_executor(thread, log.close)
    except Unavailable:  # no thread can be started when the interpreter exits
        log.close()
    finally:
        thread.shutdown(wait=False)


def make_search(store: Store, protection: MessageEncryption | None = None) -> Search | None:
    """Return the search of a store's read models; None for a store in memory, which has no read models.

    Arguments:
        protection: finds encrypted messages by their subjects.
    """
    if store.identity == MEMORY:
        return None

    def search(filter_: EventFilter) -> Page[FoundMessage]:
        stored = filter_ if protection is None else as_stored(filter_, protection)
        with explain_missing_extra(), closing(store.read_models(open_archive)) as read_models:
            return read_models.search(stored)

    async def search_in_thread(filter_: EventFilter) -> Page[FoundMessage]:
        return await in_query_thread(search, filter_)

    return search_in_thread


def socket_path(store: Store, mailbox: str) -> Path | None:
    """Return the path of a mailbox's socket; None if other processes can't reach its store."""
    if store.identity == MEMORY:
        return None
    return make_socket_path(store.identity, mailbox, store.socket_path(mailbox))


def is_database(store: str) -> bool:
    """Return whether a store is a PostgreSQL database, not a file or memory."""
    return is_url(store)


def shown_store(store: str) -> str:
    """Return the name of a store, or the URL of a server, for messages: without a password."""
    if is_remote(store):
        scheme, slashes, rest = store.partition("://")
        return f"{scheme}{slashes}{rest.rpartition('@')[2]}"
    return open_store(store).where


@explain_missing_extra()
def list_mailboxes(store: str) -> list[str]:
    """Return the names of the mailboxes in a store, sorted; a file that does not exist yet has none.

    Arguments:
        store: its address.
    """
    return open_store(store).mailboxes()
