"""Copies of dead letters, with another topic, or other headers or payloads."""

from collections.abc import Callable

from postroom.application.erasure.protection import Protection
from postroom.application.mailbox.codec import is_intact
from postroom.application.mailbox.message_factory import MessageFactory, NewId
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.envelope.headers import extension_bytes, parse_envelope
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import REPLACED, Message, MessageDeadLettered, MessageSent
from postroom.domain.names import message_id
from postroom.domain.record import Record
from postroom.domain.redrive.commands import Copy, Original
from postroom.domain.redrive.events import RedriveAdvanced
from postroom.domain.redrive.merge_patch import apply_patch
from postroom.domain.redrive.spec import RedriveSpec, SkipReason

MICROSECONDS, NANOSECONDS = 1_000_000, 1_000


class CopyFactory:
    """Factory of the copies that redrive jobs send.

    Arguments:
        mailbox: name of the mailbox.
        now: returns the time of publication, in µs.
        protection: decrypts the originals and encrypts the copies.
    """

    def __init__(
        self, mailbox: str, now: Callable[[], int], new_id: NewId, protection: Protection | None = None
    ) -> None:
        self._factory = MessageFactory(mailbox, now, new_id)
        self._now = now
        self._new_id = new_id
        self._protection = protection

    def make(self, spec: RedriveSpec, message: Message, record: Record | None) -> Copy | SkipReason:
        """Return the copy of a message, with the message as its causality parent, or the reason to skip it.

        Arguments:
            record: record of the message's `MessageSent`; None if it can't be read.
        """
        sent = None if record is None or not is_intact(record) else record.event
        if not isinstance(sent, MessageSent) or sent.stream != message.stream:
            return "unreadable"
        content = sent if self._protection is None else self._protection.read_message(sent)
        if not isinstance(content, MessageSent):
            return "unreadable"
        try:
            envelope = parse_envelope(content.envelope)
        except InvalidRequest:
            return "unreadable"
        if spec.merge_patch is not None:
            payload = apply_patch(envelope.payload.value, spec.merge_patch)
            if payload is None:
                return "not_an_object"
            envelope.payload.value = payload
        for name in spec.remove_headers:
            envelope.extensions.pop(name, None)
        for name, text in spec.set_headers.items():
            envelope.extensions[name] = extension_bytes(text)
        if spec.is_edit:  # the publisher's signature no longer applies
            envelope.security.ClearField("signature")
            envelope.security.ClearField("signature_algorithm")
        self._address(envelope, spec.destination or message.topic, sent)
        blob = envelope.SerializeToString(deterministic=True)
        send = self._factory.from_envelope(blob, envelope).command
        copy = Copy(
            send.message,
            send.topic,
            send.size,
            send.payload_hash,
            send.hash_chain,
            send.headers,
            send.envelope,
            send.priority,
            send.ttl_ms,
        )
        try:
            return copy if self._protection is None else self._protection.encrypt_copy(copy, sent)
        except InvalidRequest:  # without a policy or a subject
            return "unreadable"

    def _address(self, envelope: PrismEnvelope, topic: str, original: MessageSent) -> None:
        metadata, now = envelope.metadata, self._now()
        metadata.message_id = str(self._new_id())
        metadata.causality_parent = message_id(original.stream, original.headers.message_id)
        metadata.topic = topic
        metadata.published_at.seconds = now // MICROSECONDS
        metadata.published_at.nanos = now % MICROSECONDS * NANOSECONDS
        if envelope.HasField("security"):
            envelope.security.ClearField("auth_token")


def read_copies(
    log: EventLogReader, position: int, event: RedriveAdvanced
) -> tuple[tuple[tuple[bytes, int], ...], tuple[Original, ...]]:
    """Return the copies that a job sent in the commit of an event, with their positions, and their originals.

    Arguments:
        position: position of the event.
    """
    first = position - event.moved
    records = log.at_positions(range(first - event.moved, position))
    originals = {each: records[each] for each in range(first, position) if each in records}
    before = log.at_positions([each.position - each.distance for each in originals.values()])
    copies: list[tuple[bytes, int]] = []
    causes: list[Original] = []
    for place, record in originals.items():
        copy, earlier = records.get(place - event.moved), before.get(place - record.distance)
        if copy is not None and earlier is not None and isinstance(earlier.event, MessageDeadLettered):
            copies.append((copy.stream, copy.position))
            causes.append(Original(record.stream, place, earlier.event.reason))
        else:  # the log was altered; the copy stays
            copies.append((record.stream, 0))
            causes.append(Original(record.stream, 0, REPLACED))
    return tuple(copies), tuple(causes)
