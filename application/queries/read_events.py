"""`ReadEvents`: the events of a log in the order of their positions, with topic and id of their messages."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from postroom.application.mailbox.codec import to_records
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.get_message import NEVER
from postroom.application.queries.mailbox_past import MailboxPast, read_mailbox_past
from postroom.domain.commit import Commit
from postroom.domain.errors import Difference
from postroom.domain.mailbox.events import MailboxSettingsChanged, TopicPolicySet
from postroom.domain.message import Headers, MessageAcked, MessageExpired, MessageSent
from postroom.domain.names import may_have_id, message_id, message_stream
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import Event, Record
from postroom.domain.schedule import ScheduleSpec
from postroom.domain.search import topic_matches
from postroom.domain.settings import MailboxSettings, compare_settings
from postroom.domain.subscription import SubscriptionFilter

POSITIONS_PER_STEP = 1_000
"""Positions of the first step backwards from the end of the log; each step is twice the one before."""
_TIMES = ("at", "due", "expires_at", "tick")


class EventFilter(NamedTuple):
    """Criteria that an event must all meet; an empty filter matches every event.

    Arguments:
        topic: a topic or glob, of the event or of its message.
        events: names of types.
        message_id: of the message that the event is about.
    """

    topic: str | None = None
    events: frozenset[str] = frozenset()
    message_id: str | None = None


EVERY_EVENT = EventFilter()


class LoggedEvent(NamedTuple):
    """An event, with topic and id of its message; both are None for other events without a topic.

    Arguments:
        changes: settings of the mailbox that the event changed, with the values before and after.
    """

    record: Record
    topic: str | None
    message_id: str | None
    changes: tuple[Difference, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return the fields of the event without its envelope, as JSON values by name."""
        record, event = self.record, self.record.event
        names = [name for name in event.__struct_fields__ if name not in _OMITTED]
        fields = ((name, getattr(event, name)) for name in names)
        values = ((name, _value(name, value)) for name, value in fields if (name, value) != NEVER)
        changes = [{"name": name, "current": before, "new": after} for name, before, after in self.changes]
        return {
            "position": record.position,
            "at": rfc3339(record.at),
            "event": record.type,
            "topic": self.topic,
            "message_id": self.message_id,
            "version": record.version,
            "epoch": record.epoch,
            **{_NAMES.get(name, name): value for name, value in values if value is not None},
            **({"changes": changes} if changes else {}),
        }


_NAMES = {"position": "after"}
"""Names of fields that the record has, too, in its place: the position after which a subscription gets
copies."""
_OMITTED = {*Event.__struct_fields__, "topic", "epoch", "envelope", "result", "traceback"}


class ReadEvents:
    """A query for the events of a log; envelopes are not read.

    Arguments:
        lookups: number of messages whose first event was read because an event names no topic.
    """

    def __init__(self, log: EventLogReader) -> None:
        self.lookups = 0
        self._log = log
        self._sent: dict[bytes, MessageSent] = {}
        self._past: MailboxPast | None = None

    def __call__(
        self, criteria: EventFilter = EVERY_EVENT, after: int = 0, through: int | None = None
    ) -> Iterator[LoggedEvent]:
        """Yield the events that match, starting after position `after`.

        Arguments:
            through: last position; None for the end of the log.

        Raises: BrokenLog when a commit can't be decoded.
        """
        id_ = criteria.message_id
        # The streams of an id that several topics have begin alike; see `may_have_id`.
        start = b"" if id_ is None else message_stream(self._log.mailbox, id_)[:8]
        for commit in self._log.commits(after, envelopes=False):
            if through is not None and commit.first > through:
                return
            if start in commit.events:
                yield from (
                    each
                    for each in self._describe(commit, criteria, after, through)
                    if criteria.topic is None
                    or (each.topic is not None and topic_matches(criteria.topic, each.topic))
                )

    def last(self, limit: int, criteria: EventFilter = EVERY_EVENT) -> list[LoggedEvent]:
        """Return the last `limit` events that match, in the order of their positions."""
        head, first = self._log.head(), self._log.first_position()
        events: deque[LoggedEvent] = deque()
        end, step = (0 if head is None else head.position), POSITIONS_PER_STEP
        while first is not None and end >= first and len(events) < limit:
            begin = max(first, end - step + 1)
            matches = deque(self(criteria, begin - 1, end), limit - len(events))
            events.extendleft(reversed(matches))
            end, step = begin - 1, 2 * step
        return list(events)

    def follow(self, after: int, wait: Callable[[], None], criteria: EventFilter) -> Iterator[LoggedEvent]:
        """Yield the events that match as they are written, without end.

        Arguments:
            after: position after which they are read.
            wait: called when there are no new events.
        """
        while True:
            head = self._log.head()
            if head is None or head.position <= after:
                wait()
            else:
                yield from self(criteria, after, head.position)
                after = head.position

    def _describe(
        self, commit: Commit, criteria: EventFilter, after: int, through: int | None
    ) -> Iterator[LoggedEvent]:
        """Yield the events of a commit that match all criteria but the topic, which takes the most time."""
        records, id_ = list(to_records(commit)), criteria.message_id
        self._sent |= {each.stream: each.event for each in records if isinstance(each.event, MessageSent)}
        matches = [
            each
            for each in records
            if each.position > after
            and (through is None or each.position <= through)
            and (id_ is None or may_have_id(each.stream, self._log.mailbox, id_))
            and (not criteria.events or each.type in criteria.events)
        ]
        unknown = {each.stream for each in matches if _is_later(each)} - self._sent.keys()
        if unknown:
            self.lookups += len(unknown)
            events = self._log.replay_first(unknown)
            self._sent |= {event.stream: event for event in events if isinstance(event, MessageSent)}
        for record in matches:
            sent = self._sent.get(record.stream) if record.type.startswith("Message") else None
            topic = sent.topic if sent is not None else getattr(record.event, "topic", None)
            shown = None if sent is None else message_id(sent.stream, sent.headers.message_id)
            yield LoggedEvent(record, topic, shown, tuple(self._changes(record)))
        for record in records:
            if isinstance(record.event, MessageAcked | MessageExpired):
                self._sent.pop(record.stream, None)

    def _changes(self, record: Record) -> list[Difference]:
        """Return the settings that an event changed, compared with those before it."""
        event = record.event
        if not isinstance(event, MailboxSettingsChanged | TopicPolicySet):
            return []
        if self._past is None or self._past.last < record.position:
            head = self._log.head()
            last = record.position if head is None else max(head.position, record.position)
            self._past = read_mailbox_past(self._log, last, record.at)
        before = self._past.settings_before(record.position)
        return compare_settings(before.settings, before.after(event).settings)


def _is_later(record: Record) -> bool:
    return record.type.startswith("Message") and not isinstance(record.event, MessageSent)


def _value(name: str, value: Any) -> Any:
    """Return the value of a field as JSON has it."""
    match value:
        case bytes():
            return value.hex()
        case int() if name in _TIMES:
            return rfc3339(value)
        case MailboxSettings():
            return msgspec.to_builtins(value)
        case ScheduleSpec():
            facts = msgspec.to_builtins(value) | {"payload": f"{len(value.payload)} bytes"}
            return {key: each for key, each in facts.items() if each is not None}
        case Headers() | SubscriptionFilter() | TopicPolicy():
            facts = msgspec.to_builtins(value)
            return {key: each for key, each in facts.items() if each is not None}
    return value
