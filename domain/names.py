"""Names: mailboxes, topics and message ids, and the 16-byte stream ids that stand for them in the log."""

import re
from hashlib import sha1
from uuid import UUID

from postroom.domain.errors import InvalidRequest

_MAILBOX = re.compile(r"[^\s@/]{1,128}@[^\s@/]{1,128}\Z")
_TOPIC = re.compile(r"[^\s\x00-\x1f\x7f*?\[\]]{1,255}\Z")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
_NAMES = UUID("6ad9bd0e-54c4-5d0b-9a39-0d9bb4ce1c4e").bytes  # Postroom's own namespace for name-based ids
_AS_VERSION_5 = [bytes([byte & 0x0F | 0x50]) for byte in range(256)]
_AS_VARIANT = [bytes([byte & 0x3F | 0x80]) for byte in range(256)]
MAX_ID_CHARS = 255


def check_mailbox(name: str) -> str:
    """Return a mailbox name of the form `{namespace}@{proxy_id}` (RFC-049), or raise `InvalidRequest`."""
    if not _MAILBOX.match(name):
        raise InvalidRequest(
            f"Mailbox name {name!r} must have the form namespace@proxy, without spaces or slashes."
        )
    return name


def check_topic(name: str) -> str:
    """Return a topic name, or raise `InvalidRequest`; the glob characters `*?[]` are for searching only."""
    if not _TOPIC.match(name):
        raise InvalidRequest(
            f"Topic name {name!r} must be 1 to 255 characters without spaces, control characters or any of "
            "* ? [ ]."
        )
    return name


def mailbox_stream(name: str) -> bytes:
    """Return the stream id of a mailbox's own events."""
    return _name_based(name)


def message_stream(mailbox: str, message_id: str) -> bytes:
    """Return a message's stream id: its id where that is a UUID, else a name-based one of mailbox and id.

    Only the canonical spelling of a UUID counts as one, so that every id has exactly one spelling.
    """
    if _UUID.match(message_id):
        return bytes.fromhex(message_id.replace("-", ""))
    if not 0 < len(message_id) <= MAX_ID_CHARS:
        raise InvalidRequest(
            f"A message id must have 1 to {MAX_ID_CHARS} characters; it had {len(message_id)}."
        )
    return _name_based(f"{mailbox}/{message_id}")


def given_id(id_: str) -> str | None:
    """Return what to keep of a message id beside its stream id: nothing where that is the id."""
    return None if _UUID.match(id_) else id_


def message_id(stream: bytes, given: str | None = None) -> str:
    """Return a message's id as users see it: the one it was given, else its stream id as a UUID."""
    return given if given is not None else str(UUID(bytes=stream))


def _name_based(name: str) -> bytes:
    """Return the UUID of version 5 that stands for a name; `uuid.uuid5` costs four times as much."""
    digest = sha1(_NAMES + name.encode(), usedforsecurity=False).digest()
    return digest[:6] + _AS_VERSION_5[digest[6]] + digest[7:8] + _AS_VARIANT[digest[8]] + digest[9:16]
