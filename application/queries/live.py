"""`GetBacklog` and `ListDeadLetters`: the queues as they stand now, folded from the log itself.

Nothing waits for a projection and nobody needs to own the mailbox: the newest snapshot and the tail of the
log are enough. A process that owns the mailbox passes its engine's state instead of folding.
"""

from collections.abc import Callable, Sequence

import msgspec

from postroom.application.codec import to_event
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLog
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.state import Mailbox, TopicCount, count
from postroom.domain.message import Message, MessageSent
from postroom.domain.names import message_id

MAX_LIMIT = 1_000

State = Callable[[], Mailbox]
"""Where the mailbox's state comes from: an engine's memory, or a fold of the log."""


class Backlog(msgspec.Struct, frozen=True):
    """Unsettled messages of one mailbox by topic and shard, at log position `position` (SDS-047 QRY-050)."""

    mailbox: str
    position: int
    epoch: int
    owner: str
    at: str
    archived: int
    shards: list[TopicCount]

    @property
    def ready(self) -> int:
        """Count the messages that may be delivered now."""
        return sum(shard.ready for shard in self.shards)


class GetBacklog:
    """Count what waits, is in flight, is delayed or dead, by topic and shard."""

    def __init__(self, state: State, now: Callable[[], int]) -> None:
        """Take the source of the mailbox's state, and of the log time in µs."""
        self._state = state
        self._now = now

    def __call__(self, topic: str | None = None) -> Backlog:
        """Return the backlog, of one topic or of all."""
        mailbox = self._state()
        shards = [row for row in count(mailbox, self._now()) if topic in (None, row.topic)]
        return Backlog(
            mailbox.name,
            mailbox.position,
            mailbox.epoch,
            mailbox.owner,
            rfc3339(mailbox.at) or "",
            mailbox.archived,
            shards,
        )


class DeadLetter(msgspec.Struct, frozen=True):
    """A dead letter with `{reason, attempt, last_error}` (svc-mailbox I-4) and its lineage."""

    mailbox: str
    topic: str
    shard: int
    message_id: str
    reason: str
    attempt: int
    last_error: str | None
    first_seen: str
    last_seen: str
    redriven: int
    position: int


class ListDeadLetters:
    """List dead letters, oldest message first, in keyset pages."""

    def __init__(self, state: State, log: EventLog) -> None:
        self._state = state
        self._log = log

    def __call__(
        self, topic: str | None = None, *, reason: str | None = None, limit: int = 100, after: int = 0
    ) -> list[DeadLetter]:
        """Return up to `limit` dead letters.

        Arguments:
            reason: only those that died of this.
            after: `position` of the last dead letter of the page before.

        Raises: InvalidRequest when `limit` is not within 1 to 1,000.
        """
        if not 1 <= limit <= MAX_LIMIT:
            raise InvalidRequest(f"limit must be between 1 and {MAX_LIMIT}; it was {limit}.")
        mailbox = self._state()
        found = sorted(
            (
                message
                for each in mailbox.topics.values()
                if topic in (None, each.name)
                for message in each.dead.values()
                if message.position > after and reason in (None, message.reason)
            ),
            key=lambda message: message.position,
        )[:limit]
        return self._described(mailbox.name, found)

    def _described(self, mailbox: str, messages: Sequence[Message]) -> list[DeadLetter]:
        records = self._log.at_positions([message.position for message in messages])
        letters = []
        for message in messages:
            sent = to_event(records[message.position])
            given = sent.headers.message_id if isinstance(sent, MessageSent) else None
            letters.append(
                DeadLetter(
                    mailbox,
                    message.topic,
                    message.shard,
                    message_id(message.stream, given),
                    message.reason or "",
                    message.attempt,
                    message.last_error,
                    rfc3339(message.sent_at) or "",
                    rfc3339(message.changed_at) or "",
                    message.redriven,
                    message.position,
                )
            )
        return letters
