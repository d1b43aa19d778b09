"""Whether NATS servers sync every write before they acknowledge it, which clients can't see (ADR 0059)."""

import asyncio
import urllib.request
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any
from urllib.error import URLError

import msgspec

from postroom.adapters.jetstream.connection import ConnectionThread
from postroom.adapters.jetstream.definitions import servers_of
from postroom.adapters.jetstream.settings import LogStreamSettings
from postroom.adapters.nats.api import JetStreamApi
from postroom.application.telemetry import logger
from postroom.application.threads import DaemonExecutor
from postroom.domain.errors import InvalidRequest, Unavailable

CHECK_SECONDS = 60.0
"""Time between two checks of the servers while an owner runs."""
RETRY_SECONDS, ATTEMPTS = 5.0, 3
"""Pause after a check that too few servers answered, and how many of these in a row end the promise."""

_SECONDS = 3.0
_MAX_BYTES = 1 << 20


def verify_sync(
    servers: Collection[str],
    monitoring: Iterable[str],
    *,
    assume_sync_always: bool,
    content: str = "leases",
) -> None:
    """Return if servers sync every write, by their monitoring or else by the operator's statement.

    While the monitoring of some does not answer, it is enough that most servers are verified.

    Arguments:
        servers: names of those that have a replica of the stream.
        monitoring: HTTP addresses of the monitoring of all servers.
        content: of the stream, for messages.

    Raises:
        InvalidRequest: a server does not sync every write, or nothing is known about one.
        Unavailable: the monitoring of too many servers does not answer.
    """
    addresses = list(monitoring)
    if not addresses:
        if not assume_sync_always:
            raise InvalidRequest(
                "It can't be verified that the NATS servers sync every write before they acknowledge it; if "
                f"they don't, a power failure loses {content}. Name the monitoring address of each server, "
                "or state that each has sync_interval: always."
            )
        logger().warning(f"{content}.sync_assumed", servers=sorted(servers))
        return
    unknown = set(servers)
    failures: list[Unavailable] = []
    for address in addresses:
        try:
            name, is_synced = _sync_of(address)
        except Unavailable as error:
            failures.append(error)
            continue
        if not is_synced:
            raise InvalidRequest(
                f"NATS server {name} acknowledges writes that a power failure can lose; set sync_interval: "
                "always in the section jetstream of its configuration, and restart it."
            )
        unknown.discard(name)
    if failures and 2 * len(unknown) >= len(servers):
        raise failures[0]
    for failure in failures:
        logger().retry(f"{content}.sync_not_verified", error=str(failure))
    if len(unknown) > len(failures):
        raise InvalidRequest(
            f"Nothing is known about how NATS server {', '.join(sorted(unknown))} syncs writes; name the "
            "monitoring address of each server that has a replica of the stream."
        )


def _sync_of(address: str) -> tuple[str, bool]:
    url = f"{address.rstrip('/')}/varz"
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            values: dict[str, Any] = msgspec.json.decode(answer.read(_MAX_BYTES), type=dict[str, Any])
        config = values["jetstream"]["config"]
        return str(values["server_name"]), config.get("sync_always") is True
    except (URLError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unavailable(
            f"The monitoring of a NATS server at {address} can't be read: "
            f"{str(error) or type(error).__name__}; check the address, and that the server runs with "
            "JetStream and http_port."
        ) from error


class SyncWatch:
    """Whether the servers of a store's logs sync every write, as of the last check (ADR 0147).

    They are checked each minute and whenever the connection was replaced: a server may have been restarted
    with other settings, or another one has a replica now.

    Arguments:
        settings: of the store, with the monitoring of its servers.
    """

    def __init__(self, settings: LogStreamSettings) -> None:
        self.is_synced = False
        self._settings = settings
        self._failures = 0
        self._lock = Lock()
        self._is_running = False

    def start(self, connection: ConnectionThread) -> None:
        """Take the servers as verified, and verify them again until the connection is closed."""
        with self._lock:
            self.is_synced = True
            if not self._is_running and self._settings.monitoring:
                self._is_running = True
                connection.start(partial(self._run, connection))

    async def _run(self, connection: ConnectionThread) -> None:
        executor = DaemonExecutor(1, "sync-check")  # its threads delay no end of a process
        pause = CHECK_SECONDS
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await connection.reconnected.wait()
                connection.reconnected.clear()
                pause = await self._check(JetStreamApi(connection.client), executor)
        finally:
            executor.shutdown(wait=False)

    async def _check(self, api: JetStreamApi, executor: DaemonExecutor) -> float:
        """Verify the servers that have a replica now; return after how many seconds to do it again."""
        try:
            servers = servers_of(await api.find_stream(self._settings.stream))
            verify = partial(
                verify_sync, servers, self._settings.monitoring, assume_sync_always=False, content="messages"
            )
            await asyncio.get_running_loop().run_in_executor(executor, verify)
        except Exception as error:  # a defect must end the promise, not the checks
            self._failures += 1
            if isinstance(error, Unavailable) and self._failures < ATTEMPTS:
                return RETRY_SECONDS  # the monitoring may start later than the server
            self.is_synced = False
            logger().retry("store.sync_lost", store=self._settings.where, error=str(error))
        else:
            self._failures = 0
            if not self.is_synced:
                logger().info("store.sync_restored", store=self._settings.where)
            self.is_synced = True
        return CHECK_SECONDS
