"""Cleanup of inboxes and outboxes in small batches, and the codec of their aggregates' events."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple, get_args
from uuid import UUID

import msgspec
from msgspec.structs import astuple, fields

from postroom.application.ports.event_log import Clock
from postroom.application.telemetry import logger
from postroom.domain.errors import BrokenLog, PostroomError
from postroom.domain.inbox import InboxEvent
from postroom.domain.outbox_events import OutboxChange
from postroom.domain.record import Event

BATCH = 1_000
PAUSE_SECONDS = 0.05
"""Maximum pause between two batches, in which other work can use the database."""


Delete = Callable[[int, int], Awaitable[int | None]]
"""Delete rows settled before a time (µs UTC), up to a limit; None if another process holds the lock."""


class Cleanup:
    """Deletion of old settled rows; unsettled rows are never deleted.

    Concurrent cleanups: one takes the lock, the others return None.

    Arguments:
        table: name of the table, for log events.
        random: returns uniform random numbers in [0, 1).
        retention_ms: age at which settled rows are deleted.
        batch: number of rows deleted per transaction.
    """

    def __init__(
        self,
        table: str,
        delete: Delete,
        clock: Clock,
        random: Callable[[], float],
        *,
        retention_ms: int,
        batch: int = BATCH,
    ) -> None:
        self._table = table
        self._delete = delete
        self._clock = clock
        self._random = random
        self._retention_ms = retention_ms
        self._batch = batch

    async def clean(self) -> int | None:
        """Delete old rows and return their number; None while another cleanup runs.

        Raises: Unavailable when the database can't be used.
        """
        before = self._clock.wall() - self._retention_ms * 1_000
        deleted = 0
        while (count := await self._delete(before, self._batch)) is not None:
            deleted += count
            if count < self._batch:
                return deleted
            await asyncio.sleep(self._random() * PAUSE_SECONDS)
        return deleted or None

    async def run(self, every_ms: int) -> None:
        """Clean up at random intervals of `every_ms` on average; failures are logged."""
        while True:
            await asyncio.sleep((0.5 + self._random()) * every_ms / 1_000)
            try:
                deleted = await self.clean()
            except PostroomError as error:
                logger().warning(f"{self._table}.cleanup_failed", error=str(error))
            else:
                if deleted:
                    logger().info(f"{self._table}.cleaned", removed=deleted)


Upcaster = Callable[[list[Any]], list[Any]]

_FIRST_FIELD = len(Event.__struct_fields__)
_pack = msgspec.msgpack.Encoder(uuid_format="bytes").encode
_unpack = msgspec.msgpack.Decoder(list[Any]).decode


class _Kind(NamedTuple):
    cls: type[Event]
    decode: Callable[[bytes], tuple[Any, ...]]


class AggregateCodec:
    """Encoder of events as `(type, state)`, and decoder of every schema version.

    Arguments:
        kinds: classes of the events.
        upcasters: by type and the version to convert from, such as `OutboxEventRecorded.1`.
    """

    def __init__(self, kinds: Iterable[type[Event]], upcasters: Mapping[str, Upcaster] | None = None) -> None:
        self._upcasters = upcasters or {}
        self._names: dict[type[Event], str] = {}
        self._kinds: dict[str, _Kind] = {}
        for cls in kinds:
            version = 1
            while f"{cls.__name__}.{version}" in self._upcasters:
                version += 1
            name = f"{cls.__name__}.{version}"
            types = tuple(field.type for field in fields(cls)[_FIRST_FIELD:])
            state: Any = tuple[types] if types else tuple[()]  # type: ignore[valid-type]
            self._names[cls] = name
            self._kinds[name] = _Kind(cls, msgspec.msgpack.Decoder(state).decode)

    def to_row(self, event: Event) -> tuple[str, bytes]:
        """Return the type and the encoded state of an event."""
        return self._names[type(event)], _pack(astuple(event)[_FIRST_FIELD:])

    def to_event(self, stream: bytes, version: int, type_: str, at: int, state: bytes) -> Event:
        """Return the event of a row; `at` is in µs since 1970 UTC.

        Raises: BrokenLog for a type unknown to this version of Postroom.
        """
        name = type_
        while upcast := self._upcasters.get(name):
            state = _pack(upcast(_unpack(state)))
            cls, _, number = name.rpartition(".")
            name = f"{cls}.{int(number) + 1}"
        kind = self._kinds.get(name)
        if kind is None:
            raise BrokenLog(
                f"The history of {stream.hex()} holds an event of unknown type {type_} at version {version}; "
                "read it with the Postroom version that wrote it, or a newer one.",
                version,
            )
        return kind.cls(stream, version, at, *kind.decode(state))


CODEC = AggregateCodec(
    [*get_args(OutboxChange), *get_args(InboxEvent)],
    {
        "OutboxEventRecorded.1": lambda state: [*state, {}, False, None],
        "OutboxEventRecorded.2": lambda state: [
            *(str(UUID(bytes=value)) if isinstance(value, bytes) else value for value in state),
            None,
            None,
        ],
    },
)
"""Codec of all events in `aggregate_events`."""
