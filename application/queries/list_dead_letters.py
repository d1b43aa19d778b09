"""`ListDeadLetters`: list dead letters now or at a past moment."""

from collections.abc import Sequence

from postroom.application.mailbox.stored_snapshots import refuse_altered_records
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.time_travel import StateAt
from postroom.application.query_results import DeadLetter, Moment
from postroom.domain.arguments import MAX_PAGE, check_int, check_optional_text
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.mailbox.events import LogTruncated
from postroom.domain.message import Message, MessageSent
from postroom.domain.names import mailbox_stream, message_id


class ListDeadLetters:
    """A query for dead letters, oldest message first, in keyset pages."""

    def __init__(self, state_at: StateAt, log: EventLogReader) -> None:
        self._state_at = state_at
        self._log = log

    @refuse_altered_records
    def __call__(
        self,
        topic: str | None = None,
        *,
        reason: str | None = None,
        limit: int = 100,
        cursor: int = 0,
        at: Moment | None = None,
    ) -> list[DeadLetter]:
        """Return up to `limit` dead letters.

        Arguments:
            reason: only dead letters with this reason.
            cursor: `position` of the last dead letter of the previous page.
            at: moment at which to list dead letters (see `StateAt`); None is now.

        Raises: InvalidRequest when `limit` is not within 1 to 1,000.
        """
        check_optional_text("topic", topic)
        check_optional_text("reason", reason)
        check_int("cursor", cursor)
        if not 1 <= check_int("limit", limit) <= MAX_PAGE:
            raise InvalidRequest(f"limit must be between 1 and {MAX_PAGE}; it was {limit}.")
        mailbox, _ = self._state_at(at)
        dead = sorted(
            (
                message
                for each in mailbox.topics.values()
                if topic in (None, each.name)
                for message in each.dead.values()
                if message.position > cursor and reason in (None, message.reason)
            ),
            key=lambda message: message.position,
        )[:limit]
        return self.describe(mailbox.name, dead)

    def describe(self, mailbox: str, messages: Sequence[Message]) -> list[DeadLetter]:
        """Return dead letters of a mailbox with what the log says about them."""
        records = self._log.at_positions([message.position for message in messages])
        if len(records) < len(messages):
            raise self._removed()
        letters = []
        for message in messages:
            sent = records[message.position].event
            own_id = sent.headers.message_id if isinstance(sent, MessageSent) else None
            letters.append(
                DeadLetter(
                    mailbox,
                    message.topic,
                    message.shard,
                    message_id(message.stream, own_id),
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

    def _removed(self) -> NotFound:
        """Return the error with the first position from which all dead letters can be listed."""
        own = self._log.read_stream(mailbox_stream(self._log.mailbox))
        complete_from = max(
            (record.position for record in own if isinstance(record.event, LogTruncated)), default=0
        )
        return NotFound(
            f"The dead letters of mailbox {self._log.mailbox} can be listed from position {complete_from} "
            "on: retention removed some that were dead before."
        )
