"""What streams and consumers are meant to be, and how they differ from what is there (SDS-047 section 10)."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from postroom.domain.errors import InvalidRequest

_LIMITS = frozenset({"max_age_ms", "max_bytes", "max_msgs"})
_FORBIDDEN = frozenset(" \t\r\n.*>/\\")

Value = str | int | tuple[str, ...] | None
"""Of a field; None of a limit is unlimited."""


class StreamDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """Say what a stream is meant to be; a field of None is left as it is, or to the default when it is made.

    Arguments:
        subjects: it stores what is published to these; `*` and `>` stand for one word and for the rest.
        retention: until a limit is reached, while a consumer wants it, or until one consumer took it.
        discard: what a full stream does: delete `old` messages, or refuse `new` ones.
        replicas: servers of a cluster that hold it, 1 to 5.
        max_age_ms, max_bytes, max_msgs: what is beyond is deleted.
        max_msg_size: bytes; a larger message is refused.
        duplicate_window_ms: how long a `Nats-Msg-Id` is known, and a repetition not stored again.
    """

    name: str
    subjects: tuple[str, ...] | None = None
    retention: Literal["limits", "interest", "workqueue"] | None = None
    storage: Literal["file", "memory"] | None = None
    replicas: int | None = None
    discard: Literal["old", "new"] | None = None
    compression: Literal["none", "s2"] | None = None
    max_age_ms: int | None = None
    max_bytes: int | None = None
    max_msgs: int | None = None
    max_msg_size: int | None = None
    duplicate_window_ms: int | None = None

    def __post_init__(self) -> None:
        _check_name("stream", self.name)
        if self.replicas is not None and not 1 <= self.replicas <= 5:
            raise InvalidRequest(f"Stream {self.name}: replicas must be 1 to 5; it was {self.replicas}.")
        _check_positive(f"Stream {self.name}", self)


class ConsumerDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """Say what a durable pull consumer is meant to be; None as in `StreamDefinition`.

    Arguments:
        filter_subjects: it delivers what the stream has of these; empty is all.
        ack_wait_ms: how long a delivery may stay unsettled before it comes again.
        max_deliver: attempts until a message goes to the dead-letter subject; the worker counts them.
        server_max_deliver: deliveries until the server itself drops a message; None is never.
        max_ack_pending: deliveries that may be unsettled at once.
    """

    stream: str
    durable: str
    filter_subjects: tuple[str, ...] | None = None
    ack_policy: Literal["explicit"] | None = None
    deliver_policy: Literal["all", "new"] | None = None
    ack_wait_ms: int | None = None
    max_deliver: int | None = None
    server_max_deliver: int | None = None
    max_ack_pending: int | None = None

    @property
    def name(self) -> str:
        """Return what it is called in a list of all."""
        return f"{self.stream}/{self.durable}"

    def __post_init__(self) -> None:
        _check_name("stream", self.stream)
        _check_name("consumer", self.durable)
        _check_positive(f"Consumer {self.durable}", self)


Definition = StreamDefinition | ConsumerDefinition

_NEW_WINDOW_MS = 120_000
_NEW_STREAM: dict[str, Value] = {
    "retention": "limits",
    "storage": "file",
    "replicas": 1,
    "discard": "old",
    "duplicate_window_ms": _NEW_WINDOW_MS,
}
# SDS-047 section 10
_NEW_CONSUMER: dict[str, Value] = {
    "filter_subjects": (),
    "ack_policy": "explicit",
    "deliver_policy": "all",
    "ack_wait_ms": 120_000,
    "max_deliver": 20,
    "max_ack_pending": 50,
}


class Difference(msgspec.Struct, frozen=True):
    """Say what would become of one field.

    Arguments:
        is_: None where the stream or consumer isn't there yet, or the limit isn't.
        refused: why it can't be changed, if so.
        note: what the change brings with it.
    """

    kind: Literal["stream", "consumer"]
    name: str
    action: Literal["create", "update"]
    field: str
    is_: Value = msgspec.field(name="is")
    becomes: Value
    note: str | None = None
    refused: str | None = None


def completed(definition: Definition) -> Definition:
    """Return a definition with the defaults of a new stream or consumer where it says nothing."""
    defaults = _NEW_STREAM if isinstance(definition, StreamDefinition) else _NEW_CONSUMER
    missing = {field: value for field, value in defaults.items() if getattr(definition, field) is None}
    if isinstance(definition, StreamDefinition) and definition.subjects is None:
        raise InvalidRequest(
            f"Stream {definition.name} isn't there and its definition has no subjects; name some."
        )
    if (
        isinstance(definition, StreamDefinition)
        and definition.max_age_ms
        and "duplicate_window_ms" in missing
    ):
        # NATS allows no window longer than what it keeps.
        missing["duplicate_window_ms"] = min(_NEW_WINDOW_MS, definition.max_age_ms)
    return msgspec.structs.replace(definition, **missing)


def compare(wanted: Definition, present: Definition | None) -> Sequence[Difference]:
    """Return how what is wanted differs from what is there, field by field; nothing where it doesn't.

    Arguments:
        present: None where there is no such stream or consumer.
    """
    kind: Literal["stream", "consumer"] = "stream" if isinstance(wanted, StreamDefinition) else "consumer"
    if present is None:
        new = completed(wanted)
        return [
            Difference(kind, new.name, "create", field, None, value, _note(field, None, None))
            for field, value in _fields(new)
            if value is not None or field == "server_max_deliver"
        ]
    differences = []
    for field, becomes in _fields(wanted):
        is_ = getattr(present, field)
        # The server must not count: a message that it drops at its limit is lost to everybody.
        if (becomes is None and field != "server_max_deliver") or becomes == is_:
            continue
        note, refused = _note(field, is_, becomes), _refusal(wanted, field, is_, becomes)
        differences.append(Difference(kind, wanted.name, "update", field, is_, becomes, note, refused))
    return differences


def _fields(definition: Definition) -> Sequence[tuple[str, Value]]:
    identity = ("name", "stream", "durable")
    return [(f, getattr(definition, f)) for f in definition.__struct_fields__ if f not in identity]


def _note(field: str, is_: Value, becomes: Value) -> str | None:
    if field == "server_max_deliver":
        return "the worker counts to max_deliver and dead-letters; the server would drop the message"
    if (
        field in _LIMITS
        and isinstance(becomes, int)
        and (is_ is None or (isinstance(is_, int) and becomes < is_))
    ):
        return "messages beyond it are deleted at once"
    return None


def _refusal(wanted: Definition, field: str, is_: Value, becomes: Value) -> str | None:
    if isinstance(wanted, StreamDefinition):
        fixed = field == "storage" or (field == "retention" and "workqueue" in (is_, becomes))
        remedy = "define a stream of another name, and delete this one when it is read"
    else:
        fixed = field in ("ack_policy", "deliver_policy")
        remedy = "define a consumer of another name, and delete this one when it isn't read any more"
    return f"NATS can't change {field} from {is_} to {becomes}; {remedy}" if fixed else None


def _check_name(what: str, name: str) -> None:
    if not name or _FORBIDDEN & set(name):
        raise InvalidRequest(
            f"{name!r} can't be the name of a {what}; use letters, digits, _ and -, without dots, spaces, "
            "slashes and wildcards."
        )


def _check_positive(where: str, definition: Definition) -> None:
    for field, value in _fields(definition):
        if isinstance(value, int) and value < 1:
            raise InvalidRequest(f"{where}: {field} must be at least 1; it was {value}.")
