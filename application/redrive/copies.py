"""Copies of dead letters by a redrive job, with other topics, headers or payloads, at its pace."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from postroom.application.erasure.protection import MessageEncryption, Unreadable
from postroom.application.mailbox.codec import is_intact, to_records
from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.mailbox.outgoing import NewId
from postroom.application.mailbox.stored_snapshots import fold_message
from postroom.application.messages import rfc3339
from postroom.application.page import Page, invalid_cursor
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.get_message import status_name
from postroom.application.query_results import Outcome
from postroom.application.reports import RedriveMessage
from postroom.domain.envelope.headers import extension_bytes, parse_envelope
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import REPLACED, Message, MessageDeadLettered, MessageSent
from postroom.domain.names import message_id
from postroom.domain.record import Record
from postroom.domain.redrive.job import (
    Copy,
    Original,
    RedriveAdvanced,
    RedriveJob,
    RedriveSkipped,
    RedriveUndoAdvanced,
)
from postroom.domain.redrive.spec import Action, RedriveSpec, SkipReason, apply_patch
from postroom.domain.subject import is_encrypted

MICROSECONDS, NANOSECONDS = 1_000_000, 1_000


class CopyFactory:
    """Factory of the copies that redrive jobs send.

    Arguments:
        mailbox: name of the mailbox.
        now: returns the time of publication, in µs.
        protection: decrypts the originals and encrypts the copies.
    """

    def __init__(
        self, mailbox: str, now: Callable[[], int], new_id: NewId, protection: MessageEncryption | None = None
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
        content: MessageSent | Unreadable = sent
        if self._protection is not None:
            content = self._protection.read_message(sent)
        elif is_encrypted(sent.headers):  # its id is within the ciphertext, so no copy could be decrypted
            return "unreadable"
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


EVENTS_AT_ONCE = 10
"""Number of a job's events whose commits are in memory at a time."""
_OUTCOMES: dict[Action, Outcome] = {
    "redrive": "redriven",
    "archive": "archived",
    "purge": "purged",
    "cancel": "cancelled",
    "reschedule": "rescheduled",
}


class _Entry(msgspec.Struct, frozen=True):
    """A message of a job.

    Arguments:
        version: version of the job's event for the message.
        copy: stream id of the copy that was sent.
    """

    version: int
    stream: bytes
    outcome: Outcome
    reason: str | None
    copy: bytes | None
    at: int


def list_messages(
    log: EventLogReader, job: RedriveJob, outcome: Outcome | None, cursor: str | None, limit: int, now: int
) -> Page[RedriveMessage]:
    """Return a page of the messages of a job; see `Mailbox.list_redrive_messages`.

    Arguments:
        now: log time in µs.

    Raises: InvalidRequest for a malformed cursor.
    """
    version, offset = _read_cursor(cursor)
    page: list[_Entry] = []
    next_cursor: str | None = None
    done = 0
    for entry in _entries(log, job, version, outcome):
        done = done + 1 if entry.version == version else 1
        is_before = entry.version == version and done <= offset
        if entry.version != version:
            version, offset = entry.version, 0
        if is_before or outcome not in (None, entry.outcome):
            continue
        if len(page) == limit:
            next_cursor = f"{version}.{done - 1}"
            break
        page.append(entry)
    streams = {each for entry in page for each in (entry.stream, entry.copy) if each is not None}
    records = log.read_streams(streams)
    lives = {stream: fold_message(each) for stream, each in records.items()}
    return Page(
        tuple(_describe(entry, _sent(records.get(entry.stream)), lives, now) for entry in page), next_cursor
    )


def _read_cursor(cursor: str | None) -> tuple[int, int]:
    """Return the version of a page's first event, and the number of its messages on earlier pages."""
    if cursor is None:
        return 0, 0
    version, _, offset = cursor.partition(".")
    if not (version.isascii() and version.isdigit() and offset.isascii() and offset.isdigit()):
        raise invalid_cursor(cursor)
    return int(version), int(offset)


def _entries(log: EventLogReader, job: RedriveJob, version: int, outcome: Outcome | None) -> Iterator[_Entry]:
    """Yield the messages of the job's events, starting at a version."""
    undone: dict[int, Record] = {}
    if job.undo_cursor:
        records = log.read_stream(job.job)
        undone = {each.event.cursor: each for each in records if isinstance(each.event, RedriveUndoAdvanced)}
    for record in _progress(log, job, version):
        event = record.event
        if isinstance(event, RedriveSkipped):
            yield _Entry(record.version, event.message, "skipped", event.reason, None, record.at)
        elif isinstance(event, RedriveAdvanced) and outcome != "skipped":
            yield from _changed(log, job, record, event, undone.get(record.version))


def _progress(log: EventLogReader, job: RedriveJob, version: int) -> Iterator[Record]:
    """Yield the records of the job, starting at a version; lazily, as a page needs few."""
    entries = sorted((each.version, each.position) for each in log.index_of([job.job]))
    positions = [position for number, position in entries if number >= version]
    for start in range(0, len(positions), EVENTS_AT_ONCE):
        yield from _read(log, positions[start : start + EVENTS_AT_ONCE]).values()


def _read(log: EventLogReader, positions: Sequence[int]) -> dict[int, Record]:
    """Return the records at positions, in the same order, without envelopes."""
    commits = log.commits_of(positions, envelopes=False)
    records = {each.position: each for commit in commits for each in to_records(commit)}
    return {position: records[position] for position in positions if position in records}


def _changed(
    log: EventLogReader, job: RedriveJob, record: Record, event: RedriveAdvanced, undo: Record | None
) -> Iterator[_Entry]:
    first = record.position - event.moved
    copies = event.moved if job.spec.sends_copies else 0
    records = _read(log, range(first - copies, record.position))
    restored: set[bytes] = set()
    if undo is not None and isinstance(undo.event, RedriveUndoAdvanced):
        positions = range(undo.position - undo.event.restored, undo.position)
        restored = {each.stream for each in _read(log, positions).values()}
    for position in range(first, record.position):
        if (changed := records.get(position)) is not None:
            outcome = "undone" if changed.stream in restored else _OUTCOMES[job.spec.action]
            copy = records.get(position - copies) if copies else None
            stream = None if copy is None else copy.stream
            yield _Entry(record.version, changed.stream, outcome, None, stream, record.at)


def _sent(records: Sequence[Record] | None) -> MessageSent | None:
    """Return the first event of a message, or None if retention removed it."""
    first = records[0].event if records else None
    return first if isinstance(first, MessageSent) else None


def _describe(
    entry: _Entry, sent: MessageSent | None, lives: Mapping[bytes, Message | None], now: int
) -> RedriveMessage:
    external = None if sent is None else sent.headers.message_id
    message = lives.get(entry.copy or entry.stream)
    return RedriveMessage(
        message_id(entry.stream, external),
        None if sent is None else sent.topic,
        entry.outcome,
        entry.reason,
        None if entry.copy is None else message_id(entry.copy),
        rfc3339(entry.at) or "",
        None if message is None else status_name(message, now),
    )


TICK_SECONDS = 0.05
"""Minimum pause between the steps of a job with a rate."""
CATCH_UP_SECONDS = 1.0
"""Maximum backlog of a delayed job, as time at its rate."""


class Pace:
    """Rate limiter of a job.

    Arguments:
        rate: messages per second; None for no limit.
        now: monotonic time in seconds.
    """

    def __init__(self, rate: int | None, now: float) -> None:
        self._rate = rate
        self._credit = 0.0
        self._at = now

    def allowance(self, now: float, maximum: int) -> int:
        """Return the number of messages that may be changed now, up to `maximum`."""
        if self._rate is None:
            return maximum
        self._credit += self._rate * max(0.0, now - self._at)
        self._at = now
        self._credit = min(self._credit, max(self._rate * CATCH_UP_SECONDS, 1.0))
        return min(int(self._credit), maximum)

    def spend(self, messages: int) -> None:
        """Count changed messages against the rate."""
        self._credit -= messages

    def pause(self) -> float:
        """Return the seconds until the next message may be changed."""
        if self._rate is None:
            return 0.0
        return max(TICK_SECONDS, (1.0 - self._credit) / self._rate)
