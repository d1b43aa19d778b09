"""`FindSubject` and `CountEncrypted`: the messages of data subjects in a log."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from postroom.application.erasure.erase_subject import SubjectMessages
from postroom.application.erasure.message_cipher import read_field, read_pseudonym
from postroom.application.erasure.protection import MessageEncryption
from postroom.application.mailbox.stored_snapshots import fold_message, refuse_altered_records
from postroom.application.ports.event_log import EventLogReader
from postroom.application.ports.subject_keys import SubjectKeys
from postroom.application.queries.get_message import status_name
from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import MessageSent
from postroom.domain.subject import is_encrypted

CHUNK = 1_000


class SubjectInLog(NamedTuple):
    """Messages of a subject in a log.

    Arguments:
        encrypted: messages that are erased when the key is destroyed.
        plaintext: number of messages that were stored before their topic had a policy, and stay readable.
        topics: of the encrypted messages by stream.
        position: up to which the log was read.
    """

    encrypted: list[SubjectMessages]
    plaintext: int
    topics: Mapping[bytes, str]
    position: int


class FindSubject:
    """A query that reads a whole log, with its archive; needs no ownership."""

    def __init__(self, log: EventLogReader, now: Callable[[], int], protection: MessageEncryption) -> None:
        """Take the mailbox's log, its log time now in µs, and the policies."""
        self._log = log
        self._now = now
        self._protection = protection

    @refuse_altered_records
    def __call__(
        self, pseudonym: str, subject: str | None, earlier: SubjectInLog | None = None
    ) -> SubjectInLog:
        """Return the messages of a subject by topic and status.

        Arguments:
            subject: its name, to count messages in the clear; None counts none.
            earlier: result of an earlier call, from whose end the log is read.
        """
        streams = {} if earlier is None else dict(earlier.topics)
        position, plaintext = (0, 0) if earlier is None else (earlier.position, earlier.plaintext)
        for record in self._log.read(position):
            position, sent = record.position, record.event
            if isinstance(sent, MessageSent):
                if is_encrypted(sent.headers):
                    if read_pseudonym(sent) == pseudonym:
                        streams[sent.stream] = sent.topic
                elif subject is not None and self._names(sent, subject):
                    plaintext += 1
        statuses = Counter(self._statuses(streams))
        return SubjectInLog(
            [
                SubjectMessages(self._log.mailbox, topic, status, count)
                for (topic, status), count in sorted(statuses.items())
            ],
            plaintext,
            streams,
            position,
        )

    def _statuses(self, streams: Mapping[bytes, str]) -> Iterator[tuple[str, str]]:
        """Yield the topic and the status of each message."""
        now, every = self._now(), list(streams)
        for start in range(0, len(every), CHUNK):
            histories = self._log.read_streams(every[start : start + CHUNK])
            for stream, records in histories.items():
                message = fold_message(records)
                if message is not None:
                    yield streams[stream], status_name(message, now)

    def _names(self, sent: MessageSent, subject: str) -> bool:
        """Return whether a message in the clear has the subject where the policy of its topic expects it."""
        policy = self._protection.policy(sent.topic)
        if policy is None:
            return False
        try:
            return read_field(parse_envelope(sent.envelope), policy.subject) == subject.encode()
        except InvalidRequest:  # altered on disk
            return False


class CountEncrypted:
    """Count of the encrypted messages of any number of logs."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, sent: MessageSent) -> None:
        """Count a message if it is encrypted."""
        pseudonym = read_pseudonym(sent) if is_encrypted(sent.headers) else None
        if pseudonym is not None:
            self._counts[pseudonym] += 1

    @refuse_altered_records
    def read(self, log: EventLogReader) -> None:
        """Count the messages of a whole log, with its archive."""
        for record in log.read():
            if isinstance(record.event, MessageSent):
                self.add(record.event)

    def total(self, keys: SubjectKeys) -> "EncryptedMessages":
        """Return how many messages are encrypted, and of how many the key was destroyed.

        Raises: UnknownPseudonym when the key store is another one.
        """
        resolved = keys.resolve(self._counts)
        erased = sum(count for pseudonym, count in self._counts.items() if resolved[pseudonym] is None)
        return EncryptedMessages(self._counts.total(), erased)


class EncryptedMessages(NamedTuple):
    """Number of encrypted messages, and of those among them whose key was destroyed."""

    encrypted: int
    erased: int
