"""`VerifyMessage`: recomputes the hashes of one message and of the commits with its events."""

import msgspec
from blake3 import blake3

from postroom.application.mailbox.stored_snapshots import refuse_altered_records
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.message_records import read_message
from postroom.domain.commit import GENESIS, Commit, link
from postroom.domain.envelope.build import open_envelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.integrity import b3, has_intact_headers, hash_chain, payload_hash
from postroom.domain.message import MessageSent

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
        headers_match: whether the searchable headers equal those of the envelope.
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
