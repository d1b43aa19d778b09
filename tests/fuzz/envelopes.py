"""Target: `PrismEnvelope` bytes as senders and streams bring them."""

from collections.abc import Iterator
from contextlib import contextmanager

from postroom.application.messages import MessageDelivery
from postroom.application.received_messages import DeliveredMessage
from postroom.domain.envelope.build import OpenedEnvelope, open_envelope, without_auth_token
from postroom.domain.envelope.headers import extension_bytes, extract_mailbox_item
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.envelope.validation import ValidationMode, validate_envelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import Receipt
from tests.fuzz.target import Check
from tests.support.envelopes import build_envelope

_READERS = (extract_mailbox_item, open_envelope, without_auth_token)
_HEADERS = [name for name, value in vars(OpenedEnvelope).items() if isinstance(value, property)]


def _envelope(**fields: object) -> bytes:
    values: dict[str, object] = {
        "message_id": "order-7",
        "topic": "orders",
        "namespace": "acme",
        "published_at_us": 1_700_000_000_000_000,
        "payload": b"{}",
        "attrs": {"text": "value", "raw": b"\xff"},
    }
    return build_envelope(**(values | fields))  # type: ignore[arg-type]


def _secret() -> bytes:
    envelope = PrismEnvelope.FromString(_envelope())
    envelope.security.auth_token = "secret"
    envelope.observability.labels["team"] = "shop"
    return envelope.SerializeToString()


SEEDS = [
    _envelope(),
    _secret(),
    _envelope(published_at_us=-62_135_596_800_000_000, priority=10, ttl_seconds=1),
    _envelope(published_at_us=253_402_300_799_999_999, encryption="aes", schema_url="s", schema_version="1"),
    _envelope(attrs={"base64:": "base64:x", "": "\0"}, trace_id="t", span_id="s", principal="p"),
]
BOMBS = [
    _envelope(payload=bytes(1 << 20)),
    _envelope(attrs={str(number): b"" for number in range(20_000)}),
    b"\x0a" * (1 << 20),
    b"\x0a\xff\xff\xff\xff\x0f",  # a sub-message that claims 4 GiB
]


@contextmanager
def opened() -> Iterator[Check]:
    """Yield the check."""
    yield check


def check(data: bytes) -> None:
    """Check that all readers agree on whether it is an envelope, and can read all of it."""
    refused = [reader for reader in _READERS if _is_refused(reader, data)]
    assert refused in ([], list(_READERS))
    accepted = [mode for mode in ValidationMode if validate_envelope(data, mode).is_accepted]
    if refused:
        assert accepted == []
        return
    assert {ValidationMode.WARN, ValidationMode.DISABLED} <= {*accepted}
    envelope, item, public = open_envelope(data), extract_mailbox_item(data), without_auth_token(data)
    assert without_auth_token(public) == public
    assert not open_envelope(public)._envelope.security.auth_token
    assert item.reconstruct_envelope() == PrismEnvelope.FromString(public)
    for name in _HEADERS:
        getattr(envelope, name)
    assert {name: extension_bytes(text) for name, text in envelope.attrs.items()} == envelope.extensions
    delivery = MessageDelivery(
        Receipt(bytes(16), 1, 1), "orders", 0, 1, 0, None, None, bytes(32), bytes(32), data
    )
    DeliveredMessage(delivery).to_json()


def _is_refused(reader: object, data: bytes) -> bool:
    try:
        reader(data)  # type: ignore[operator]
    except InvalidRequest:
        return True
    return False
