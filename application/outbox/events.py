"""Events in an outbox: as recorded in a transaction, as messages, and operators' decisions about them.

An owner sends a message within a second and deletes its row, so one that stays has no reader: no owner reads
its database, nobody owns its mailbox, or the owner is down. Who reads a database is not stored anywhere, and
the owner may belong to another store; the age is what shows it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from logging import ERROR
from typing import Final
from uuid import UUID

import msgspec
from msgspec.structs import replace

from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.messages import NewMessage
from postroom.application.metrics import OTHERS, Metric
from postroom.application.ports.outbox import (
    MAX_COUNTED,
    MAX_MAILBOXES,
    Decision,
    MessageCount,
    OutboxRow,
    RecordedMessage,
)
from postroom.application.telemetry import logger, summarize
from postroom.application.text import pluralize
from postroom.application.threads import in_query_thread
from postroom.application.tracing import SAMPLED, tracer
from postroom.domain.errors import FrameTooLarge, InvalidRequest
from postroom.domain.message import MS
from postroom.domain.outbox import OutboxCommand, OutboxEvent, decide, evolve, record_of
from postroom.domain.outbox_events import OutboxEventRecorded, OutboxRowHeld

UUID_WITH_TIME: Final = 7
MAX_TIME_US: Final = 253_402_300_799_999_999
"""End of the year 9999."""
UUID_TIME_SHIFT: Final = 80
"""Bits of a UUIDv7 after its time in ms."""


class _StoredMessage(NewMessage, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message as JSON, with base64 for the payload and for all attributes, both text and bytes."""

    attrs: Mapping[str, bytes] = {}


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_StoredMessage).decode


def record_message(
    message: object, factory: MessageFactory, wall: Callable[[], int], max_bytes: int
) -> RecordedMessage:
    """Validate a `NewMessage` like a send, and return its row, whose position is not set yet.

    The row has a message id and a time of publication, so that sending it twice adds one message.

    Arguments:
        wall: returns the time in µs since 1970 UTC.
        max_bytes: maximum size of the message with its envelope.

    Raises: InvalidRequest naming the field that is invalid, FrameTooLarge.
    """
    request = factory.from_message(message)
    size = len(request.command.envelope)
    assert isinstance(message, NewMessage)
    if size > max_bytes:
        raise FrameTooLarge(
            f"Message on topic {message.topic} is {size} bytes with its envelope; a frame holds at most "
            f"{max_bytes}. Send a reference to the data instead."
        )
    fields = msgspec.structs.asdict(message)
    fields["message_id"] = request.message_id
    fields["correlation_id"] = request.command.headers.correlation_id
    trace = tracer().current()
    # Trace flags are not recorded, so an unsampled trace must not be recorded, as it would become sampled.
    if message.trace_id is None and trace is not None and trace.trace_flags & SAMPLED:
        fields["trace_id"], fields["span_id"] = trace.trace_id, trace.span_id
    if message.published_at_us is None:
        fields["published_at_us"] = wall()
    fields["attrs"] = {
        name: value.encode() if isinstance(value, str) else value for name, value in message.attrs.items()
    }
    return RecordedMessage(0, request.message_id, message.topic, _encode(_StoredMessage(**fields)).decode())


class _Times(msgspec.Struct):
    """The only field of a stored message that `recorded_at` reads."""

    published_at_us: int = 0


_decode_times = msgspec.json.Decoder(_Times).decode


def recorded_at(id_: str, message: str) -> int | None:
    """Return when a row was recorded, µs since 1970 UTC; None if it does not say so.

    A sender may set the id and the time of publication, so the later of the two times is the better one.
    """
    times = []
    with suppress(ValueError, AttributeError, TypeError):
        uuid = UUID(id_)
        if uuid.version == UUID_WITH_TIME:
            times.append((uuid.int >> UUID_TIME_SHIFT) * MS)
    with suppress(msgspec.MsgspecError, UnicodeError, RecursionError, TypeError):
        times.append(_decode_times(message).published_at_us)
    return max((each for each in times if 0 < each <= MAX_TIME_US), default=None)


def read_message(recorded: RecordedMessage) -> NewMessage:
    """Return the message of a row.

    Raises: InvalidRequest for a row that `record_message` did not create.
    """
    try:
        message = NewMessage(**msgspec.structs.asdict(_decode(recorded.message)))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(
            f"Outbox row {recorded.id!r:.80} is not a message that this version can read: {error}."
        ) from error
    if (message.message_id, message.topic) != (recorded.id, recorded.topic):
        # Without the id of the row, each attempt to send it would add a message.
        raise InvalidRequest(
            f"Outbox row {recorded.id!r:.80} was altered: its message has id {message.message_id!r:.80} and "
            f"topic {message.topic!r:.80}. Record messages with MailboxOutbox."
        )
    return message


US = 1_000_000
LATE_SECONDS = 60
"""Age from which a message counts as unread."""
COUNT_SECONDS = 10.0
"""Interval at which the messages are counted for the metrics, at most."""
WAIT_SECONDS = 1.0
"""Time that a scrape waits for a count; the next scrape reports a count that came too late."""


class RecordedMessages(msgspec.Struct, frozen=True):
    """Messages in one database that were recorded for one mailbox.

    Arguments:
        database: path or URL without a password.
        mailbox: name for which they were recorded; empty if the database can't be read, `*` for those after
            the first `MAX_MAILBOXES`.
        waiting: messages that were neither sent nor refused.
        refused: messages that the mailbox refused; each row has its error.
        oldest_at: when the first waiting one was recorded, µs since 1970 UTC.
        exact: whether all rows were counted; otherwise there are more than these.
        problem: why they are not sent, or why the database can't be read; empty if nothing is wrong.
        advice: what to do.
    """

    database: str
    mailbox: str = ""
    waiting: int = 0
    refused: int = 0
    oldest_at: int | None = None
    exact: bool = True
    problem: str = ""
    advice: str = ""

    @property
    def count_text(self) -> str:
        """Return the number of waiting messages in words."""
        return f"{'' if self.exact else 'at least '}{pluralize(self.waiting, 'message')}"


def rank_mailboxes(
    groups: Iterable[tuple[str, int, int, int | None]], find_row: Callable[[int], tuple[str, str] | None]
) -> list[MessageCount]:
    """Return the mailboxes with most messages first; those after the first `MAX_MAILBOXES` become one, `*`.

    Arguments:
        groups: mailbox, waiting and refused messages, and the position of the first waiting one.
        find_row: returns the id and the message at a position, unless it was sent meanwhile.
    """
    ranked = sorted(groups, key=lambda each: (-each[1], -each[2], each[0]))
    rest = ranked[MAX_MAILBOXES:]
    if rest:
        first = min((each[3] for each in rest if each[3] is not None), default=None)
        ranked[MAX_MAILBOXES:] = [
            (OTHERS, sum(each[1] for each in rest), sum(each[2] for each in rest), first)
        ]
    counts = []
    for mailbox, waiting, refused, position in ranked:
        row = None if position is None else find_row(position)
        counts.append(MessageCount(mailbox, waiting, refused, None if row is None else recorded_at(*row)))
    return counts


def explain_counts(
    database: str,
    counts: Sequence[MessageCount],
    *,
    is_relayed: bool,
    store: str,
    mailboxes: Collection[str],
    now: int,
) -> list[RecordedMessages]:
    """Return the counts of a database, each with the reason why its messages are not sent, if they are late.

    Arguments:
        is_relayed: whether the database is the store, or among those that the settings of its owners name.
        store: name of the store.
        mailboxes: those of the store.
        now: µs since 1970 UTC.
    """
    exact = sum(each.waiting + each.refused for each in counts) < MAX_COUNTED
    explained = []
    for each in counts:
        problem = advice = ""
        # A row without a time was not made by `record`, and an owner would have refused it at once.
        if each.waiting and (each.oldest_at is None or now - each.oldest_at > LATE_SECONDS * US):
            problem, advice = _explain_late(each.mailbox, database, is_relayed, store, mailboxes)
        elif each.refused:
            problem = f"its owner refused {pluralize(each.refused, 'message')}"
            advice = "Read the column error, and UPDATE outbox_messages SET error = NULL, or use the console."
        explained.append(RecordedMessages(database, *each, exact, problem, advice))
    return explained


def _explain_late(
    mailbox: str, database: str, is_relayed: bool, store: str, mailboxes: Collection[str]
) -> tuple[str, str]:
    if mailbox not in mailboxes:
        return (
            f"the store {store} has no such mailbox",
            "Correct the name in MailboxOutbox, or own the mailbox: postroom serve --mailbox NAME.",
        )
    if not is_relayed:
        return (
            "no owner reads this database",
            f'Add "{database}" to [relay] databases, with its password if it has one, and restart the owner.',
        )
    return (
        "its owner does not send them",
        "Start an owner with these settings; if one runs, see its log and whether the topic is full.",
    )


class OutboxCounter:
    """Counter of recorded messages for a process that is asked often.

    Arguments:
        count: counts the messages; it blocks.
        wall: the wall clock, µs since 1970 UTC.
    """

    def __init__(self, count: Callable[[], Sequence[RecordedMessages]], wall: Callable[[], int]) -> None:
        self._count = count
        self._wall = wall
        self._counted: Sequence[RecordedMessages] = ()
        self._counted_at = float("-inf")
        self._counting: asyncio.Task[None] | None = None

    async def measure(self) -> list[Metric]:
        """Return the metrics of the counts that `count_messages` returns."""
        return outbox_metrics(await self.count_messages(), self._wall())

    async def count_messages(self) -> Sequence[RecordedMessages]:
        """Return the messages as counted within `COUNT_SECONDS`, or before if a database does not answer."""
        loop = asyncio.get_running_loop()
        if self._counting is None and loop.time() - self._counted_at >= COUNT_SECONDS:
            self._counting = loop.create_task(self._refresh(), name="count of recorded messages")
        if self._counting is not None:
            await asyncio.wait([self._counting], timeout=WAIT_SECONDS)
        return self._counted

    async def _refresh(self) -> None:
        try:
            self._counted = await in_query_thread(self._count)
        except Exception as error:  # a defect; the metrics of all else are answered
            logger().retry("outbox.count_failed", ERROR, error=summarize(error))
        finally:
            self._counted_at = asyncio.get_running_loop().time()
            self._counting = None


def outbox_metrics(counted: Iterable[RecordedMessages], now: int) -> list[Metric]:
    """Return the metrics of recorded messages; `now` is µs since 1970 UTC."""
    up: Counter[str] = Counter()
    numbers: list[tuple[dict[str, str], float]] = []
    ages: list[tuple[dict[str, str], float]] = []
    for each in counted:
        up[each.database] = 1 if each.mailbox or not each.problem else 0
        if not each.mailbox:
            continue
        labels = {"database": each.database, "mailbox": each.mailbox}
        numbers += (
            ({**labels, "state": "waiting"}, each.waiting),
            ({**labels, "state": "refused"}, each.refused),
        )
        if each.oldest_at is not None:
            ages.append((labels, max(0.0, (now - each.oldest_at) / US)))
    return [
        Metric(
            "postroom_outbox_database_up",
            "gauge",
            "1 if the recorded messages of a database can be counted.",
            [({"database": database}, number) for database, number in sorted(up.items())],
        ),
        Metric(
            "postroom_outbox_messages",
            "gauge",
            "Messages that MailboxOutbox recorded and that were not sent, of the first 10,000.",
            numbers,
        ),
        Metric(
            "postroom_outbox_messages_oldest_seconds",
            "gauge",
            "Age of the oldest message that MailboxOutbox recorded and that was neither sent nor refused.",
            ages,
        ),
    ]


def decide_on(row: OutboxRow, command: OutboxCommand, now: int) -> Decision:
    """Return the new state of an event, and the events to append to its history; empty if nothing changes.

    The history of an event that was inserted by plain SQL starts with its first change.
    """
    event, changes = row.event, decide(command, row.event, now)
    for change in changes:
        event = evolve(event, change)
    if changes and not row.has_history:
        changes.insert(0, _recorded_event(row.event, now))
    return Decision(event, changes)


def record_only(row: OutboxRow, now: int) -> Decision:
    """Return the first event of the history of an event that has none."""
    return Decision(row.event, [_recorded_event(row.event, now)])


def _recorded_event(event: OutboxEvent, now: int) -> OutboxEventRecorded:
    first = replace(event, version=1, retry_at=None)
    return record_of(first, now, OutboxRowHeld if event.is_row else OutboxEventRecorded)


MESSAGE_ID = "Nats-Msg-Id"
EVENT_TYPE = "Event-Type"
EVENT_VERSION = "Event-Version"
OCCURRED_AT = "Occurred-At"
AGGREGATE_TYPE = "Aggregate-Type"
AGGREGATE_ID = "Aggregate-Id"
CORRELATION_ID = "Correlation-Id"
CAUSATION_ID = "Causation-Id"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
BAGGAGE = "baggage"
CONTENT_TYPE = "Content-Type"

_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001  # in UTC; the offset is written as Z


def headers_of(event: OutboxEvent) -> dict[str, str]:
    """Return the headers of an event's message, without headers of absent fields.

    `Occurred-At` is RFC 3339 in UTC with microseconds.
    """
    assert event.occurred_at is not None, "rows without a readable time are parked, not published"
    headers = {
        MESSAGE_ID: str(event.id),
        EVENT_TYPE: event.event_type,
        EVENT_VERSION: str(event.event_version),
        OCCURRED_AT: rfc_3339(event.occurred_at),
        AGGREGATE_TYPE: event.aggregate_type,
        AGGREGATE_ID: event.aggregate_id,
    }
    if event.correlation.correlation_id is not None:
        headers[CORRELATION_ID] = event.correlation.correlation_id
    if event.correlation.causation_id is not None:
        headers[CAUSATION_ID] = event.correlation.causation_id
    headers |= trace_headers(event)
    return headers | event.attributes if event.attributes else headers


def trace_headers(event: OutboxEvent) -> dict[str, str]:
    """Return the headers with the trace context of an event, without headers of absent fields."""
    fields = ((TRACEPARENT, event.traceparent), (TRACESTATE, event.tracestate), (BAGGAGE, event.baggage))
    return {name: value for name, value in fields if value is not None}


def rfc_3339(at: int) -> str:
    """Return a time in µs since 1970 UTC as RFC 3339 with microseconds."""
    return (_EPOCH + timedelta(microseconds=at)).isoformat(timespec="microseconds") + "Z"
