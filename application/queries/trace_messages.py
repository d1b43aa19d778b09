"""`TraceMessages`: what became of messages that belong together, and which caused which, from the log."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from postroom.application.mailbox.codec import decode_runs
from postroom.application.mailbox.event_columns import SentRun
from postroom.application.mailbox.stored_snapshots import refuse_altered_records
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.tail_log import message_when_sent
from postroom.domain.commit import expand
from postroom.domain.envelope.build import open_envelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import MS, MessageEvent, MessageSent, Status
from postroom.domain.message_history import MessageHistory, trace
from postroom.domain.record import Record
from postroom.domain.search import EventFilter, FoundMessage, topic_matches

MAX_POSITIONS: Final = 200_000
"""Number of positions of the log that are searched for later events of all messages."""
RECENT_POSITIONS: Final = 100_000
"""Number of the latest positions that are searched for messages that read models don't have yet."""
SENT_AT_ONCE: Final = 16
"""Messages whose commits, with envelopes, are in memory at a time."""


class MessageTrace(NamedTuple):
    """A message, its history, and its cause.

    Arguments:
        history: None if retention removed it from the log.
        cause: id of the message that caused it, as its sender wrote it; empty without one.
        copy_of: id of the message of which a subscription got this copy; empty for any other message.
        published: time of the sender's clock in µs.
        is_complete: whether the history has the end that the search found.
    """

    message: FoundMessage
    history: MessageHistory | None
    cause: str
    copy_of: str
    published: int
    is_complete: bool


class Cause(NamedTuple):
    """The place of a message among those that caused each other.

    Arguments:
        depth: number of messages that led to it.
        parent: the message that caused it; None if it is not among them, or has none.
        is_loop: whether it led to its own cause, by what the senders wrote.
    """

    trace: MessageTrace
    depth: int
    parent: MessageTrace | None
    is_loop: bool


class TraceMessages:
    """Queries for the messages of a correlation id, and for their histories; calls block.

    Both raise BrokenLog for a commit that was altered, and Unavailable if the log can't be read.
    """

    def __init__(self, log: EventLogReader) -> None:
        self._log = log

    @refuse_altered_records
    def find_recent(self, filter_: EventFilter) -> list[FoundMessage]:
        """Return the messages with a correlation id among the latest positions of the log, without envelopes.

        Arguments:
            filter_: the correlation id, and topics or globs; no others count.
        """
        head = self._log.head()
        positions: list[int] = []
        after = 0 if head is None else max(0, head.position - RECENT_POSITIONS)
        for commit in self._log.commits(after, envelopes=False) if head is not None else ():
            position = commit.first
            for run in decode_runs(commit):
                if type(run) is SentRun:
                    ids = expand(run.correlation_ids, run.count)
                    positions += (at for at, id_ in enumerate(ids, position) if id_ == filter_.correlation_id)
                position += run.count
        records = self._log.at_positions(positions, envelopes=False)
        messages = [
            message_when_sent(self._log.mailbox, each.position, each.event)
            for each in records.values()
            if isinstance(each.event, MessageSent)
        ]
        return [each for each in messages if not filter_.topics or _has_topic(filter_, each.topic)]

    @refuse_altered_records
    def __call__(self, messages: Sequence[FoundMessage]) -> list[MessageTrace]:
        """Return the traces of messages that a search found, in their order in the log."""
        ordered = sorted(messages, key=lambda each: each.position)
        first = dict(self._first_events(ordered))
        streams = [each.stream for each, _, _ in first.values()]
        records = self._log.read_streams(streams, MAX_POSITIONS)
        traces = []
        for each in ordered:
            if each.position not in first:
                traces.append(MessageTrace(each, None, "", "", each.timestamp * MS, False))
                continue
            sent, cause, published = first[each.position]
            history = trace(_events(records.get(sent.stream, ())))
            is_complete = history is not None and _leads_to(history, each.status)
            traces.append(MessageTrace(each, history, cause, sent.copy_of or "", published, is_complete))
        return traces

    def _first_events(
        self, messages: Sequence[FoundMessage]
    ) -> Iterator[tuple[int, tuple[MessageSent, str, int]]]:
        """Yield the position and the first event of each message, its cause, and when it was published."""
        topics = {each.position: each.topic for each in messages}
        positions = list(topics)
        for start in range(0, len(positions), SENT_AT_ONCE):
            part = self._log.at_positions(positions[start : start + SENT_AT_ONCE])
            for position, record in part.items():
                sent = record.event
                if isinstance(sent, MessageSent) and sent.topic == topics[position]:
                    yield position, (sent, *_read_envelope(sent))


def _has_topic(filter_: EventFilter, topic: str) -> bool:
    return any(topic_matches(each, topic) for each in filter_.topics)


def _read_envelope(sent: MessageSent) -> tuple[str, int]:
    try:
        envelope = open_envelope(sent.envelope)
        published = envelope.published_at_us
        return envelope.causality_parent or "", sent.at if published is None else published
    except InvalidRequest:  # altered
        return "", sent.headers.timestamp * MS


def _events(records: Iterable[Record]) -> Iterator[tuple[int, int, MessageEvent, None]]:
    for each in records:
        if isinstance(each.event, MessageEvent):
            yield each.position, each.epoch, each.event, None


def status_of(history: MessageHistory) -> Status:
    """Return the status at the end of a history."""
    if history.removal is not None:
        return Status.EXPIRED
    if not history.rounds:
        return Status.ARCHIVED
    latest = history.rounds[-1]
    if history.is_settled:
        return Status.ACKED
    if latest.dead_lettering is not None:
        return Status.DEAD
    return Status.READY if history.in_flight is None else Status.IN_FLIGHT


def _leads_to(history: MessageHistory, status: Status) -> bool:
    """Return whether a history has the end that a search found, which may be older than the history."""
    end, ends = status_of(history), (Status.ACKED, Status.EXPIRED, Status.ARCHIVED)
    if end in ends or status in (end, Status.READY, Status.IN_FLIGHT):
        return True
    return status == Status.DEAD and len(history.rounds) > 1  # redriven since


def order_by_cause(traces: Sequence[MessageTrace]) -> list[Cause]:
    """Return messages so that each follows its cause, those without one in the order of the log.

    Of messages that caused each other in a loop, the first in the log comes first.
    """
    by_id: dict[str, MessageTrace] = {}
    for each in traces:
        by_id.setdefault(each.message.message_id, each)
    parents = {id(each): by_id.get(each.copy_of or each.cause) for each in traces}
    children: dict[int, list[MessageTrace]] = {}
    for each in traces:
        parent = parents[id(each)]
        if parent is not None:
            children.setdefault(id(parent), []).append(each)
    ordered: list[Cause] = []
    placed: set[int] = set()

    def place(root: MessageTrace, *, is_loop: bool) -> None:
        stack = [(root, 0, is_loop)]
        while stack:
            each, depth, is_loop = stack.pop()
            if id(each) in placed:
                continue
            placed.add(id(each))
            ordered.append(Cause(each, depth, parents[id(each)], is_loop))
            stack += [(child, depth + 1, False) for child in reversed(children.get(id(each), []))]

    for each in traces:
        if parents[id(each)] is None:
            place(each, is_loop=False)
    for each in traces:  # what remains is in loops, or was caused by such messages
        if id(each) not in placed:
            place(_in_loop(each, parents), is_loop=True)
    return ordered


def _in_loop(each: MessageTrace, parents: dict[int, MessageTrace | None]) -> MessageTrace:
    """Return the first message of the loop that the causes of a message lead to."""
    seen: dict[int, int] = {}
    path: list[MessageTrace] = []
    current: MessageTrace | None = each
    while current is not None and id(current) not in seen:
        seen[id(current)] = len(path)
        path.append(current)
        current = parents[id(current)]
    loop = path[seen[id(current)] :] if current is not None else path
    return min(loop, key=lambda each: each.message.position)
