"""`VerifyMessage`: the hashes of one message and of the commits with its events, computed again."""

import msgspec
from blake3 import blake3

from postroom.application.mailbox.fold import refuse_altered_records
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.commit import GENESIS, Commit, link
from postroom.domain.envelope.build import open_envelope
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.integrity import b3, has_intact_headers, hash_chain, payload_hash
from postroom.domain.message import MessageSent
from postroom.domain.names import message_stream

MAX_COMMITS = 50
"""Number of commits that are verified, from the first event of the message on."""


class HashComparison(msgspec.Struct, frozen=True):
    """A hash as it is stored, and as it was computed again; None where that is impossible."""

    name: str
    stored: str
    computed: str | None

    @property
    def matches(self) -> bool:
        """Return whether both are the same."""
        return self.stored == self.computed


class CommitVerification(msgspec.Struct, frozen=True):
    """The commit of some of a message's events.

    Arguments:
        first, last: its positions.
        chain: its chain hash.
        previous: that of the commit before; None when retention removed that commit.
        matches: whether the commit matches its hash; None when that is unknown.
    """

    first: int
    last: int
    at: str
    chain: str
    previous: str | None
    matches: bool | None


class MessageVerification(msgspec.Struct, frozen=True):
    """Whether a message is as it was sent.

    Arguments:
        hashes: of envelope, payload, and headers with payload (svc-mailbox I-7, I-12).
        headers_match: whether its searchable headers are those of its envelope.
        commits: of its events, the oldest first.
        omitted: number of its events whose commits were not verified.
    """

    hashes: tuple[HashComparison, ...]
    headers_match: bool
    commits: tuple[CommitVerification, ...]
    omitted: int

    @property
    def is_intact(self) -> bool:
        """Return whether nothing was altered, as far as that is known."""
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
        """Return what was verified of a message.

        Raises: NotFound when the log has no such message, or retention removed it; BrokenLog when a commit
            with its events can't be decoded.
        """
        log = self._log
        records = log.read_stream(message_stream(log.mailbox, id_))
        sent = records[0].event if records else None
        if not isinstance(sent, MessageSent):
            raise NotFound(
                f"Mailbox {log.mailbox} has no message {id_}; check the id, and the mailbox it was sent to."
            )
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
    except InvalidRequest:  # it was altered so that it can't be read
        pass
    return (
        HashComparison("envelope", b3(envelope_hash), b3(blake3(sent.envelope).digest())),
        HashComparison("payload_hash", b3(sent.payload_hash), _shown(payload_digest)),
        HashComparison("hash_chain", b3(sent.hash_chain), _shown(chain)),
    )


def _shown(digest: bytes | None) -> str | None:
    return None if digest is None else b3(digest)
