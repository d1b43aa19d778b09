"""`GetBacklog` and `ListDeadLetters`: the queues as they stand now, or stood at any moment of the log.

Nothing waits for a projection and nobody needs to own the mailbox: a snapshot and the log behind it are
enough. For the present, a process that owns the mailbox passes its engine's state instead of folding.
"""

from collections.abc import Sequence

import msgspec

from postroom.application.codec import to_event
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLog
from postroom.application.queries.at import Moment, StateAt
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.mailbox.events import LogTruncated
from postroom.domain.mailbox.state import TopicCount, count
from postroom.domain.message import Message, MessageSent
from postroom.domain.names import mailbox_stream, message_id

MAX_LIMIT = 1_000


class Backlog(msgspec.Struct, frozen=True):
    """Unsettled messages of one mailbox by topic and shard, at log position `position` (SDS-047 QRY-050).

    Arguments:
        at: when the record at `position` was written.
        as_of: log time that tells ready messages from delayed ones.
    """

    mailbox: str
    position: int
    epoch: int
    owner: str
    at: str
    archived: int
    as_of: str
    shards: list[TopicCount]

    @property
    def ready(self) -> int:
        """Count the messages that may be delivered now."""
        return sum(shard.ready for shard in self.shards)


class GetBacklog:
    """Count what waits, is in flight, is delayed or dead, by topic and shard."""

    def __init__(self, state_at: StateAt) -> None:
        self._state_at = state_at

    def __call__(self, topic: str | None = None, *, at: Moment | None = None) -> Backlog:
        """Return the backlog of one topic or of all, now or as it was at a moment (see `StateAt`)."""
        mailbox, as_of = self._state_at(at)
        shards = [row for row in count(mailbox, as_of) if topic in (None, row.topic)]
        return Backlog(
            mailbox.name,
            mailbox.position,
            mailbox.epoch,
            mailbox.owner,
            rfc3339(mailbox.at or None) or "",
            mailbox.archived,
            rfc3339(as_of) or "",
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

    def __init__(self, state_at: StateAt, log: EventLog) -> None:
        self._state_at = state_at
        self._log = log

    def __call__(
        self,
        topic: str | None = None,
        *,
        reason: str | None = None,
        limit: int = 100,
        after: int = 0,
        at: Moment | None = None,
    ) -> list[DeadLetter]:
        """Return up to `limit` dead letters.

        Arguments:
            reason: only those that died of this.
            after: `position` of the last dead letter of the page before.
            at: those that were dead at a moment (see `StateAt`); None means now.

        Raises: InvalidRequest when `limit` is not within 1 to 1,000.
        """
        if not 1 <= limit <= MAX_LIMIT:
            raise InvalidRequest(f"limit must be between 1 and {MAX_LIMIT}; it was {limit}.")
        mailbox, _ = self._state_at(at)
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
        if len(records) < len(messages):
            raise self._forgotten()
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

    def _forgotten(self) -> NotFound:
        """Say since when all dead letters are still known: since what retention removed had left."""
        own = self._log.history(mailbox_stream(self._log.mailbox))
        known = max(
            (record.position for record in own if isinstance(to_event(record), LogTruncated)), default=0
        )
        return NotFound(
            f"The dead letters of mailbox {self._log.mailbox} are known from position {known} on: some that "
            "were dead before have left it since, and retention removed them."
        )
