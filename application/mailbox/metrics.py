"""Measurements of a mailbox at its owner, which all surfaces and processes call (svc-mailbox I-10)."""

from asyncio import InvalidStateError
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from time import perf_counter

from postroom.application.mailbox.groups import Group, GroupEvents, Request, deliveries_of
from postroom.application.messages import MessageDelivery
from postroom.application.metrics import OTHERS, Histogram, Metric, histogram, new_histogram, rejected_metric
from postroom.application.ports.event_log import Accepted, Answer
from postroom.domain.errors import PostroomError
from postroom.domain.mailbox.commands import Ack, Nack, Receive, Send
from postroom.domain.message import Message

BATCH_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)
MAX_DEPTH = 1_024
"""Reorder depth at which counting stops."""
MAX_TOPICS = 1_024
"""Number of topics that are counted by name, by event."""
MAX_SHARDS = 1_024
"""Maximum number of shards whose latest deliveries are remembered."""


_shard_of = attrgetter("topic", "shard")
_ACCEPTED: frozenset[type] = frozenset((Accepted, int, list))
"""Types of the answers to commands that were not refused."""
_EVENTS: dict[type, str] = {Send: "sent", Receive: "delivered", Ack: "acked", Nack: "nacked"}


class ReorderDepth:
    """Number of messages by which deliveries are out of the order of their shard (svc-mailbox C-5, G-9).

    The depth of a delivery is the number of messages of its shard that were sent later and delivered before.
    A message whose delay was asked for, by its sender or by a nack, is not out of order, and neither is one
    that was redriven: what counts is a message that its consumer, or the answer to it, was lost with.
    """

    def __init__(self) -> None:
        self.maximum: dict[int, int] = {}
        """Largest depth so far by shard number."""
        self._delivered: dict[tuple[str, int], list[int]] = {}
        """Ascending positions of the latest messages that were delivered, by shard."""

    def delivered(self, messages: Iterable[Message]) -> None:
        """Note deliveries."""
        for key, group in groupby(messages, _shard_of):
            positions = self._delivered.get(key)
            if positions is None:
                positions = self._first_of(key)
            latest = positions[-1] if positions else 0
            for message in group:
                if message.position > latest:
                    latest = message.position
                    positions.append(latest)
                else:
                    self._delivered_late(message, positions)
            if len(positions) > 2 * MAX_DEPTH:
                del positions[:-MAX_DEPTH]

    def _delivered_late(self, message: Message, positions: list[int]) -> None:
        if message.reason in ("nacked", "released") or message.redriven or message.ready_at > message.sent_at:
            return
        depth = min(len(positions) - bisect_right(positions, message.position), MAX_DEPTH)
        if depth > self.maximum[message.shard]:
            self.maximum[message.shard] = depth

    def _first_of(self, key: tuple[str, int]) -> list[int]:
        if len(self._delivered) >= MAX_SHARDS:
            del self._delivered[next(iter(self._delivered))]
        self.maximum.setdefault(key[1], 0)
        return self._delivered.setdefault(key, [])


class MailboxMetrics:
    """Latencies, refusals, batches and reordering of a mailbox, since this process owns it."""

    def __init__(self) -> None:
        self._enqueue = new_histogram()
        self._dequeue = new_histogram()
        self._ack = new_histogram()
        self._latencies: dict[type, Histogram] = {
            Send: self._enqueue,
            Receive: self._dequeue,
            Ack: self._ack,
        }
        self._rejected: Counter[str] = Counter()
        self._messages: dict[type, int] = dict.fromkeys(_EVENTS, 0)
        self._topics: dict[str, Counter[str]] = {event: Counter() for event in _EVENTS.values()}
        self.batch = new_histogram(BATCH_BOUNDS)
        self.commit = new_histogram()
        self.reorder = ReorderDepth()

    def answer(self, group: Group) -> list[MessageDelivery]:
        """Send the callers of a group their answers, and count latencies and refusals.

        Returns: the deliveries whose receivers have given up.
        """
        now, untaken = perf_counter(), list[MessageDelivery]()
        for request, answers in zip(group.requests, group.answers, strict=True):
            if isinstance(answers, PostroomError):
                self.refuse((request,), answers)
                continue
            try:
                request.answers.set_result(answers)
            except InvalidStateError:  # the caller has stopped waiting; its commands have still taken effect
                untaken += deliveries_of(answers)
                continue
            kind = type(request.commands[0])
            latency = self._latencies.get(kind)
            if latency is not None and (latency is not self._dequeue or answers[0]):  # it delivered something
                latency.observe(now - request.began)
            refusals = 0
            if not _ACCEPTED.issuperset(map(type, answers)):
                for answer in answers:
                    if isinstance(answer, PostroomError):
                        self.count_refusal(answer)
                        refusals += 1
            self._count_messages(kind, answers, refusals)
        return untaken

    def refuse(self, requests: Iterable[Request], error: PostroomError) -> None:
        """Answer every caller with `error`, and count the refusals."""
        for request in requests:
            if not request.answers.done():
                request.answers.set_exception(error)
                self.count_refusal(error)

    def count_topics(self, events: GroupEvents) -> None:
        """Count the messages of commits that are durable, by topic."""
        for event, topics in (
            ("sent", events.sent_by_topic),
            ("delivered", events.delivered),
            ("acked", events.acked),
            ("nacked", events.nacked),
        ):
            counted = self._topics[event]
            for topic, count in topics.items():
                # Topics come and go; the first ones keep their own label.
                is_named = topic in counted or len(counted) < MAX_TOPICS
                counted[topic if is_named else OTHERS] += count

    def _count_messages(self, kind: type, answers: list[Answer], refusals: int) -> None:
        """Count the messages of commands of one kind; of a `Receive`, those that it delivered."""
        if kind is Receive:
            self._messages[kind] += sum(len(each) for each in answers if isinstance(each, list))
        elif kind in self._messages:
            self._messages[kind] += len(answers) - refusals

    def collect(self) -> list[Metric]:
        """Return the metrics."""
        return [
            Metric(
                "postroom_messages",
                "counter",
                "Messages by what happened to them: sent, delivered, acked or nacked.",
                [({"event": event}, self._messages[kind]) for kind, event in _EVENTS.items()],
            ),
            Metric(
                "postroom_topic_messages",
                "counter",
                "Messages of a topic by what happened to them: sent, delivered, acked or nacked.",
                [
                    ({"event": event, "topic": topic}, count)
                    for event, topics in self._topics.items()
                    for topic, count in sorted(topics.items())
                ],
            ),
            histogram("postroom_enqueue_seconds", "Time until sends were durable.", self._enqueue),
            histogram(
                "postroom_dequeue_seconds",
                "Time until deliveries were durable, without the wait for messages.",
                self._dequeue,
            ),
            histogram("postroom_ack_seconds", "Time until acks were durable.", self._ack),
            histogram("postroom_commit_seconds", "Duration of appends to the log.", self.commit),
            histogram("postroom_commit_records", "Log records of an append.", self.batch),
            rejected_metric(self._rejected),
            Metric(
                "postroom_reorder_depth_max",
                "gauge",
                "Largest number of messages, sent later to the same shard, that were delivered before one.",
                [({"shard": str(shard)}, depth) for shard, depth in sorted(self.reorder.maximum.items())],
            ),
        ]

    def count_refusal(self, error: PostroomError) -> None:
        """Count a refusal by its code."""
        self._rejected[error.code] += 1
        error.is_counted = True
