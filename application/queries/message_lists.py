"""Lists of messages: dead letters, waiting messages, and search in read models or memory."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from postroom.application.erasure.erase_subject import as_stored
from postroom.application.erasure.protection import MessageEncryption
from postroom.application.mailbox.codec import is_intact
from postroom.application.mailbox.stored_snapshots import refuse_altered_records
from postroom.application.messages import rfc3339
from postroom.application.page import Page, read_position
from postroom.application.ports.dead_letters import DeadLetterGroupFilter, DeadLetterGroupPage
from postroom.application.ports.event_log import EventLogReader
from postroom.application.ports.read_models import SHOWN_PARKED, ProjectionStatus, ReadModels
from postroom.application.queries.get_message import message_item
from postroom.application.queries.mailbox_past import StateAt
from postroom.application.queries.measure_mailbox import report_subscription
from postroom.application.query_results import DeadLetter, Moment, PeekedMessage
from postroom.application.reports import SubscriptionReport
from postroom.domain.arguments import MAX_PAGE, check_int, check_optional_text, check_type
from postroom.domain.envelope.build import open_envelope
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.mailbox.commands import Receive, Sweep
from postroom.domain.mailbox.counts import TopicSummary, summarize_topics
from postroom.domain.mailbox.decide import decide, deliverable
from postroom.domain.mailbox.events import LogTruncated
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import READY, Message, MessageSent, Status
from postroom.domain.names import check_topic, describe_choices, mailbox_stream, message_id
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import Record
from postroom.domain.search import Cursor, EventFilter, FoundMessage, Order, TableStats


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
        held_keys: bool = False,
        limit: int = 100,
        cursor: str | None = None,
        at: Moment | None = None,
    ) -> Page[DeadLetter]:
        """Return a page of dead letters.

        Arguments:
            reason: only dead letters with this reason.
            held_keys: only dead letters that hold their ordered key.
            limit: maximum number of dead letters, 1 to 1,000.
            cursor: `next_cursor` of the previous page.
            at: moment at which to list dead letters (see `StateAt`); None is now.

        Raises: InvalidRequest for a limit out of bounds or an invalid cursor.
        """
        check_optional_text("topic", topic)
        check_optional_text("reason", reason)
        check_type("held_keys", held_keys, bool)
        check_int("limit", limit, 1, MAX_PAGE)
        after = read_position(cursor) or 0
        mailbox, _ = self._state_at(at)
        dead = sorted(
            (
                message
                for each in mailbox.topics.values()
                if topic in (None, each.name)
                for message in each.dead.values()
                if message.position > after
                and reason in (None, message.reason)
                and not (held_keys and each.held_key(message) is None)
            ),
            key=lambda message: message.position,
        )
        page = dead[:limit]
        more = str(page[-1].position) if len(dead) > limit else None
        held = [mailbox.topics[message.topic].held_key(message) for message in page]
        letters = self.describe(mailbox.name, page)
        shown = (
            letter if each is None else msgspec.structs.replace(letter, held_key=each[0], waiting=each[1])
            for letter, each in zip(letters, held, strict=True)
        )
        return Page(tuple(shown), more)

    def describe(self, mailbox: str, messages: Sequence[Message]) -> list[DeadLetter]:
        """Return dead letters of a mailbox with their facts from the log."""
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


class GetTableStats:
    """A query for the totals of all messages."""

    def __init__(self, read_models: ReadModels) -> None:
        """Take the read models of a store."""
        self._read_models = read_models

    def __call__(self) -> TableStats:
        """Return the totals.

        Raises: NotFound before the first rebuild, Unavailable when the read models can't be read.
        """
        return self._read_models.stats()


class GetProjectionStatus:
    """A query for the status of the read models."""

    def __init__(self, read_models: ReadModels) -> None:
        """Take the read models of a store."""
        self._read_models = read_models

    def __call__(self, shown_parked: int = SHOWN_PARKED) -> ProjectionStatus:
        """Return the status; before the first rebuild it has no versions.

        Arguments:
            shown_parked: number of parked records to list.

        Raises: Unavailable when the read models can't be read.
        """
        return self._read_models.status(shown_parked)


class GroupDeadLetters:
    """A query for groups of the dead letters in the read models."""

    def __init__(self, read_models: ReadModels) -> None:
        """Take the read models of a store."""
        self._read_models = read_models

    def __call__(self, filter_: DeadLetterGroupFilter) -> DeadLetterGroupPage:
        """Return one page of groups; see `DeadLetters.dead_letter_groups`.

        Raises: NotFound before the first rebuild, Unavailable when the read models can't be read.
        """
        return self._read_models.dead_letter_groups(filter_)


class SearchMessages:
    """A search in the read models."""

    def __init__(self, read_models: ReadModels, protection: MessageEncryption | None = None) -> None:
        """Take the read models of a store, and what finds encrypted messages by their subjects."""
        self._read_models = read_models
        self._protection = protection

    def __call__(self, filter_: EventFilter) -> Page[FoundMessage]:
        """Return one page of the messages that match.

        Raises: NotFound before the first rebuild, Unavailable when the read models or the keys can't be read.
        """
        stored = filter_ if self._protection is None else as_stored(filter_, self._protection)
        return self._read_models.search(stored)


UNBOUNDED_BYTES = 1 << 62


class PeekMessages:
    """A query for the next ready messages of a topic; appends nothing, and needs no ownership."""

    def __init__(
        self,
        state_at: StateAt,
        log: EventLogReader,
        protection: MessageEncryption | None = None,
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
        messages of a paused topic.

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
        if topic not in mailbox.paused_topics and _has_ready(mailbox, topic, now):
            if mailbox.topics[topic].allowed(now):
                return (
                    f"The ready messages of topic {topic} wait for others of their keys, by its policy "
                    "(ordered_keys, dead_letters_hold_keys, max_in_flight_per_key, rate_per_key)."
                )
            return (
                f"Topic {topic} is at a limit of its policy (max_in_flight, rate); its messages wait until "
                "others are settled, or until the rate allows the next one."
            )
        topics, policy = summarize_topics(mailbox, now), mailbox.policy(topic)
        subscriptions = [report_subscription(each, mailbox) for each in mailbox.subscriptions.values()]
        return explain_empty(topic, topics, mailbox.name, policy, subscriptions)


def explain_empty(
    topic: str,
    topics: Iterable[TopicSummary],
    mailbox: str,
    policy: TopicPolicy,
    subscriptions: Iterable[SubscriptionReport],
) -> str:
    """Return the reason why a topic has no messages to deliver.

    Arguments:
        topics, subscriptions: of the mailbox.
        policy: of the topic.
    """
    by_name = {each.topic: each for each in topics}
    queues = {each.name: each for each in subscriptions}
    if policy.subscriptions_only and topic not in queues:
        names = ", ".join(name for name, each in sorted(queues.items()) if each.filter.covers_topic(topic))
        advice = f"receive from {names}." if names else f"postroom subscription set NAME {topic} creates one."
        return (
            f"Messages of topic {topic} go to subscriptions only (subscriptions_only of its policy); {advice}"
        )
    if topic not in by_name:
        return f"Mailbox {mailbox} has no topic {topic}; {describe_choices(topic, by_name)}"
    if by_name[topic].paused:
        return f"Topic {topic} is paused; postroom topic resume {topic} delivers its messages again."
    if topic in queues and queues[topic].status != "live":
        doing = f"has yet to read {queues[topic].behind:,} positions of the log"
        if queues[topic].status == "clearing":
            doing = "was rewound and is being emptied"
        return f"Subscription {topic} {doing}; its owner goes on copying. Receive with --wait."
    return f"Topic {topic} has no ready messages."


def _has_ready(mailbox: Mailbox, topic: str, now: int) -> bool:
    return any(
        message.topic == topic and message.status == READY and message.due <= now < message.expires_at
        for message in mailbox.messages.values()
    )


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


class SearchUnsettled:
    """A search in memory by RFC-037's filter; it reads every message whose state does not rule it out."""

    def __init__(self, log: EventLogReader) -> None:
        """Take the mailbox's log."""
        self._log = log

    def __call__(self, filter_: EventFilter, messages: Sequence[Message]) -> Page[FoundMessage]:
        """Return a page of the messages that match.

        Arguments:
            messages: the unsettled messages; those that settle meanwhile are left out.
        """
        states = {each.position: each for each in messages}
        records = self._log.at_positions(list(states))
        newest_first = filter_.order == Order.NEWEST_FIRST
        places = sorted(
            (
                (sent.headers.timestamp, position)
                for position, record in records.items()
                if isinstance(sent := record.event, MessageSent) and record.envelope_hash
            ),
            reverse=newest_first,
        )
        if filter_.after is not None:
            last = (filter_.after.timestamp, filter_.after.id)
            places = [each for each in places if (each < last if newest_first else each > last)]

        def matches() -> Iterator[FoundMessage]:
            for _, position in places:
                sent, state = records[position].event, states[position]
                if isinstance(sent, MessageSent):
                    message = describe_message(self._log.mailbox, sent, state)
                    if filter_.matches(message):
                        yield message

        page = list(islice(matches(), filter_.offset, filter_.offset + filter_.limit + 1))
        items = tuple(page[: filter_.limit])
        is_last = len(page) == len(items)
        return Page(items, None if is_last else Cursor(items[-1].timestamp, items[-1].position).encode())


def describe_message(mailbox: str, sent: MessageSent, state: Message) -> FoundMessage:
    """Return a message as searches find it."""
    return FoundMessage(
        **msgspec.structs.asdict(message_item(sent)),
        mailbox=mailbox,
        position=state.position,
        status=Status(state.status),
        attempts=state.attempt,
        shard=state.shard,
    )
