"""Hashes that verify the integrity of stored messages (svc-mailbox I-7, I-12)."""

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from blake3 import blake3

from postroom.domain.envelope.build import open_envelope
from postroom.domain.envelope.headers import extract_mailbox_item
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import Headers, MessageSent
from postroom.domain.names import message_id

_COMPARED = [name for name in Headers.__struct_fields__ if name not in ("message_id", "custom_headers")]
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def digests(parts: Iterable[bytes]) -> list[bytes]:
    """Return the 32-byte BLAKE3 of each part; a hasher for each would take twice the time."""
    hasher, hashed = blake3(), []
    for part in parts:
        hasher.update(part)
        hashed.append(hasher.digest())
        hasher.reset()
    return hashed


def payload_hash(payload: bytes) -> bytes:
    """Return `blake3_256(payload)`, 32 bytes (svc-mailbox I-7)."""
    return blake3(payload).digest()


def hash_chain(
    topic: str,
    timestamp_us: int | None,
    idem_key: str | None,
    payload_digest: bytes,
    attrs: Mapping[str, bytes],
) -> bytes:
    """Return `H(topic, ts, idem_key, payload_hash, attrs)`, 32 bytes (svc-mailbox I-12).

    The input is the MessagePack array of these five values in this order, with `attrs` sorted by name, so
    consumers in any language can recompute it.

    Arguments:
        timestamp_us: when the message was published, µs since 1970 UTC.
        attrs: the envelope's extensions, as bytes.
    """
    return blake3(_encode((topic, timestamp_us, idem_key, payload_digest, attrs))).digest()


def hash_chains(
    topic: str, timestamp_us: int | None, idem_keys: Sequence[str | None], payload_digests: Sequence[bytes]
) -> list[bytes]:
    """Return `hash_chain` of messages that were published at the same time, and have no attributes."""
    return digests(
        [
            _encode((topic, timestamp_us, key, digest, {}))
            for key, digest in zip(idem_keys, payload_digests, strict=True)
        ]
    )


def has_intact_payload(sent: MessageSent) -> bool:
    """Return whether payload, topic, time, key and attributes match their hashes (svc-mailbox I-12)."""
    try:
        envelope = open_envelope(sent.envelope)
    except InvalidRequest:
        return False
    digest = payload_hash(envelope.payload)
    return digest == sent.payload_hash and sent.hash_chain == hash_chain(
        sent.topic, envelope.published_at_us, sent.idem_key, digest, envelope.extensions
    )


def has_intact_headers(sent: MessageSent) -> bool:
    """Return whether the headers of a message equal its envelope's (svc-mailbox I-12, RFC-037)."""
    headers = sent.headers
    try:
        item = extract_mailbox_item(sent.envelope, received_at=headers.timestamp)
    except InvalidRequest:
        return False
    return (
        item.message_id in (sent.copy_of, message_id(sent.stream, headers.message_id))
        and item.custom_headers == (headers.custom_headers or {})
        and all(getattr(item, name) == getattr(headers, name) for name in _COMPARED)
    )


_VARIABLE = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # UUIDs
    r"|0x[0-9a-f]+"
    r"|\b(?=[a-f]*[0-9])[0-9a-f]{8,}\b"  # hashes and ids in hex, but not words such as "defaced"
    r"|\d+(?:\.\d+)*",
    re.IGNORECASE,
)
_SPACE = re.compile(r"\s+")


def fingerprint(reason: str, error: str | None) -> str:
    """Return a stable hash of a failure, the same for errors that differ only in numbers, UUIDs or hex ids.

    Arguments:
        reason: why the message was dead-lettered, such as `max_attempts`.
        error: the last error as the consumer reported it.

    Returns: 16 hex digits.
    """
    return blake3(f"{reason}\n{normalize(error or '')}".encode()).hexdigest(8)


def normalize(error: str) -> str:
    """Return an error's text in lower case, with single spaces, and `#` for every number, UUID and hex id."""
    return _SPACE.sub(" ", _VARIABLE.sub("#", error)).strip().lower()
