"""Codec of outbox and inbox events: domain events to rows of `aggregate_events` and back.

An event's stream, version and time are columns; its other fields are a MessagePack array in `state`. The type
name carries the schema version, as in the mailbox log (ADR 0004): an event whose fields change gets an
upcaster, which converts the array of one version to that of the next.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, get_args
from uuid import UUID

import msgspec
from msgspec.structs import astuple, fields

from postroom.domain.errors import BrokenLog
from postroom.domain.event import Event
from postroom.domain.inbox import InboxEvent
from postroom.domain.outbox import OutboxChange

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
