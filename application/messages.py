"""Messages as senders write them and as owners deliver them, and the receipts of their deliveries."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache

import msgspec

from postroom.domain.arguments import check_any_text
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import OnConflict, Receipt
from postroom.domain.names import STREAM_BYTES

_RECEIPT_BYTES = STREAM_BYTES + 4 + 6
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RECEIPT_PREFIX = "r."
"""Prefix of receipts, so that none begins with a dash like a command-line option."""


class _Content(msgspec.Struct, frozen=True, gc=False):
    """Fields of a new message that may be passed by position."""

    topic: str
    payload: bytes


class NewMessage(_Content, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Message to be sent (svc-mailbox C-1 `SEND`); the sending handler validates it.

    Arguments:
        topic: 1 to 255 characters.
        payload: bytes, whose meaning Postroom does not know; with the envelope up to the limit `frame_bytes`.
        idem_key: 1 to 255 characters; a repetition with the same key and payload within the replay window
            adds nothing. None disables the check.
        sticky_key: up to 255 characters; messages with the same key keep their order. None uses the topic's
            name (svc-mailbox P-6).
        attrs: custom headers; names and values together up to 64 KiB.
        message_id: the sender's own id, 1 to 255 characters, never reused; None generates a UUIDv7.
        deliver_after_ms: delay before the first delivery; shorter than `ttl_seconds` if that is set.
        ttl_seconds: age at which it is dead-lettered if undelivered; 0 uses the topic's retention.
        published_at_us: µs since 1970 UTC; None is now.
        priority: 0 to 10, the most urgent; it changes the order of delivery only in topics whose policy has
            `priorities`.
        unique_key: 1 to 255 characters; while another unsettled message of the topic has it, dead letters
            aside, a send adds nothing and returns that message's id as a duplicate.
        on_conflict: `keep` does just that; `reschedule` also gives that message the delay of this send if it
            waits; `replace` removes it, even in flight, and sends this one, so that the latest payload wins.
        content_type: media type of the payload.
        correlation_id: shared by all messages of one request.
        causality_parent: id of the message that caused this one.
        principal: publisher.
        trace_id, span_id: of the trace, in hexadecimal.
        schema_url, schema_version: schema of the payload.
    """

    idem_key: str | None = None
    sticky_key: str | None = None
    attrs: Mapping[str, str | bytes] = {}
    message_id: str | None = None
    deliver_after_ms: int = 0
    ttl_seconds: int = 0
    published_at_us: int | None = None
    content_type: str | None = None
    correlation_id: str | None = None
    causality_parent: str | None = None
    principal: str | None = None
    priority: int = 5
    trace_id: str | None = None
    span_id: str | None = None
    schema_url: str | None = None
    schema_version: str | None = None
    unique_key: str | None = None
    on_conflict: OnConflict = "keep"


class Sent(msgspec.Struct, frozen=True, gc=False):
    """Result of a send: the message's id, and whether the send was a duplicate (svc-mailbox C-1).

    Arguments:
        message_id: of the new message, or of the original that this send repeated.
        duplicate: whether the send was a duplicate, and added nothing.
    """

    message_id: str
    duplicate: bool


class MessageResult(msgspec.Struct, frozen=True, gc=False):
    """Result of a message, which its consumer gives to the ack.

    Arguments:
        payload: bytes that the consumer passed.
        content_type: media type of the payload, up to 255 characters.
    """

    payload: bytes
    content_type: str | None = None


class MessageDelivery(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One delivery of a message, as an owner hands it over and the local socket carries it.

    Arguments:
        receipt: also names the message's stream.
        due: log time (µs) at which the message reappears unless settled.
        external_id: the sender's own id; None if the stream id is the id.
        payload_hash, hash_chain: 32-byte BLAKE3 digests (svc-mailbox I-7, I-12).
        envelope: the `PrismEnvelope` bytes as they were sent.
        ordered_key: its sticky key if its topic has ordered keys; the delivered messages of one are to be
            handled and acked in their order.
        position: of its `MessageSent` in the log; 0 if it came by HTTP or gRPC, which do not carry it.
    """

    receipt: Receipt
    topic: str
    shard: int
    attempt: int
    due: int
    external_id: str | None
    idem_key: str | None
    payload_hash: bytes
    hash_chain: bytes
    envelope: bytes
    ordered_key: str | None = None
    position: int = 0


def write_receipt(receipt: Receipt) -> str:
    """Return a receipt as a token for the command line and the network.

    Arguments:
        receipt: of a delivery.
    """
    parts = receipt.message + receipt.delivery.to_bytes(4, "big") + receipt.epoch.to_bytes(6, "big")
    return _RECEIPT_PREFIX + urlsafe_b64encode(parts).rstrip(b"=").decode()


def read_receipt(token: str) -> Receipt:
    """Parse the output of `write_receipt`, or raise `InvalidRequest`.

    Arguments:
        token: text of `write_receipt`.
    """
    text = check_any_text("The receipt", token).removeprefix(_RECEIPT_PREFIX)
    try:
        parts = urlsafe_b64decode(text + "=" * (-len(text) % 4)) if text != token else b""
    except ValueError:
        parts = b""
    receipt = Receipt(parts[:16], int.from_bytes(parts[16:20], "big"), int.from_bytes(parts[20:26], "big"))
    # The decoder ignores invalid characters, so only the canonical encoding is accepted.
    if len(parts) != _RECEIPT_BYTES or write_receipt(receipt) != token:
        raise InvalidRequest(f"{token[:80]!r} is not a receipt; pass the receipt of a received message.")
    return receipt


def rfc3339(time_us: int | None) -> str | None:
    """Return a time in µs since 1970 UTC as RFC 3339 text."""
    if time_us is None:
        return None
    seconds, microseconds = divmod(time_us, 1_000_000)
    return f"{_second(seconds)}.{microseconds:06}Z"


@lru_cache(1_024)
def _second(seconds: int) -> str:
    """Return a time in seconds since 1970 UTC as text; the times of a second have it in common."""
    return (_EPOCH + timedelta(seconds=seconds)).isoformat().removesuffix("+00:00")
