"""Operations, rights and caveats: the rights of a capability, and the caveats that narrow them."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from postroom.domain.arguments import check_int, check_items, check_text, check_type
from postroom.domain.errors import InvalidRequest
from postroom.domain.policy import MAX_DURATION_MS

MAX_PATTERNS = 100
MAX_PATTERN_CHARS = 255
MAX_TIME_MS = 253_402_300_799_999
"""The end of the year 9999, ms since 1970 UTC."""
QUOTA_WINDOWS_MS = (1_000, 60_000, 3_600_000, 86_400_000)
"""Possible windows of quotas: only a few, so that a capability has few counters however it is attenuated."""


class Right(StrEnum):
    """Rights that a capability may have; `recv` includes the payloads of the messages received."""

    SEND = "send"
    RECV = "recv"
    ACK = "ack"
    NACK = "nack"
    EXTEND = "extend"
    READ_HEADERS = "read-headers"
    READ_PAYLOAD = "read-payload"
    REDRIVE = "redrive"
    ADMIN = "admin"


class Rights(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Rights of a capability before its caveats narrow them.

    Arguments:
        mailboxes: names or globs; `acme@*` covers a namespace.
        topics: names or globs (see `topic_matches`).
        operations: the operations.
    """

    mailboxes: tuple[str, ...] = ("*",)
    topics: tuple[str, ...] = ("*",)
    operations: tuple[Right, ...] = tuple(Right)

    def validate(self) -> "Rights":
        """Return the rights, or raise InvalidRequest."""
        _check_patterns("mailboxes", self.mailboxes)
        _check_patterns("topics", self.topics)
        _check_operations(self.operations)
        return self


class _Caveat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class of caveats."""


class Mailboxes(_Caveat, frozen=True, tag="mailboxes"):
    """Only these mailboxes, by name or glob."""

    patterns: tuple[str, ...]


class Topics(_Caveat, frozen=True, tag="topics"):
    """Only these topics, by name or glob."""

    patterns: tuple[str, ...]


class Operations(_Caveat, frozen=True, tag="operations"):
    """Only these operations."""

    operations: tuple[Right, ...]


class Quota(_Caveat, frozen=True, tag="quota"):
    """At most this many operations and payload bytes in each window of time.

    Arguments:
        operations, bytes: maximum; None is no limit.
        window_ms: a second, a minute, an hour or a day (`QUOTA_WINDOWS_MS`).
    """

    operations: int | None
    bytes: int | None
    window_ms: int


class NotBefore(_Caveat, frozen=True, tag="not-before"):
    """Only from this time on, ms since 1970 UTC."""

    at_ms: int


class Expires(_Caveat, frozen=True, tag="expires"):
    """Only before this time, ms since 1970 UTC."""

    at_ms: int


class MaxMessages(_Caveat, frozen=True, tag="max-messages"):
    """At most this many messages in each call that sends, receives, peeks, searches or redrives."""

    messages: int


class BindPrincipal(_Caveat, frozen=True, tag="bind-principal"):
    """Only messages in the name of the principal; messages that name no principal get this one."""


Caveat = Mailboxes | Topics | Operations | Quota | NotBefore | Expires | MaxMessages | BindPrincipal

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder[Caveat](Caveat).decode


def check_caveat(caveat: Caveat) -> Caveat:
    """Return a caveat, or raise InvalidRequest for one that `decode_caveat` would refuse."""
    match caveat:
        case Mailboxes(patterns):
            _check_patterns("mailboxes", patterns)
        case Topics(patterns):
            _check_patterns("topics", patterns)
        case Operations(operations):
            _check_operations(operations)
        case Quota():
            check_quota(caveat)
        case NotBefore(at_ms) | Expires(at_ms):
            check_int(caveat.__struct_config__.tag, at_ms, 0, MAX_TIME_MS)  # type: ignore[arg-type] # its name
        case MaxMessages(messages):
            check_int("max-messages", messages, 1)
        case BindPrincipal():
            pass
        case _:
            raise InvalidRequest(f"{type(caveat).__name__} is not a caveat; see `Caveat`.")
    return caveat


def check_quota(quota: Quota) -> Quota:
    """Return a quota, or raise InvalidRequest."""
    for name in ("operations", "bytes"):
        limit = getattr(check_type("A quota", quota, Quota), name)
        if limit is not None:
            check_int(f"A quota's {name}", limit)
    if quota.operations is None and quota.bytes is None:
        raise InvalidRequest("A quota must limit operations, bytes or both.")
    if check_int("A quota's window_ms", quota.window_ms, 1, MAX_DURATION_MS) not in QUOTA_WINDOWS_MS:
        windows = ", ".join(map(str, QUOTA_WINDOWS_MS))
        raise InvalidRequest(f"A quota's window_ms must be one of {windows}; it was {quota.window_ms}.")
    return quota


def encode_caveat(caveat: Caveat) -> bytes:
    """Return the one encoding of a caveat."""
    return _encode(caveat)


def decode_caveat(data: bytes) -> Caveat:
    """Parse the output of `encode_caveat`; raise InvalidRequest for any other bytes."""
    try:
        caveat = _decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        caveat = None
    # Refused rather than ignored, because an unknown caveat may narrow the capability.
    if caveat is None or _encode(caveat) != data:
        raise InvalidRequest("The capability has a caveat that is unknown here or malformed.")
    return check_caveat(caveat)


def _check_patterns(name: str, patterns: Sequence[str]) -> None:
    items = check_items(name, patterns)
    if not 1 <= len(items) <= MAX_PATTERNS:
        raise InvalidRequest(f"{name} must have 1 to {MAX_PATTERNS} names or globs; it had {len(items)}.")
    for each in items:
        check_text(f"One of the {name}", each, 1, MAX_PATTERN_CHARS)


def _check_operations(operations: Sequence[Right]) -> None:
    if not check_items("operations", operations):
        raise InvalidRequest(f"operations must name some of {', '.join(Right)}.")
    for each in operations:
        check_type("One of the operations", each, Right)
