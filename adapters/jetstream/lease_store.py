"""The lease store on JetStream, so that Raft consensus about leases is JetStream's (RFC-049, ADR 0059)."""

from threading import Condition

from nats.aio.msg import Msg

from postroom.adapters.jetstream.connection import ConnectionThread
from postroom.adapters.jetstream.durability import verify_sync
from postroom.adapters.jetstream.recorder import JetStreamRecorder
from postroom.adapters.jetstream.settings import LeaseStreamSettings
from postroom.adapters.jetstream.stream import StreamServers, ensure_stream, hints_subject

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
