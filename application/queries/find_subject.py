"""`FindSubject` and `CountEncrypted`: the messages of data subjects in a log."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from postroom.application.erasure.encryption import is_encrypted, read_pseudonym
from postroom.application.erasure.policy import read_field
from postroom.application.erasure.protection import Protection
from postroom.application.erasure.records import SubjectMessages
from postroom.application.mailbox.fold import fold_message, refuse_altered_records
from postroom.application.ports.event_log import EventLogReader
from postroom.application.ports.subject_keys import SubjectKeys
from postroom.application.queries.get_message import status_name
from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import MessageSent

CHUNK = 1_000


class SubjectInLog(NamedTuple):
    """Messages of a subject in a log.

    Arguments:
        encrypted: those that are erased with the key.
        plaintext: number of those that were stored before their topic had a policy, and stay readable.
    """

    encrypted: list[SubjectMessages]
    plaintext: int


class FindSubject:
    """A query that reads a whole log, with its archive; needs no ownership."""

    def __init__(self, log: EventLogReader, now: Callable[[], int], protection: Protection) -> None:
        """Take the mailbox's log, its log time now in µs, and the policies."""
        self._log = log
        self._now = now
        self._protection = protection

    @refuse_altered_records
    def __call__(self, pseudonym: str, subject: str | None) -> SubjectInLog:
        """Return the messages of a subject by topic and status.

        Arguments:
            subject: its name, to count messages in the clear; None counts none.
        """
        streams: dict[bytes, str] = {}
        plaintext = 0
        for record in self._log.read():
            sent = record.event
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
    """A query that counts the encrypted messages of a whole log, with its archive."""

    def __init__(self, log: EventLogReader, keys: SubjectKeys) -> None:
        self._log = log
        self._keys = keys

    @refuse_altered_records
    def __call__(self) -> "EncryptedMessages":
        """Return how many messages are encrypted, and of how many the key was destroyed.

        Raises: UnknownPseudonym when the key store is another one.
        """
        counts: Counter[str] = Counter()
        for record in self._log.read():
            if isinstance(record.event, MessageSent) and is_encrypted(record.event.headers):
                pseudonym = read_pseudonym(record.event)
                if pseudonym is not None:
                    counts[pseudonym] += 1
        keys = self._keys.resolve(counts)
        return EncryptedMessages(
            counts.total(), sum(count for each, count in counts.items() if keys[each] is None)
        )


class EncryptedMessages(NamedTuple):
    """Number of encrypted messages, and of those among them whose key was destroyed."""

    encrypted: int
    erased: int
