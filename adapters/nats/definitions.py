"""Definitions and status of streams and consumers (SDS-047).

This module can be imported without the client of NATS.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from postroom.domain.errors import InvalidRequest

_RETENTION_LIMITS = frozenset({"max_age_ms", "max_bytes", "max_msgs"})
_FORBIDDEN = frozenset(" \t\r\n.*>/\\")

Value = str | int | tuple[str, ...] | None
"""Value of a field; None means unlimited if the field is a limit."""


class StreamDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """Desired configuration of a stream; None leaves a field unchanged, or at the default of a new stream.

    Arguments:
        subjects: subjects that it stores; `*` matches one token, `>` all remaining ones.
        storage: `file` survives restarts of the server, `memory` does not.
        retention: when messages are deleted: at a limit, when all consumers have acked them, or when one has.
        discard: action of a full stream: delete `old` messages, or refuse `new` ones.
        compression: of files: `s2`, or `none`.
        replicas: number of servers of a cluster that store it, 1 to 5.
        max_age_ms, max_bytes, max_msgs: limits beyond which messages are deleted.
        max_msg_size: bytes; a larger message is refused.
        duplicate_window_ms: time during which a message with the same `Nats-Msg-Id` is dropped.
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
    """Desired configuration of a durable pull consumer; None means the same as in `StreamDefinition`.

    Arguments:
        stream, durable: names of the stream and of the consumer.
        filter_subjects: subjects that it delivers; empty delivers all of the stream.
        ack_policy: `explicit`: each message is acked by itself.
        deliver_policy: begin with `all` messages of the stream, or with `new` ones.
        ack_wait_ms: how long a delivery may stay unsettled before the message is redelivered.
        max_deliver: attempts after which the worker dead-letters a message.
        server_max_deliver: deliveries after which the server stops redelivering; None is unlimited.
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
        """Return the name, prefixed with the stream's name."""
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


class ConsumerStatus(msgspec.Struct, frozen=True):
    """Progress of a consumer.

    Arguments:
        waiting: messages not delivered yet.
        unsettled: messages delivered and not acked.
        redelivered: messages delivered more than once.
    """

    durable: str
    waiting: int
    unsettled: int
    redelivered: int


class StreamStatus(msgspec.Struct, frozen=True):
    """Contents of a stream, and its consumers."""

    name: str
    subjects: Sequence[str]
    messages: int
    bytes: int
    last_sequence: int
    consumers: Sequence[ConsumerStatus]


class Difference(msgspec.Struct, frozen=True):
    """A field in which a server differs from a definition.

    Arguments:
        current: None if the stream or consumer does not exist, or has no limit.
        desired: value in the definition.
        note: consequence of the change.
        refusal: why it can't be changed; None if it can.
    """

    kind: Literal["stream", "consumer"]
    name: str
    action: Literal["create", "update"]
    field: str
    current: Value
    desired: Value
    note: str | None = None
    refusal: str | None = None


def with_defaults(definition: Definition) -> Definition:
    """Return a definition with None replaced by the defaults of a new stream or consumer."""
    defaults = _NEW_STREAM if isinstance(definition, StreamDefinition) else _NEW_CONSUMER
    missing = {field: value for field, value in defaults.items() if getattr(definition, field) is None}
    if isinstance(definition, StreamDefinition):
        if definition.subjects is None:
            raise InvalidRequest(
                f"Stream {definition.name} does not exist and its definition has no subjects; add some."
            )
        if definition.max_age_ms and "duplicate_window_ms" in missing:
            # NATS allows no window longer than the retention time.
            missing["duplicate_window_ms"] = min(_NEW_WINDOW_MS, definition.max_age_ms)
    return msgspec.structs.replace(definition, **missing)


def compare(definition: Definition, actual: Definition | None) -> Sequence[Difference]:
    """Return the differences between a server and a definition, field by field.

    Arguments:
        actual: configuration on the server; None if the stream or consumer does not exist.
    """
    kind: Literal["stream", "consumer"] = "stream" if isinstance(definition, StreamDefinition) else "consumer"
    if actual is None:
        new = with_defaults(definition)
        return [
            Difference(kind, new.name, "create", field, None, value, _note(field, None, None))
            for field, value in _fields(new)
            if value is not None or field == "server_max_deliver"
        ]
    differences = []
    for field, desired in _fields(definition):
        current = getattr(actual, field)
        # The server must have no limit: a message that reaches it would never be delivered again.
        if (desired is None and field != "server_max_deliver") or desired == current:
            continue
        note, refusal = _note(field, current, desired), _refusal(definition, field, current, desired)
        differences.append(
            Difference(kind, definition.name, "update", field, current, desired, note, refusal)
        )
    return differences


def _fields(definition: Definition) -> Sequence[tuple[str, Value]]:
    identity = ("name", "stream", "durable")
    return [(f, getattr(definition, f)) for f in definition.__struct_fields__ if f not in identity]


def _note(field: str, current: Value, desired: Value) -> str | None:
    if field == "server_max_deliver":
        return "the worker counts to max_deliver and dead-letters; the server would drop the message"
    if (
        field in _RETENTION_LIMITS
        and isinstance(desired, int)
        and (current is None or (isinstance(current, int) and desired < current))
    ):
        return "messages beyond it are deleted at once"
    return None


def _refusal(definition: Definition, field: str, current: Value, desired: Value) -> str | None:
    if isinstance(definition, StreamDefinition):
        fixed = field == "storage" or (field == "retention" and "workqueue" in (current, desired))
        remedy = "define a stream of another name, and delete this one when all its messages are processed"
    else:
        fixed = field in ("ack_policy", "deliver_policy")
        remedy = "define a consumer of another name, and delete this one when it is no longer used"
    return f"NATS can't change {field} from {current} to {desired}; {remedy}" if fixed else None


def _check_name(kind: str, name: str) -> None:
    if not name or _FORBIDDEN & set(name):
        raise InvalidRequest(
            f"{name!r} can't be the name of a {kind}; use letters, digits, _ and -, without dots, spaces, "
            "slashes or wildcards."
        )


def _check_positive(where: str, definition: Definition) -> None:
    for field, value in _fields(definition):
        if isinstance(value, int) and value < 1:
            raise InvalidRequest(f"{where}: {field} must be at least 1; it was {value}.")
