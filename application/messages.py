"""Messages as senders write them and as consumers get them."""

from base64 import b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from postroom.application.engine import Delivered
from postroom.domain.envelope.build import OpenedEnvelope, open_envelope, without_auth_token
from postroom.domain.errors import InvalidRequest
from postroom.domain.integrity import b3
from postroom.domain.message import Receipt
from postroom.domain.names import message_id

_RECEIPT_BYTES = 16 + 4 + 6
_RECEIPT_PREFIX = "r."
"""No receipt may look like a command-line option, which begins with a dash."""


class NewMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describe a message to send (svc-mailbox C-1 `SEND`).

    Arguments:
        idem_key: sending again with the same key and payload inside the replay window adds nothing; None: no
            check.
        sticky_key: messages with the same key keep their order; None shares the topic's shard (svc-mailbox
            P-6).
        message_id: an id of the sender's own, unique for ever; None makes a UUIDv7.
        deliver_after_ms: hide the message for this long first.
        ttl_seconds: dead-letter it when undelivered for this long; 0 leaves it to the topic's retention.
        published_at_us: µs since 1970 UTC; None is now.
    """

    topic: str
    payload: bytes
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


class Sent(msgspec.Struct, frozen=True, gc=False):
    """Answer to a send: the message's id, and whether it had been sent before (svc-mailbox C-1)."""

    message_id: str
    duplicate: bool


class ReceivedMessage:
    """One delivery of a message: payload, headers, and the receipt that settles it (svc-mailbox C-9)."""

    __slots__ = ("_delivered", "_opened")

    def __init__(self, delivered: Delivered) -> None:
        self._delivered = delivered
        self._opened: OpenedEnvelope | None = None

    def __repr__(self) -> str:
        return f"ReceivedMessage({self.message_id!r}, topic={self.topic!r}, attempt={self.attempt})"

    @property
    def message_id(self) -> str:
        """Return the message's id."""
        sent = self._delivered.sent
        return message_id(sent.stream, sent.headers.message_id)

    @property
    def topic(self) -> str:
        """Return the topic it was sent to."""
        return self._delivered.sent.topic

    @property
    def shard(self) -> int:
        """Return the shard of the topic that it queued in."""
        return self._delivered.sent.shard

    @property
    def attempt(self) -> int:
        """Return which delivery this is, counted from 1."""
        return self._delivered.received.attempt

    @property
    def receipt(self) -> Receipt:
        """Return what to ack, nack or extend this delivery with."""
        received = self._delivered.received
        return Receipt(received.stream, received.version, self._delivered.epoch)

    @property
    def visible_at_us(self) -> int:
        """Return the log time (µs) at which the message reappears unless settled."""
        return self._delivered.received.due

    @property
    def idem_key(self) -> str | None:
        """Return the idempotency key it was sent under."""
        return self._delivered.sent.idem_key

    @property
    def payload(self) -> bytes:
        """Return the payload."""
        return self._open().payload

    @property
    def attrs(self) -> dict[str, str]:
        """Return the sender's attributes as text."""
        return self._open().attrs

    @property
    def correlation_id(self) -> str:
        """Return the id that ties one request's messages together; a message without one starts its own."""
        return self._open().correlation_id or self.message_id

    @property
    def published_at_us(self) -> int | None:
        """Return when the sender published it, µs since 1970 UTC."""
        return self._open().published_at_us

    @property
    def envelope(self) -> bytes:
        """Return the `PrismEnvelope` bytes, without the publisher's auth token."""
        return without_auth_token(self._delivered.sent.envelope)

    def to_json(self) -> dict[str, Any]:
        """Return the delivery as svc-mailbox C-9 writes it, with payload and receipt."""
        sent = self._delivered.sent
        return {
            "msg_id": self.message_id,
            "topic": self.topic,
            "ts": rfc3339(self.published_at_us),
            "idem_key": self.idem_key,
            "payload_hash": b3(sent.payload_hash),
            "attrs": self.attrs,
            "corr_id": self.correlation_id,
            "shard": self.shard,
            "attempt": self.attempt,
            "hash_chain": b3(sent.hash_chain),
            "receipt": write_receipt(self.receipt),
            "payload_b64": b64encode(self.payload).decode(),
        }

    def _open(self) -> OpenedEnvelope:
        if self._opened is None:
            self._opened = open_envelope(self._delivered.sent.envelope)
        return self._opened


def write_receipt(receipt: Receipt) -> str:
    """Return a receipt as a token for the command line and the network."""
    parts = receipt.message + receipt.delivery.to_bytes(4, "big") + receipt.epoch.to_bytes(6, "big")
    return _RECEIPT_PREFIX + urlsafe_b64encode(parts).rstrip(b"=").decode()


def read_receipt(token: str) -> Receipt:
    """Return the receipt that `write_receipt` wrote, or raise `InvalidRequest`."""
    try:
        text = token.removeprefix(_RECEIPT_PREFIX)
        parts = urlsafe_b64decode(text + "=" * (-len(text) % 4)) if text != token else b""
    except ValueError:
        parts = b""
    if len(parts) != _RECEIPT_BYTES:
        raise InvalidRequest(f"{token!r} is not a receipt; pass the receipt that came with the message.")
    return Receipt(parts[:16], int.from_bytes(parts[16:20], "big"), int.from_bytes(parts[20:], "big"))


def rfc3339(time_us: int | None) -> str | None:
    """Return a time in µs since 1970 UTC as RFC 3339 text."""
    if time_us is None:
        return None
    return (
        datetime.fromtimestamp(time_us / 1_000_000, UTC)
        .isoformat(timespec="microseconds")
        .replace("+00:00", "Z")
    )
