"""The lease store on JetStream, so that Raft consensus about leases is JetStream's (RFC-049, ADR 0059)."""

import urllib.request
from collections.abc import Collection, Iterable
from threading import Condition
from typing import Any
from urllib.error import URLError

import msgspec
from nats.aio.msg import Msg

from postroom.adapters.jetstream.connection import ConnectionThread
from postroom.adapters.jetstream.recorder import JetStreamRecorder
from postroom.adapters.jetstream.settings import LeaseStreamSettings
from postroom.adapters.jetstream.stream import StreamServers, ensure_stream, hints_subject
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest, Unavailable

_SECONDS = 3.0
_MAX_BYTES = 1 << 20


def verify_sync(servers: Collection[str], monitoring: Iterable[str], *, assume_sync_always: bool) -> None:
    """Return if servers sync every write, by their monitoring or else by the operator's statement.

    While the monitoring of some does not answer, it is enough that most servers are verified.

    Arguments:
        servers: names of those that have a replica of the stream.
        monitoring: HTTP addresses of the monitoring of all servers.

    Raises:
        InvalidRequest: a server does not sync every write, or nothing is known about one.
        Unavailable: the monitoring of too many servers does not answer.
    """
    addresses = list(monitoring)
    if not addresses:
        if not assume_sync_always:
            raise InvalidRequest(
                "It can't be verified that the NATS servers sync every write before they acknowledge it; if "
                "they don't, a power failure loses leases. Name the monitoring address of each server, or "
                "state that each has sync_interval: always."
            )
        logger().warning("leases.sync_assumed", servers=sorted(servers))
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
        logger().warning("leases.sync_not_verified", error=str(failure))
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


CLIENT_NAME = "postroom-leases"


class JetStreamLeaseStore:
    """The events of leases on a replicated stream; its calls block and may come from any thread.

    Arguments:
        settings: of the stream, and how its durability is known.

    Raises:
        InvalidRequest: the stream or a server could lose acknowledged data, or this can't be verified.
        Unavailable: no server answers, or the stream has no leader.
    """

    def __init__(self, settings: LeaseStreamSettings) -> None:
        self._hints = Condition()
        self._newest = 0
        self._is_closed = False
        self._connection = ConnectionThread(settings.nats, CLIENT_NAME)
        try:
            stream = self._open(settings)
        except BaseException:
            self._connection.close()
            raise
        self.recorder = JetStreamRecorder(
            self._connection,
            settings.stream,
            stream.events_per_aggregate,
            settings.timeout_ms,
            self._note,
        )

    def wait(self, after: int, timeout_ms: int) -> None:
        """Return when there may be an event after position `after`, or after the timeout.

        The stream's leader announces stored messages; announcements are lost with a connection.
        """
        with self._hints:
            self._hints.wait_for(lambda: self._is_closed or self._newest > after, timeout_ms / 1_000)

    def remove_old_events(self) -> int:
        """Return 0: the stream itself removes the oldest events of an aggregate when it stores another."""
        return 0

    def close(self) -> None:
        """Close the connection; closing twice is fine."""
        with self._hints:
            self._is_closed = True
            self._hints.notify_all()
        self._connection.close()

    def _open(self, settings: LeaseStreamSettings) -> StreamServers:
        client = self._connection.client
        seconds = settings.timeout_ms / 1_000

        async def subscribe() -> None:
            await client.subscribe(hints_subject(settings.stream), cb=self._take_hint)

        stream = self._connection.call(lambda: ensure_stream(client, settings), seconds + _REQUEST_SECONDS)
        verify_sync(stream.names, settings.monitoring, assume_sync_always=settings.assume_sync_always)
        self._connection.call(subscribe, seconds)
        return stream

    async def _take_hint(self, message: Msg) -> None:
        sequence = (message.headers or {}).get("Nats-Sequence", "")
        if sequence.isdecimal():
            self._note(int(sequence))

    def _note(self, sequence: int) -> None:
        with self._hints:
            self._newest = max(self._newest, sequence)
            self._hints.notify_all()


_REQUEST_SECONDS = 5.0
"""Beyond its deadline, for the last request of opening a stream."""
