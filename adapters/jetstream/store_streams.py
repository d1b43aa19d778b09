"""The two streams of a store: its logs, and what is not appended (ADR 0147)."""

import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from nats.aio.client import Client

from postroom.adapters.jetstream.client import StreamClient, StreamMissing
from postroom.adapters.jetstream.connection import ConnectionThread, with_deadline
from postroom.adapters.jetstream.definitions import (
    CLUSTER_REPLICAS,
    check_leader,
    check_stream,
    find_or_create,
    replica_count,
    servers_of,
    until,
)
from postroom.adapters.jetstream.durability import SyncWatch, verify_sync
from postroom.adapters.jetstream.settings import LogStreamSettings
from postroom.adapters.nats.api import JetStreamApi
from postroom.adapters.nats.client import SupervisedClient
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable

T = TypeVar("T")

READ_SECONDS = 10.0
"""Deadline of a read, longer than a stream needs to find another leader."""
WRITE_SECONDS = 15.0
OPEN_SECONDS = 10.0
MIN_API_LEVEL, ATOMIC_API_LEVEL = 1, 2
"""API levels of NATS 2.11, which reads several messages at once, and of 2.12, which has atomic batches."""
CLIENT_NAME = "postroom store"


def token_of(mailbox: str) -> str:
    """Return the token of a mailbox in subjects: its name, with escapes where a token can't have it."""
    return quote(mailbox, safe="@$").replace(".", "%2E")


class OpenStreams(NamedTuple):
    """The streams of a store, as long as their connection is open.

    Arguments:
        servers: names of those that had a replica of the logs when the connection was opened.
        sync: whether they sync every write, as long as an owner uses the streams.
    """

    connection: ConnectionThread
    settings: LogStreamSettings
    log: StreamClient
    state: StreamClient
    servers: frozenset[str]
    sync: SyncWatch

    @property
    def client(self) -> SupervisedClient:
        """Return the connection's client, to be used in its thread."""
        return self.connection.client

    def call(self, work: Callable[[float], Coroutine[Any, Any, T]], seconds: float = READ_SECONDS) -> T:
        """Return the result of a coroutine, which runs in the connection's thread and gets its deadline.

        Raises: Unavailable when the deadline passes; else what the work raises.
        """
        try:
            return self.connection.call(partial(with_deadline, work, seconds), seconds)
        except StreamMissing as error:
            raise self._missing() from error

    async def run(self, work: Callable[[float], Coroutine[Any, Any, T]], seconds: float = READ_SECONDS) -> T:
        """Do as `call`, from a coroutine of any event loop."""
        try:
            return await self.connection.run(partial(with_deadline, work, seconds), seconds)
        except StreamMissing as error:
            raise self._missing() from error

    def _missing(self) -> Unavailable:
        return Unavailable(
            f"The store {self.settings.where} lacks one of its streams; restore it from a backup, or name "
            "another store."
        )

    def is_synced(self) -> bool:
        """Return whether the servers are known to sync every write; a warning is logged if not.

        Raises: InvalidRequest when one is known not to, Unavailable when their monitoring does not answer.
        """
        settings = self.settings
        if not settings.monitoring and not settings.assume_sync_always:
            logger().warning(
                "store.sync_unknown",
                store=settings.where,
                servers=sorted(self.servers),
                advice="Set sync_interval: always in the servers' section jetstream, and name their "
                "monitoring with ?monitoring=http://HOST:8222,... or state it with ?sync=always; without it, "
                "a power failure of most servers loses messages.",
            )
            return False
        verify_sync(
            self.servers,
            settings.monitoring,
            assume_sync_always=settings.assume_sync_always,
            content="messages",
        )
        return True

    def watch_sync(self) -> None:
        """Do as `is_synced`, and check again until the connection is closed if they are; see `SyncWatch`."""
        if self.is_synced():
            self.sync.start(self.connection)


class StoreStreams:
    """Connection to the streams of a store, which its users in a process share and the last one closes.

    Arguments:
        settings: of the streams.
    """

    def __init__(self, settings: LogStreamSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._users = 0
        self._open: OpenStreams | None = None

    @contextmanager
    def opened(self, *, create: bool = False) -> Iterator[OpenStreams]:
        """Open the streams while the context lasts; see `open`."""
        streams = self.open(create=create)
        try:
            yield streams
        finally:
            self.close()

    def open(self, *, create: bool = False) -> OpenStreams:
        """Return the streams, until `close` is called as often.

        Arguments:
            create: create missing ones.

        Raises: NotFound when they are missing, InvalidRequest when they could lose messages, Unavailable when
            no server answers.
        """
        with self._lock:
            if self._process != os.getpid():  # the thread of the connection is in the parent
                self._process, self._users, self._open = os.getpid(), 0, None
            if self._open is None:
                self._open = open_streams(self.settings, create=create)
            self._users += 1
            return self._open

    def close(self) -> None:
        """Close the connection if nobody else uses it."""
        with self._lock:
            self._users -= 1
            if self._users > 0 or self._open is None:
                return
            streams, self._open = self._open, None
        streams.connection.close()


def open_streams(settings: LogStreamSettings, *, create: bool) -> OpenStreams:
    """Connect, and return the streams of a store; see `StoreStreams.open`."""
    connection = ConnectionThread(settings.nats, CLIENT_NAME)
    try:
        find = partial(until, OPEN_SECONDS, partial(_find, connection.client, settings, create=create))
        log, state = connection.call(find, 2 * OPEN_SECONDS)
        _check(settings, settings.stream, log, _config(connection.client, settings, ATOMIC_API_LEVEL))
        expected = _state_config(connection.client, settings, ATOMIC_API_LEVEL)
        _check(settings, settings.state_stream, state, expected)
        return OpenStreams(
            connection,
            settings,
            StreamClient(connection.client, settings.stream, is_atomic=_is_atomic(log)),
            StreamClient(connection.client, settings.state_stream, is_atomic=_is_atomic(state)),
            servers_of(log),
            SyncWatch(settings),
        )
    except BaseException:
        connection.close()
        raise


Infos = tuple[Mapping[str, Any], Mapping[str, Any]]


async def _find(client: SupervisedClient, settings: LogStreamSettings, *, create: bool) -> Infos:
    api, names = JetStreamApi(client), (settings.stream, settings.state_stream)
    if create:
        configs = partial(_config, client, settings), partial(_state_config, client, settings)
        await find_or_create(api, names[1], configs[1])  # first: without it there is no store
        await find_or_create(api, names[0], configs[0])
    log, state = await api.find_stream(names[0]), await api.find_stream(names[1])
    if not (log and state):
        raise NotFound(
            f"There is no store {settings.stream} at {settings.nats.shown_url}; send a message to create it."
        )
    for name, info in zip(names, (log, state), strict=True):
        check_leader(name, info)
    return log, state


def _config(client: Client, settings: LogStreamSettings, level: int) -> dict[str, Any]:
    """Return the configuration of a new stream of logs on servers of an API level."""
    if level < MIN_API_LEVEL:
        raise InvalidRequest("A store on JetStream needs NATS 2.11 or newer; upgrade the servers.")
    return {
        "name": settings.stream,
        "description": "Logs of Postroom mailboxes; do not publish here",
        "subjects": [f"{settings.stream}.*"],
        "retention": "limits",
        "storage": "file",
        "num_replicas": replica_count(client, settings),
        "discard": "new",
        "allow_direct": True,
    } | ({"allow_atomic": True} if level >= ATOMIC_API_LEVEL else {})


def _state_config(client: Client, settings: LogStreamSettings, level: int) -> dict[str, Any]:
    return _config(client, settings, level) | {
        "name": settings.state_stream,
        "description": "Owners, snapshots and indexes of Postroom mailboxes; do not publish here",
        "subjects": [f"{settings.state_stream}.>"],
        "max_msgs_per_subject": 1,
    }


def _is_atomic(info: Mapping[str, Any]) -> bool:
    return info["config"].get("allow_atomic") is True


def _check(
    settings: LogStreamSettings, name: str, info: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    config = info["config"]
    limit = expected.get("max_msgs_per_subject", -1)
    demands = {
        "discard must be new": config.get("discard") == "new",
        f"max_msgs_per_subject must be {limit}": (config.get("max_msgs_per_subject") or -1) == limit,
        "max_msg_size must be unlimited": (config.get("max_msg_size") or -1) < 0,
        "deny_purge must be off": not config.get("deny_purge"),
        "no_ack must be off": not config.get("no_ack"),
    }
    is_clustered = bool((info.get("cluster") or {}).get("name"))
    check_stream(
        name,
        info,
        subject=expected["subjects"][0],
        replicas=settings.replicas or (CLUSTER_REPLICAS if is_clustered else 1),
        content="a store",
        demands=demands,
    )
