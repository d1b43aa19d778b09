"""Encryption of messages: what was sent comes back, and what is stored shows nothing of it."""

from uuid import UUID

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st

from postroom.adapters.subject_keys.master_key import LocalMasterKey
from postroom.adapters.subject_keys.memory import MemorySubjectKeys
from postroom.application.erasure.message_cipher import decrypt, encrypt
from postroom.application.mailbox.message_factory import MessageFactory
from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.errors import IntegrityFailure, InvalidRequest
from postroom.domain.integrity import has_intact_headers, has_intact_payload
from postroom.domain.mailbox.send_decisions import sent
from postroom.domain.message import MessageSent
from postroom.domain.subject import SubjectPolicy, is_encrypted
from tests.properties.test_envelope_properties import envelopes

KEYS = MemorySubjectKeys(LocalMasterKey(bytes(32)), lambda: 0)
SECRET = "Amélie-5f1c2d"
POLICY = SubjectPolicy("principal", ("correlation_id", "causality_parent", "attrs.email"))
UNKNOWN_FIELD = bytes([0xFA, 0x01, len(SECRET.encode())]) + SECRET.encode()


def secret_message(blob: bytes, idem_key: str | None) -> MessageSent:
    """Return a message with the secret wherever encryption must hide it."""
    envelope = parse_envelope(blob)
    envelope.metadata.topic = "orders"
    envelope.security.publisher_id = envelope.metadata.correlation_id = SECRET
    envelope.metadata.causality_parent = envelope.security.auth_token = SECRET
    envelope.payload.value += SECRET.encode()
    envelope.extensions["email"] = envelope.security.signature = SECRET.encode()
    envelope.observability.baggage["user"] = SECRET
    blob = envelope.SerializeToString(deterministic=True) + UNKNOWN_FIELD
    factory = MessageFactory("acme@one", lambda: 1, lambda: UUID(int=7))
    try:
        request = factory.from_envelope(blob, parse_envelope(blob), idem_key=idem_key)
    except InvalidRequest:
        assume(False)
    return sent(request.command, 0, 0, 0, 0)


def encrypted(plain: MessageSent) -> MessageSent:
    content = encrypt(
        parse_envelope(plain.envelope),
        POLICY,
        KEYS.get_or_create([SECRET])[SECRET],
        stream=plain.stream,
        headers=plain.headers,
        idem_key=plain.idem_key,
    )
    return msgspec.structs.replace(plain, **content._asdict())


@given(envelopes(), st.none() | st.text("ké", min_size=1))
def test_any_envelope_comes_back_as_it_was_and_is_stored_without_its_secrets(
    blob: bytes, idem_key: str | None
) -> None:
    """The hashes of svc-mailbox I-7 and I-12 hold for what is stored and for what is delivered."""
    plain = secret_message(blob, idem_key)
    stored = encrypted(plain)
    assert SECRET.encode() in plain.envelope
    assert SECRET.encode() not in msgspec.msgpack.encode(stored)
    assert is_encrypted(stored.headers)
    assert has_intact_payload(stored)
    assert has_intact_headers(stored)
    assert encrypted(plain) == stored  # so that a repetition is recognised
    back = decrypt(stored, KEYS.get_or_create([SECRET])[SECRET])
    assert parse_envelope(back.envelope) == parse_envelope(plain.envelope)
    assert msgspec.structs.replace(back, envelope=plain.envelope) == plain


@given(envelopes(), st.data())
def test_no_altered_envelope_is_decrypted_to_something_else(blob: bytes, data: st.DataObject) -> None:
    plain = secret_message(blob, None)
    stored = encrypted(plain)
    index = data.draw(st.integers(0, len(stored.envelope) - 1))
    altered = bytearray(stored.envelope)
    altered[index] ^= 1 << data.draw(st.integers(0, 7))
    try:
        back = decrypt(
            msgspec.structs.replace(stored, envelope=bytes(altered)), KEYS.get_or_create([SECRET])[SECRET]
        )
    except (IntegrityFailure, InvalidRequest):
        return
    assert back.payload_hash == plain.payload_hash
    # What the stored envelope has in the clear is not part of the message that is delivered.
    assert parse_envelope(back.envelope).metadata == parse_envelope(plain.envelope).metadata
