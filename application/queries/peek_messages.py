"""`PeekMessages`: the messages that a receive would deliver next, without receiving them."""

from collections.abc import Iterable

from postroom.application.erasure.protection import Protection
from postroom.application.mailbox.codec import is_intact
from postroom.application.mailbox.stored_snapshots import refuse_altered_records
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.time_travel import StateAt
from postroom.application.query_results import PeekedMessage
from postroom.domain.arguments import MAX_PAGE, check_int
from postroom.domain.envelope.build import open_envelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.commands import Receive, Sweep
from postroom.domain.mailbox.counts import TopicSummary, summarize_topics
from postroom.domain.mailbox.decide import decide, deliverable
from postroom.domain.mailbox.state import Mailbox, evolve
from postroom.domain.message import Message, MessageSent
from postroom.domain.names import check_topic, describe_choices, message_id
from postroom.domain.record import Record

UNBOUNDED_BYTES = 1 << 62


class PeekMessages:
    """A query for the next ready messages of a topic; appends nothing, and needs no ownership."""

    def __init__(
        self,
        state_at: StateAt,
        log: EventLogReader,
        protection: Protection | None = None,
        *,
        is_swept: bool = False,
    ) -> None:
        """Initialise with the source of the state, the log, and what decrypts messages.

        Arguments:
            is_swept: whether an owner applies the timers to the state; otherwise each call applies those due.
        """
        self._state_at = state_at
        self._log = log
        self._protection = protection
        self._is_swept = is_swept

    @refuse_altered_records
    def __call__(self, topic: str, *, limit: int = 10) -> list[PeekedMessage]:
        """Return up to `limit` ready messages, in the order in which a receive delivers them.

        Messages whose visibility has ended count as ready, although no owner has requeued them yet, and so do
        those of a paused topic.

        Raises: InvalidRequest when `limit` is not within 1 to 1,000, or for a malformed topic.
        """
        if not 1 <= check_int("limit", limit) <= MAX_PAGE:
            raise InvalidRequest(f"limit must be between 1 and {MAX_PAGE}; it was {limit}.")
        command = Receive((check_topic(topic),), limit, UNBOUNDED_BYTES)
        mailbox, now = self._state_at(None)
        swept = mailbox if self._is_swept else _swept(mailbox, now)
        messages = deliverable(command, swept, now, skip=())
        records = self._log.at_positions([message.position for message in messages])
        contents = self._contents(records.values())
        return [
            _describe(message, records[message.position], contents.get(message.stream))
            for message in messages
            if message.position in records
        ]

    def _contents(self, records: Iterable[Record]) -> dict[bytes, MessageSent]:
        """Return the messages that can be read, as they were sent, by stream."""
        intact = [each.event for each in records if is_intact(each) and isinstance(each.event, MessageSent)]
        if self._protection is None:
            return {each.stream: each for each in intact}
        results = self._protection.read_messages(intact)
        return {stream: each for stream, each in results.items() if isinstance(each, MessageSent)}


class WhyEmpty:
    """A query for the reason why a receive from a topic would deliver nothing."""

    def __init__(self, state_at: StateAt) -> None:
        self._state_at = state_at

    @refuse_altered_records
    def __call__(self, topic: str) -> str | None:
        """Return the reason as a sentence; None if a receive would change the mailbox.

        Raises: InvalidRequest for a malformed topic.
        """
        check_topic(topic)
        mailbox, now = self._state_at(None)
        if mailbox.needs_sweep(now) or mailbox.count_deliverable(topic, now, 1) > 0:
            return None
        return explain_empty(topic, summarize_topics(mailbox, now), mailbox.name)


def explain_empty(topic: str, topics: Iterable[TopicSummary], mailbox: str) -> str:
    """Return the reason why a topic has no messages to deliver.

    Arguments:
        topics: of the mailbox.
    """
    by_name = {each.topic: each for each in topics}
    if topic not in by_name:
        return f"Mailbox {mailbox} has no topic {topic}; {describe_choices(topic, by_name)}"
    if by_name[topic].paused:
        return f"Topic {topic} is paused; postroom topic resume {topic} delivers its messages again."
    return f"Topic {topic} has no ready messages."


def _swept(mailbox: Mailbox, now: int) -> Mailbox:
    """Return the state after the timers that are due, as an owner applies them before a receive."""
    while events := decide(Sweep(), mailbox, now):
        for event in events:
            evolve(mailbox, event)
    return mailbox


def _describe(message: Message, record: Record, readable: MessageSent | None) -> PeekedMessage:
    sent = record.event
    assert isinstance(sent, MessageSent)
    content = None if readable is None else open_envelope(readable.envelope)
    return PeekedMessage(
        message_id(sent.stream, sent.headers.message_id),
        message.topic,
        message.shard,
        message.attempt,
        rfc3339(message.sent_at) or "",
        {} if content is None else content.attrs,
        None if content is None else content.payload,
    )
