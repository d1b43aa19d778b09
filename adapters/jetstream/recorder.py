"""An application recorder of the `eventsourcing` library over a JetStream stream (ADR 0059)."""

from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from operator import attrgetter
from threading import Lock
from typing import Any, TypeVar
from uuid import UUID, uuid4

from eventsourcing.persistence import (
    DataError,
    IntegrityError,
    Notification,
    OperationalError,
    StoredEvent,
)

from postroom.adapters.jetstream.client import (
    MAX_BATCH,
    PAGE_MESSAGES,
    Outgoing,
    StreamClient,
    StreamMissing,
    SubjectChanged,
)
from postroom.adapters.jetstream.connection import ConnectionThread, with_deadline
from postroom.adapters.jetstream.stream import StreamMessage, decode, encode, subject_of
from postroom.application.recorders import PollingRecorder, VersionRange, check_originator, conflict
from postroom.domain.errors import Unavailable

T = TypeVar("T")

MAX_CACHED_AGGREGATES = 20_000
_LAST = VersionRange(desc=True, limit=1)


class JetStreamRecorder(PollingRecorder):
    """Recorder with one subject an aggregate, whose notification ids are the stream's sequences.

    Each call blocks and may come from any thread; it ends within the timeout.

    Arguments:
        events_per_aggregate: that the stream keeps; 0 or less is all.
        timeout_ms: after which a call fails with OperationalError.
        on_append: called with the sequence of the last event of each save.
    """

    def __init__(
        self,
        connection: ConnectionThread,
        stream: str,
        events_per_aggregate: int,
        timeout_ms: int,
        on_append: Callable[[int], None],
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._events_per_aggregate = events_per_aggregate
        self._seconds = timeout_ms / 1_000
        self._on_append = on_append
        self._messages = StreamClient(connection.client, stream, is_atomic=True)
        self._lock = Lock()
        self._cache: OrderedDict[UUID, list[StreamMessage]] = OrderedDict()

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int]:
        """Append events, all or none, and return their notification ids.

        Raises:
            IntegrityError: an aggregate already has an event of the same version.
            OperationalError: it is unknown whether the events were stored.
            DataError: the events are too many or too large.
            ProgrammingError: an originator id is not a UUID.
        """
        if not stored_events:
            return []
        self._check_size(stored_events)
        save = uuid4()
        messages: list[Outgoing] = []
        versions: dict[UUID, int] = {}
        for index, event in enumerate(stored_events):
            originator = check_originator(event.originator_id)
            expected = None
            if originator in versions:
                last_version: int | None = versions[originator]
            else:
                last_version, expected = self._tail(originator, event.originator_version)
            if last_version is not None and event.originator_version != last_version + 1:
                raise _conflict(event, last_version)
            versions[originator] = event.originator_version
            subject = subject_of(self._stream, originator)
            payload = encode(subject, save, index, event)
            messages.append(Outgoing(subject, payload, expected))
        try:
            last = self._call(partial(self._messages.append_all, messages))
        except SubjectChanged as changed:
            raise _refusal(changed, self._stream) from changed
        sequences = list(range(last - len(messages) + 1, last + 1))
        stored = [
            StreamMessage(sequence, save, index, event)
            for index, (sequence, event) in enumerate(zip(sequences, stored_events, strict=True))
        ]
        for originator in versions:
            self._extend(originator, [each for each in stored if each.event.originator_id == originator])
        self._on_append(sequences[-1])
        return sequences

    def _events(self, originator_id: UUID | str, versions: VersionRange) -> list[StoredEvent]:
        """Return events of one aggregate, as the stream's leader has them."""
        originator = check_originator(originator_id)
        messages = self._load_last(originator) if versions == _LAST else self._load(originator)
        return versions.select((each.event for each in messages), attrgetter("originator_version"))

    def _notifications(self, after: int, stop: int, topics: Sequence[str], limit: int) -> list[Notification]:
        newest = self._call(self._newest)
        if newest is None:
            return []
        first, last = after + 1, min(stop, newest.sequence)
        notifications: list[Notification] = []
        while first <= last and len(notifications) < limit:
            page = [newest]
            if first < newest.sequence:
                size = PAGE_MESSAGES if topics else limit - len(notifications)
                read = partial(self._messages.read, f"{self._stream}.*", first, last, limit=size)
                page = [decode(*each) for each in self._call(read) if each.sequence <= last]
            if not page:
                break
            first = page[-1].sequence + 1
            notifications += [each.notification for each in page if not topics or each.event.topic in topics]
        return notifications[:limit]

    def max_notification_id(self) -> int | None:
        """Return the sequence of the last event, or None if the log is empty."""
        newest = self._call(self._newest)
        return None if newest is None else newest.sequence

    def _call(self, work: Callable[[float], Coroutine[Any, Any, T]]) -> T:
        """Do work in the connection's thread; it gets its deadline, a time of the event loop there."""
        try:
            return self._connection.call(partial(with_deadline, work, self._seconds), self._seconds)
        except Unavailable as error:
            raise OperationalError(str(error)) from error
        except StreamMissing as error:
            raise OperationalError(
                f"There is no stream {self._stream}; restart the admins, which create it."
            ) from error

    async def _newest(self, deadline: float) -> StreamMessage | None:
        return await self._last(f"{self._stream}.*", deadline)

    async def _last(self, subject: str, deadline: float, at_least: int = 0) -> StreamMessage | None:
        message = await self._messages.last(subject, deadline, at_least)
        return None if message is None else decode(*message)

    def _tail(self, originator: UUID, version: int) -> tuple[int | None, int]:
        """Return version and sequence of an aggregate's last event; None and 0 if it has none."""
        with self._lock:
            messages = self._cache.get(originator)
        if not messages or _version(messages[-1]) + 1 != version:
            subject = subject_of(self._stream, originator)
            last = self._call(partial(self._last, subject))
            if last is None:
                return None, 0
            messages = [last]
        return _version(messages[-1]), messages[-1].sequence

    def _load_last(self, originator: UUID) -> list[StreamMessage]:
        """Return the last message of an aggregate."""
        with self._lock:
            newest = _last_sequence(self._cache.get(originator, ()))

        async def read(deadline: float) -> StreamMessage | None:
            return await self._last(subject_of(self._stream, originator), deadline, newest)

        last = self._call(read)
        return [] if last is None else self._extend(originator, [last])[-1:]

    def _load(self, originator: UUID) -> list[StreamMessage]:
        """Return an aggregate's messages; those cached are not read again."""
        subject = subject_of(self._stream, originator)
        with self._lock:
            cached = list(self._cache.get(originator, ()))

        async def read(deadline: float) -> list[StreamMessage] | None:
            last = await self._last(subject, deadline, _last_sequence(cached))
            if last is None:
                return None
            messages = cached
            while not messages or messages[-1].sequence < last.sequence:
                first = messages[-1].sequence + 1 if messages else 1
                following = await self._messages.next(subject, first, deadline)
                if following is None:  # the stream was deleted and created again
                    return None
                messages = [*messages, decode(*following)]
            return messages

        messages = self._call(read)
        self._forget(originator)
        if messages is None:
            return []
        return self._extend(originator, messages)

    def _extend(self, originator: UUID, messages: list[StreamMessage]) -> list[StreamMessage]:
        """Add messages to those of an aggregate that are remembered, and return these."""
        with self._lock:
            cached = self._cache.pop(originator, [])
            versions = {_version(each) for each in cached}
            merged = cached + [each for each in messages if _version(each) not in versions]
            merged = _after_gaps(merged)
            if self._events_per_aggregate > 0:
                merged = merged[-self._events_per_aggregate :]
            self._cache[originator] = merged
            if len(self._cache) > MAX_CACHED_AGGREGATES:
                self._cache.popitem(last=False)
            return merged

    def _forget(self, originator: UUID) -> None:
        with self._lock:
            self._cache.pop(originator, None)

    def _check_size(self, events: Sequence[StoredEvent]) -> None:
        if len(events) > MAX_BATCH:
            raise DataError(
                f"A save has {len(events):,} events, and NATS takes at most {MAX_BATCH:,}; save fewer."
            )
        limit = self._messages.max_bytes
        for event in events:
            size = len(event.state) + len(event.topic.encode())
            if size > limit:
                raise DataError(
                    f"An event of aggregate {event.originator_id} has {size:,} bytes, and the server's limit "
                    f"is {limit:,}; make it smaller, or raise max_payload."
                )


def _after_gaps(messages: list[StreamMessage]) -> list[StreamMessage]:
    """Return the last messages whose versions follow each other; others were removed while they were read."""
    start = len(messages) - 1
    while start > 0 and _version(messages[start - 1]) + 1 == _version(messages[start]):
        start -= 1
    return messages[start:]


def _last_sequence(messages: Sequence[StreamMessage]) -> int:
    return messages[-1].sequence if messages else 0


def _version(message: StreamMessage) -> int:
    return message.event.originator_version


def _refusal(changed: SubjectChanged, stream: str) -> IntegrityError | OperationalError:
    event = decode(changed.refused.subject, 0, changed.refused.data).event
    version = event.originator_version
    if changed.other is None or _version(decode(*changed.other)) == version:
        return conflict(event.originator_id, f"already has an event of version {version}")
    return OperationalError(
        f"It is unknown whether stream {stream} has stored an event at {changed.refused.subject}, as it has "
        "removed the oldest events there since; load the aggregate again."
    )


def _conflict(event: StoredEvent, last_version: int) -> IntegrityError:
    version = event.originator_version
    if version <= last_version:
        problem = f"already has an event of version {version}"
    else:
        problem = f"has no event of version {version - 1}"
    return conflict(event.originator_id, problem)
