"""Encryption and decryption of one message of a data subject (ADR 0089)."""

from base64 import b64decode, b64encode
from typing import NamedTuple

import msgspec

from postroom.application.ports.subject_keys import SubjectKey
from postroom.domain.envelope.build import OpenedEnvelope
from postroom.domain.envelope.headers import extract_mailbox_item, parse_envelope
from postroom.domain.envelope.v1.envelope_pb2 import ENCRYPTION_TYPE_SYMMETRIC, PrismEnvelope
from postroom.domain.errors import IntegrityFailure, InvalidRequest
from postroom.domain.integrity import hash_chain, payload_hash
from postroom.domain.message import Headers, MessageSent
from postroom.domain.names import message_id
from postroom.domain.subject import ALGORITHM, ATTRS, SubjectPolicy


def read_field(envelope: PrismEnvelope, field: str) -> bytes:
    """Return the value of a field; empty if the message has none."""
    if field.startswith(ATTRS):
        return envelope.extensions.get(field.removeprefix(ATTRS), b"")
    text: str = envelope.security.publisher_id if field == "principal" else getattr(envelope.metadata, field)
    return text.encode()


def write_field(envelope: PrismEnvelope, field: str, value: str) -> None:
    """Replace the value of a field."""
    if field.startswith(ATTRS):
        envelope.extensions[field.removeprefix(ATTRS)] = value.encode()
    elif field == "principal":
        envelope.security.publisher_id = value
    else:
        setattr(envelope.metadata, field, value)


class StoredContent(NamedTuple):
    """The parts of a message that its envelope determines: its fields of the same names.

    Its size is not among them, so bounds in bytes refer to payloads as they were sent.
    """

    envelope: bytes
    headers: Headers
    payload_hash: bytes
    hash_chain: bytes


class _Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of the algorithm: the encrypted original headers, in base64."""

    headers: str


def read_pseudonym(sent: MessageSent) -> str | None:
    """Return the pseudonym of a stored message's subject, or None if Postroom did not encrypt the message."""
    try:
        encryption = parse_envelope(sent.envelope).security.encryption
    except InvalidRequest:  # altered on disk
        return None
    return encryption.key_id if encryption.algorithm == ALGORITHM else None


def read_subject(envelope: PrismEnvelope, topic: str, policy: SubjectPolicy) -> str:
    """Return the name of a message's subject.

    Raises: InvalidRequest when the message has none, or one that is not UTF-8.
    """
    value = read_field(envelope, policy.subject)
    try:
        subject = value.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"{policy.subject}, which names the subject of messages on topic {topic}, must be UTF-8."
        ) from None
    if not subject:
        raise InvalidRequest(
            f"Messages on topic {topic} need {policy.subject}, which names the subject for whom they are "
            "encrypted."
        )
    return subject


def encrypt(
    envelope: PrismEnvelope,
    policy: SubjectPolicy,
    key: SubjectKey,
    *,
    stream: bytes,
    headers: Headers,
    idem_key: str | None,
) -> StoredContent:
    """Return the stored form of a message: its encrypted envelope, and the values computed from it.

    All original headers are encrypted together. The stored envelope also has, in the clear, the headers that
    the policy does not name, except auth token, signature, baggage and unknown fields.

    Arguments:
        envelope: as it was sent; it is not changed.
        stream, headers: of the message.
    """
    original = PrismEnvelope()
    original.CopyFrom(envelope)
    original.ClearField("payload")
    stored = PrismEnvelope()
    stored.CopyFrom(envelope)
    stored.DiscardUnknownFields()
    stored.payload.value = key.encrypt("payload", envelope.payload.value)
    stored.metadata.message_id = message_id(stream, headers.message_id)
    for field in policy.encrypt:
        value = read_field(envelope, field)
        if value:
            write_field(stored, field, key.token(field, value))
    write_field(stored, policy.subject, key.pseudonym)
    for name in ("auth_token", "signature", "signature_algorithm", "encryption"):
        stored.security.ClearField(name)
    stored.observability.ClearField("baggage")
    encryption = stored.security.encryption
    encryption.key_id = key.pseudonym
    encryption.encryption_type = ENCRYPTION_TYPE_SYMMETRIC
    encryption.algorithm = ALGORITHM
    ciphertext = key.encrypt("headers", original.SerializeToString(deterministic=True))
    encryption.algorithm_params = msgspec.json.encode(_Params(b64encode(ciphertext).decode())).decode()
    return _content(stored, headers, idem_key, stored.metadata.topic)


def decrypt(sent: MessageSent, key: SubjectKey) -> MessageSent:
    """Return a stored message as it was sent, with hashes of its own payload and attributes.

    Raises: IntegrityFailure when its ciphertext was altered.
    """
    stored = parse_envelope(sent.envelope)
    try:
        params = msgspec.json.decode(stored.security.encryption.algorithm_params, type=_Params)
        ciphertext = b64decode(params.headers, validate=True)
    except (msgspec.MsgspecError, ValueError):
        raise IntegrityFailure(f"The headers of a message of {key.pseudonym} were altered.") from None
    envelope = parse_envelope(key.decrypt("headers", ciphertext))
    if envelope.metadata.message_id not in ("", stored.metadata.message_id):
        raise IntegrityFailure(f"The headers of a message of {key.pseudonym} are of another message.")
    envelope.payload.type_url = stored.payload.type_url
    envelope.payload.value = key.decrypt("payload", stored.payload.value)
    content = _content(envelope, sent.headers, sent.idem_key, sent.topic)
    return msgspec.structs.replace(sent, **content._asdict())


def _content(envelope: PrismEnvelope, headers: Headers, idem_key: str | None, topic: str) -> StoredContent:
    blob = envelope.SerializeToString(deterministic=True)
    item = extract_mailbox_item(blob, received_at=headers.timestamp, envelope=envelope)
    digest, opened = payload_hash(envelope.payload.value), OpenedEnvelope(envelope)
    changed = msgspec.structs.replace(
        headers,
        encryption=item.encryption,
        correlation_id=item.correlation_id,
        principal=item.principal,
        custom_headers=item.custom_headers or None,
    )
    chain = hash_chain(topic, opened.published_at_us, idem_key, digest, opened.extensions)
    return StoredContent(blob, changed, digest, chain)
