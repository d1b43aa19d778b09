"""Names of mailboxes, topics and members of a cluster, message ids, and their 16-byte stream ids."""

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from hashlib import sha1
from uuid import UUID

from postroom.domain.arguments import MAX_TEXT_CHARS, check_any_text, check_text
from postroom.domain.errors import InvalidRequest

_MAILBOX = re.compile(r"[^\s\x00-\x1f\x7f@/]{1,128}@[^\s\x00-\x1f\x7f@/]{1,128}\Z")
TOPIC_TEXT = re.compile(r"[^\s\x00-\x1f\x7f*?\[\]]{1,255}\Z")
_MEMBER = re.compile(r"[^\s\x00-\x1f\x7f@/]{1,128}\Z")
_HOST = re.compile(
    r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?):([1-9][0-9]{0,4})\Z"
)
_SOCKET = re.compile(r"unix:/[^\s\x00-\x1f\x7f]{1,106}\Z")
UUID_TEXT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
_NAMES = UUID("6ad9bd0e-54c4-5d0b-9a39-0d9bb4ce1c4e").bytes  # the namespace of Postroom's name-based ids
_AS_VERSION_5 = [bytes([byte & 0x0F | 0x50]) for byte in range(256)]
_AS_VARIANT = [bytes([byte & 0x3F | 0x80]) for byte in range(256)]
_TOPIC_VARIANT = 0xC0
"""Variant of the stream ids of messages whose ids are unique in their topic; UUIDs have 0x80."""
_AS_TOPIC_VARIANT = [bytes([byte | _TOPIC_VARIANT]) for byte in range(256)]
_UUID_CHARS = 36
DEFAULT_MAILBOX = "main@local"
AUDIT_LOG = "$audit"
CAPABILITY_LOG = "$capabilities"
"""Logs of a store that are not mailboxes: a name without @ can't be a mailbox's, and queries skip it."""
MAX_ID_CHARS = MAX_TEXT_CHARS
MAX_CHOICES = 10
MAX_SUGGESTIONS = 3
MAX_PORT = 65_535
STREAM_BYTES = 16
"""Length of a stream id."""


def check_mailbox(name: object) -> str:
    """Return a mailbox name of the form `{namespace}@{proxy_id}` (RFC-049), or raise `InvalidRequest`."""
    text = check_any_text("The mailbox name", name)
    if not _MAILBOX.match(text):
        raise InvalidRequest(
            f"Mailbox name {text[:80]!r} must have the form namespace@proxy, each of 1 to 128 characters "
            "without spaces, control characters, @ or slashes."
        )
    return text


def check_member(name: str, value: object) -> str:
    """Return the id of a runner or proxy, a possible part of a mailbox name, or raise `InvalidRequest`.

    Arguments:
        name: name of the argument, for the error.
    """
    text = check_any_text(name, value)
    if not _MEMBER.match(text):
        raise InvalidRequest(
            f"{name} must be 1 to 128 characters without spaces, control characters, @ or slashes; it was "
            f"{text[:80]!r}."
        )
    return text


def check_address(name: str, value: object) -> str:
    """Return the address of a runner or proxy, `host:port` or `unix:/path`, or raise `InvalidRequest`.

    Arguments:
        name: name of the argument, for the error.
    """
    text = check_any_text(name, value)
    host = _HOST.match(text)
    if not _SOCKET.match(text) and (host is None or int(host[3]) > MAX_PORT):
        raise InvalidRequest(
            f"{name} must have the form host:port or unix:/path, such as 10.0.0.5:7070 or [fd00::5]:7070; "
            f"it was {text[:80]!r}."
        )
    return text


def check_uuid(name: str, value: object) -> str:
    """Return a UUID in its canonical spelling, or raise `InvalidRequest`.

    Arguments:
        name: name of the argument, for the error.
    """
    text = check_any_text(name, value)
    if not UUID_TEXT.match(text):
        raise InvalidRequest(f"{name} must be a UUID in lower case with hyphens; it was {text[:80]!r}.")
    return text


def is_mailbox(log: str) -> bool:
    """Return whether a log of a store belongs to a mailbox, by its name."""
    return "@" in log


def check_topic(name: object) -> str:
    """Return a topic name, or raise `InvalidRequest`; glob characters (`*?[]`) are reserved for searches."""
    text = check_any_text("The topic name", name)
    if not TOPIC_TEXT.match(text):
        raise InvalidRequest(
            f"Topic name {text[:80]!r} must be 1 to {MAX_TEXT_CHARS} characters without spaces, control "
            "characters or any of * ? [ ]."
        )
    return text


def check_topic_pattern(pattern: object) -> str:
    """Return a topic name or a glob such as `payments.*`, or raise `InvalidRequest`; see `topic_matches`."""
    text = check_text("A topic or glob", pattern, 1)
    check_topic(text.replace("*", "x"))
    return text


def describe_choices(name: str, choices: Collection[str]) -> str:
    """Return the end of an error about a name that does not exist: the closest names, then the others.

    Arguments:
        choices: the names that exist; the first ones by alphabet are listed.
    """
    close = get_close_matches(name, choices, MAX_SUGGESTIONS)
    others = sorted({*choices} - {*close})
    shown = others[: MAX_CHOICES - len(close)]
    hidden = len(others) - len(shown)
    rest = ", ".join(shown) + (f" and {hidden} more" if hidden else "")
    if close:
        return f"did you mean {' or '.join(close)}?" + (f" Others are {rest}." if rest else "")
    return f"choose one of {rest}." if rest else "there is none yet."


def mailbox_stream(name: str) -> bytes:
    """Return the stream id of a mailbox's own events."""
    return _name_based(name)


def lease_stream(mailbox: str) -> bytes:
    """Return the stream id of the lease of a mailbox."""
    return _name_based(f"lease/{mailbox}")


def proxy_stream(proxy: str) -> bytes:
    """Return the stream id of the registration of a proxy."""
    return _name_based(f"proxy/{proxy}")


def partitions_stream() -> bytes:
    """Return the stream id of the assignment of partitions to proxies."""
    return _name_based("partitions/")


def search_stream(name: str, topics: Sequence[str]) -> bytes:
    """Return the id of a saved search with a name, on topics."""
    return _name_based(f"search/{[*topics]}/{name}")


def message_stream(mailbox: str, message_id: object, topic: str | None = None) -> bytes:
    """Return a message's stream id: its id if that is a UUID, else a UUIDv5 of mailbox and id.

    Only the canonical spelling of a UUID is recognised, so that every id has exactly one spelling.

    Arguments:
        topic: topic of an id that is unique only there, as ids of senders limited to topics are (ADR 0106).
            Its stream id begins like the one without a topic, and has a variant that libraries never give a
            UUID.

    Raises: InvalidRequest unless the id is text of 1 to 255 characters.
    """
    text = check_text("The message id", message_id, 1)
    stream = _id_stream(mailbox, text)
    return stream if topic is None else _topic_stream(stream, mailbox, text, topic)


def message_streams(mailbox: str, message_id: str, topic: str) -> tuple[bytes, bytes]:
    """Return the stream ids of a message without and with its topic; see `message_stream`."""
    text = check_text("The message id", message_id, 1)
    stream = _id_stream(mailbox, text)
    return stream, _topic_stream(stream, mailbox, text, topic)


def _id_stream(mailbox: str, text: str) -> bytes:
    is_uuid = len(text) == _UUID_CHARS and UUID_TEXT.match(text)
    return bytes.fromhex(text.replace("-", "")) if is_uuid else _name_based(f"{mailbox}/{text}")


def _topic_stream(stream: bytes, mailbox: str, text: str, topic: str) -> bytes:
    # Neither mailboxes nor topics have spaces, so no other topic and id have the same name.
    digest = sha1(_NAMES + f"{mailbox} {topic} {text}".encode(), usedforsecurity=False).digest()
    return stream[:8] + _AS_TOPIC_VARIANT[digest[8]] + digest[9:16]


def job_of_topics(mailbox: str, job_id: str, topics: Sequence[str]) -> str:
    """Return the id of a redrive job whose starter, limited to these topics, knows it as `job_id`.

    Raises: InvalidRequest unless `job_id` is a UUID.
    """
    # A list is no name of a topic, so no message of such a sender has the same id.
    return message_id(message_stream(mailbox, check_uuid("The redrive job id", job_id), f"{[*topics]}"))


def topic_streams(stream: bytes) -> tuple[bytes, bytes]:
    """Return the first and the last stream id that an id can have which is unique only in its topic.

    Arguments:
        stream: stream id of the id without a topic; see `message_stream`.
    """
    return stream[:8] + bytes([_TOPIC_VARIANT]) + bytes(7), stream[:8] + b"\xff" * 8


def may_have_id(stream: bytes, mailbox: str, id_: str) -> bool:
    """Return whether a message of this stream may have been sent with an id, to whatever topic."""
    expected = message_stream(mailbox, id_)
    return stream == expected or (stream[:8] == expected[:8] and stream[8] >= _TOPIC_VARIANT)


def external_id(stream: bytes, id_: str) -> str | None:
    """Return the message id to store besides the stream id, or None if the stream id is the id."""
    return None if len(id_) == _UUID_CHARS and id_ == _uuid_text(stream) else id_


def is_name_based(stream: bytes) -> bool:
    """Return whether a stream id may be derived from an id that is not the stream id itself."""
    return stream[6] >> 4 == 5 or stream[8] >= _TOPIC_VARIANT


def message_id(stream: bytes, external: str | None = None) -> str:
    """Return a message's public id: its external id, else its stream id as a UUID."""
    return external if external is not None else _uuid_text(stream)


def _uuid_text(stream: bytes) -> str:
    """Return the text of a UUID; five times as fast as `uuid.UUID`."""
    digits = stream.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _name_based(name: str) -> bytes:
    """Return the UUIDv5 of a name; four times as fast as `uuid.uuid5`."""
    digest = sha1(_NAMES + name.encode(), usedforsecurity=False).digest()
    return digest[:6] + _AS_VERSION_5[digest[6]] + digest[7:8] + _AS_VARIANT[digest[8]] + digest[9:16]


def copy_stream(subscription: bytes, rewinds: int, stream: bytes) -> bytes:
    """Return the stream id of the copy of a message that a subscription gets after a number of rewinds.

    Arguments:
        subscription: stream id of the subscription; senders can't guess it, so none can take the copy's id.
        stream: of the message.
    """
    return _name_based(f"{subscription.hex()} {rewinds} {stream.hex()}")


def tick_stream(schedule: bytes, tick: int) -> bytes:
    """Return the stream id of the message that a schedule sends at a tick.

    Arguments:
        schedule: stream id of the schedule; senders can't guess it, so none can take the message's id.
        tick: log time, µs.
    """
    return _name_based(f"{schedule.hex()} at {tick}")


def b3(digest: bytes) -> str:
    """Return a digest in its text form, `b3:<hex>` (svc-mailbox I-7)."""
    return f"b3:{digest.hex()}"


def is_glob(pattern: str) -> bool:
    """Return whether the name of a section is a glob rather than the name of one topic."""
    return "*" in pattern


def glob_specificity(pattern: str) -> tuple[int, str]:
    """Return the sort key of a glob: of two that match a topic, the section of the later one applies."""
    return len(pattern) - pattern.count("*"), pattern


def may_overlap(one: str, other: str) -> bool:
    """Return whether a topic may match both globs, judged by their beginnings and ends alone."""
    heads = sorted((one.split("*")[0], other.split("*")[0]), key=len)
    tails = sorted((one.split("*")[-1], other.split("*")[-1]), key=len)
    return heads[1].startswith(heads[0]) and tails[1].endswith(tails[0])
