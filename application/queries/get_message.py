"""`GetMessage` and `VerifyMessage`: one message with its history and its hashes, from the log."""

from collections.abc import Callable, Container, Iterator, Sequence
from operator import attrgetter

import msgspec
from blake3 import blake3

from postroom.application.erasure.protection import ConsumerPart, MessageEncryption, Unreadable
from postroom.application.mailbox.codec import is_intact
from postroom.application.mailbox.stored_snapshots import fold_message, refuse_altered_records
from postroom.application.messages import MessageResult, rfc3339
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.redrive_lineage import RedriveLink, find_redrive
from postroom.application.query_results import HistoryEntry, MessageDetail, MessageOutcome
from postroom.domain.commit import GENESIS, Commit, link
from postroom.domain.envelope.build import open_envelope
from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.integrity import has_intact_headers, hash_chain, payload_hash
from postroom.domain.message import (
    DEAD,
    EXPIRED,
    READY,
    Message,
    MessageAcked,
    MessageDeadLettered,
    MessageEvent,
    MessageSent,
    Status,
)
from postroom.domain.message_decider import evolve
from postroom.domain.names import b3, message_id, message_stream, topic_streams
from postroom.domain.record import Event, Record

MAX_SAME_IDS = 1_000
"""Maximum number of messages with an id of their topic that are found."""


def read_message(
    log: EventLogReader, id_: str, covers: Callable[[str], bool] = lambda topic: True
) -> tuple[MessageSent, Sequence[Record]]:
    """Return the `MessageSent` of a message and all of its records, oldest first.

    Messages of several topics may have the same id, if senders are limited to topics. Then it is the one
    whose id is unique in the mailbox, or else the first that was sent.

    Arguments:
        covers: returns whether a topic is considered.

    Raises: NotFound if the log has no such message, or retention removed its `MessageSent`.
    """
    for stream in streams_with_id(log, id_):
        records = log.read_stream(stream)
        sent = records[0].event if records else None
        if isinstance(sent, MessageSent) and covers(sent.topic):
            return sent, records
    raise NotFound(
        f"Mailbox {log.mailbox} has no message {id_}; check the id, and the mailbox it was sent to."
    )


def streams_with_id(log: EventLogReader, id_: str) -> Iterator[bytes]:
    """Yield the stream of an id that is unique in the mailbox, then the streams of topics with that id."""
    stream = message_stream(log.mailbox, id_)
    yield stream
    others = log.replay_first(log.streams_between(*topic_streams(stream), MAX_SAME_IDS))
    same = [each for each in others if isinstance(each, MessageSent) and each.headers.message_id == id_]
    yield from (each.stream for each in sorted(same, key=attrgetter("at")))


class GetMessage:
    """A query for one message by its id; needs no ownership and no read model."""

    def __init__(
        self, log: EventLogReader, now: Callable[[], int], protection: MessageEncryption | None = None
    ) -> None:
        """Take the mailbox's log, its log time now in µs, and what decrypts messages."""
        self._log = log
        self._now = now
        self._protection = protection

    @refuse_altered_records
    def __call__(self, id_: str, covers: Callable[[str], bool] = lambda topic: True) -> MessageDetail:
        """Return the message with its history; `intact` says whether headers and payload match the envelope.

        Arguments:
            covers: returns whether a topic is considered; see `read_message`.

        Raises: NotFound when the log has no such message, or retention removed it; Unavailable when it is
            encrypted and the key store can't be used.
        """
        sent, records = self._read(id_, covers)
        message = fold_message(records)
        assert message is not None
        is_whole = is_intact(records[0]) and has_intact_headers(sent)
        content = self._protection.read_message(sent) if self._protection and is_whole else sent
        result = self._read_result(sent, records[-1].event)
        traceback = self._read_traceback(sent, [record.event for record in records])
        return MessageDetail(
            self._log.mailbox,
            message_id(sent.stream, sent.headers.message_id),
            message.topic,
            message.shard,
            status_name(message, self._now()),
            message.attempt,
            message.redriven,
            message.reason,
            message.last_error,
            is_whole and "altered" not in (content, result),
            message_item(content if isinstance(content, MessageSent) else sent),
            [_entry(record, find_redrive(self._log, record)) for record in records],
            content == "erased",
            message_id(sent.stream),
            result if isinstance(result, MessageResult) else None,
            self._original(sent) if is_whole and sent.copy_of is not None else sent.copy_of,
            traceback,
        )

    def _original(self, sent: MessageSent) -> str | None:
        """Return the id that finds the original of a copy: its stream id if other topics may have its id."""
        stream = message_stream(self._log.mailbox, sent.copy_of, open_envelope(sent.envelope).topic)
        return message_id(stream) if self._log.read_stream(stream) else sent.copy_of

    @refuse_altered_records
    def find(
        self, id_: str, covers: Callable[[str], bool], ends: Container[bytes] = ()
    ) -> tuple[MessageSent, MessageOutcome]:
        """Return a message as it is stored, and its outcome.

        Arguments:
            ends: streams of messages whose content the caller does not need.

        Raises: as a call does.
        """
        sent, records = self._read(id_, covers, ends)
        message = fold_message(records)
        assert message is not None
        return sent, self._outcome(sent, message, records[-1].event)

    @refuse_altered_records
    def end(self, sent: MessageSent, end: MessageEvent) -> MessageOutcome:
        """Return the outcome of a message from the event that ended it; raises Unavailable as a call does."""
        return self._outcome(sent, evolve(evolve(None, sent), end), end)

    def _read(
        self, id_: str, covers: Callable[[str], bool], ends: Container[bytes] = ()
    ) -> tuple[MessageSent, Sequence[Record]]:
        sent, records = read_message(self._log, id_, covers)
        if not records[0].envelope_hash and sent.stream not in ends:
            raise NotFound(
                f"Message {id_} of mailbox {self._log.mailbox} is settled; in amnesia mode the content of "
                "settled messages is forgotten, and so are results."
            )
        return sent, records

    def _outcome(self, sent: MessageSent, message: Message, last: Event) -> MessageOutcome:
        result, is_lost = self._read_result(sent, last), message.status in (DEAD, EXPIRED)
        return MessageOutcome(
            message_id(sent.stream, sent.headers.message_id),
            message.topic,
            status_name(message, self._now()),
            message.reason if is_lost else None,
            message.last_error if is_lost else None,
            result if isinstance(result, MessageResult) else None,
            result == "erased",
        )

    def _read_result(self, sent: MessageSent, last: Event) -> MessageResult | Unreadable | None:
        """Return the result in the latest event of a message, if it is an ack that has one."""
        if not isinstance(last, MessageAcked) or last.result is None:
            return None
        payload = self._read_content(sent, "result", last.result)
        return MessageResult(payload, last.result_type) if isinstance(payload, bytes) else payload

    def _read_traceback(self, sent: MessageSent, events: Sequence[Event]) -> str | None:
        """Return the traceback of the latest dead-lettering that has one, unless it can't be decrypted."""
        dead = [each.traceback for each in events if isinstance(each, MessageDeadLettered) and each.traceback]
        content = self._read_content(sent, "traceback", dead[-1]) if dead else None
        return content.decode(errors="replace") if isinstance(content, bytes) else None

    def _read_content(self, sent: MessageSent, part: ConsumerPart, content: bytes) -> bytes | Unreadable:
        return self._protection.read_content(sent, part, content) if self._protection else content


def status_name(message: Message, now: int) -> str:
    """Return the name of a message's status; a ready message is `delayed` until its `due`."""
    if message.status == READY and message.due > now:
        return "delayed"
    return Status(message.status).name.lower()


def message_item(sent: MessageSent) -> MailboxItem:
    """Return the headers and the envelope of a message."""
    headers = msgspec.structs.asdict(sent.headers)
    headers["custom_headers"] = headers["custom_headers"] or {}
    headers["message_id"] = message_id(sent.stream, sent.headers.message_id)
    return MailboxItem(topic=sent.topic, envelope_blob=sent.envelope, **headers)


NEVER = ("expires_at", 0)
"""The field of a message that doesn't expire, as in an archive."""
_HIDDEN = {
    "stream",
    "version",
    "at",
    "envelope",
    "headers",
    "payload_hash",
    "hash_chain",
    "result",
    "traceback",
}


def _entry(record: Record, redrive: RedriveLink | None) -> HistoryEntry:
    facts = {
        name: value
        for name, value in msgspec.structs.asdict(record.event).items()
        if name not in _HIDDEN and value is not None and (name, value) != NEVER
    }
    if redrive is not None:
        links = {"redrive_job": redrive.job, "copy": redrive.copy, "original": redrive.original}
        facts |= {name: id_ for name, id_ in links.items() if id_ is not None}
    for name in ("due", "expires_at"):
        if name in facts:
            facts[name] = rfc3339(facts[name])
    return HistoryEntry(record.position, rfc3339(record.at) or "", record.type, record.epoch, facts)


MAX_COMMITS = 50
"""Maximum number of commits to verify, starting with the message's first event."""


class HashComparison(msgspec.Struct, frozen=True):
    """A stored hash and the recomputed one, which is None if it can't be computed."""

    name: str
    stored: str
    computed: str | None

    @property
    def matches(self) -> bool:
        """Return whether both are equal."""
        return self.stored == self.computed


class CommitVerification(msgspec.Struct, frozen=True):
    """A commit with events of a message.

    Arguments:
        first, last: positions of the commit.
        chain: chain hash of the commit.
        previous: chain hash of the previous commit; None if retention removed that commit.
        matches: whether the commit matches its hash; None if `previous` is None.
    """

    first: int
    last: int
    at: str
    chain: str
    previous: str | None
    matches: bool | None


class MessageVerification(msgspec.Struct, frozen=True):
    """The verification of a message.

    Arguments:
        hashes: hashes of the envelope, the payload, and the headers with the payload (svc-mailbox I-7, I-12).
        headers_match: whether the searchable headers equal the envelope's.
        commits: commits of the message's events, oldest first.
        omitted: number of events whose commits were not verified.
    """

    hashes: tuple[HashComparison, ...]
    headers_match: bool
    commits: tuple[CommitVerification, ...]
    omitted: int

    @property
    def is_intact(self) -> bool:
        """Return whether no mismatch was detected."""
        return (
            self.headers_match
            and all(each.matches for each in self.hashes)
            and all(each.matches is not False for each in self.commits)
        )


class VerifyMessage:
    """A query that verifies one message; needs no ownership and no read model."""

    def __init__(self, log: EventLogReader) -> None:
        self._log = log

    @refuse_altered_records
    def __call__(self, id_: str) -> MessageVerification:
        """Verify a message.

        Raises: NotFound if the log has no such message, or retention removed it; BrokenLog if a commit with
            its events can't be decoded.
        """
        log = self._log
        sent, records = read_message(log, id_)
        commits, events = [], 0
        for commit in log.commits_of([each.position for each in records[:MAX_COMMITS]], envelopes=False):
            commits.append(self._verify(commit))
            events += sum(commit.first <= each.position <= commit.last for each in records)
        return MessageVerification(
            _hashes(sent, records[0].envelope_hash),
            has_intact_headers(sent),
            tuple(commits),
            len(records) - events,
        )

    def _verify(self, commit: Commit) -> CommitVerification:
        previous = self._chain_before(commit.first)
        matches = None
        if previous is not None:
            matches = link(previous, *commit[:4], commit.events) == commit.chain
        return CommitVerification(
            commit.first,
            commit.last,
            rfc3339(commit.at) or "",
            b3(commit.chain),
            None if previous is None else b3(previous),
            matches,
        )

    def _chain_before(self, first: int) -> bytes | None:
        if first == 1:
            return GENESIS
        before = self._log.commits_of([first - 1], envelopes=False)
        return before[0].chain if before else None


def _hashes(sent: MessageSent, envelope_hash: bytes) -> tuple[HashComparison, ...]:
    payload_digest = chain = None
    try:
        envelope = open_envelope(sent.envelope)
        payload_digest = payload_hash(envelope.payload)
        chain = hash_chain(
            sent.topic, envelope.published_at_us, sent.idem_key, payload_digest, envelope.extensions
        )
    except InvalidRequest:  # the envelope was altered and can't be parsed
        pass
    return (
        HashComparison("envelope", b3(envelope_hash), b3(blake3(sent.envelope).digest())),
        HashComparison("payload_hash", b3(sent.payload_hash), _format_digest(payload_digest)),
        HashComparison("hash_chain", b3(sent.hash_chain), _format_digest(chain)),
    )


def _format_digest(digest: bytes | None) -> str | None:
    return None if digest is None else b3(digest)
