"""Hashes that tie a message to what was sent (svc-mailbox I-7, I-12)."""

from collections.abc import Mapping

import msgspec
from blake3 import blake3

from postroom.domain.envelope.build import open_envelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import MessageSent

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


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

    The input is the MessagePack array of the five in this order, `attrs` sorted by name, so that a consumer
    in any language can compute it again.

    Arguments:
        timestamp_us: when the message was published, µs since 1970 UTC.
        attrs: the envelope's extensions, as bytes.
    """
    return blake3(_encode((topic, timestamp_us, idem_key, payload_digest, attrs))).digest()


def b3(digest: bytes) -> str:
    """Return a digest in the form in which it is shown, `b3:<hex>` (svc-mailbox I-7)."""
    return f"b3:{digest.hex()}"


def is_intact(sent: MessageSent) -> bool:
    """Tell whether a message's envelope is still the one that was hashed when sent (svc-mailbox I-12)."""
    try:
        opened = open_envelope(sent.envelope)
    except InvalidRequest:
        return False
    digest = payload_hash(opened.payload)
    return digest == sent.payload_hash and sent.hash_chain == hash_chain(
        sent.topic, opened.published_at_us, sent.idem_key, digest, opened.extensions
    )
