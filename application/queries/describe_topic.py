"""Queries of topics and consumers, from the state of the mailbox and the latest events of its log."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any

from msgspec.structs import replace

from postroom.application.mailbox.codec import decode_runs
from postroom.application.mailbox.event_columns import (
    AckedRun,
    AnyRun,
    DeadLetteredRun,
    ExpiredRun,
    ReceivedRun,
    RedrivenRun,
    RequeuedRun,
    SentRun,
)
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.mailbox_past import StateAt
from postroom.application.reports import ConsumerReport, TopicPeriod, TopicReport, TopicStep
from postroom.domain.commit import expand
from postroom.domain.mailbox.counts import count_keys, summarize_topic
from postroom.domain.names import check_topic
from postroom.domain.policy import DAY_MS
from postroom.domain.settings import explain_policy

MAX_EVENTS = 100_000
"""Number of the latest events of the log that a query reads: 100 ms of CPU if all are of the topic."""
PERIODS_MS = (3_600_000, DAY_MS, 7 * DAY_MS)
STEPS_MS = (60_000, 1_800_000, 10_800_000)
"""Length of a step of each period, about sixty of which are in it."""
MAX_CONSUMERS = 1_000
MAX_KEYS = 100
ERROR_CHARS = 1_000
US = 1_000_000
PERCENTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))

Receivers = Callable[[], Mapping[tuple[str, str], int]]
"""Returns how many receives wait now, by name of the consumer and topic."""


class _Life:
    """What became of a message; times in µs, 0 for what has not happened."""

    __slots__ = ("acked", "dead", "failed", "received", "sent", "taken", "topic", "work")

    def __init__(self, topic: str, sent: int) -> None:
        self.topic = topic
        self.sent = sent
        self.received = self.acked = self.failed = self.dead = self.work = 0
        self.taken: tuple[_Consumer, int] | None = None
        """The consumer that has it in flight, and since when."""


class _Consumer:
    """What a consumer did with the messages of a topic."""

    __slots__ = ("acked", "error", "failed", "first", "last", "principal", "received", "work")

    def __init__(self, at: int) -> None:
        self.received = self.failed = 0
        self.first = self.last = at
        self.work: list[int] = []
        self.error: str | None = None
        self.principal: str | None = None


class RecentEvents:
    """A fold of the latest `MAX_EVENTS` events of a log, or those of the longest period if these are fewer.

    Arguments:
        topic: only of this topic; None for all.
    """

    def __init__(self, log: EventLogReader, now: int, topic: str | None = None) -> None:
        """Read the events; raises BrokenLog when a commit can't be decoded."""
        self._now = now
        self._topic = topic
        self._lives: dict[bytes, _Life] = {}
        self._consumers: dict[tuple[str, str], _Consumer] = {}
        head = log.head()
        last = 0 if head is None else head.position
        oldest = log.position_before(now - PERIODS_MS[-1] * 1_000)
        after = max(oldest, last - MAX_EVENTS)
        self.is_whole = after <= oldest
        self.events, self.since = 0, now
        steps: dict[type, Callable[[Any, int], None]] = {
            SentRun: self._send,
            ReceivedRun: self._receive,
            AckedRun: self._ack,
            RequeuedRun: self._fail,
            DeadLetteredRun: self._fail,
            ExpiredRun: self._end,
            RedrivenRun: self._end,
        }
        for commit in log.commits(after, envelopes=False):
            if not self.events:
                self.since = commit.at
            self.events += commit.event_count
            for run in decode_runs(commit):
                step = steps.get(type(run))
                if step is not None:
                    step(run, commit.at)

    # -- events ---

    def _send(self, run: SentRun, at: int) -> None:
        topic, lives = self._topic, self._lives
        if type(run.topics) is str and topic is not None and run.topics != topic:
            return
        for stream, name in zip(run.stream_ids(), expand(run.topics, run.count), strict=False):
            if topic is None or name == topic:
                lives[stream] = _Life(name, at)

    def _lives_of(self, run: AnyRun) -> Iterator[tuple[int, _Life]]:
        """Yield the index and the life of each message of a run that is of the topic.

        The fold does not know the topics of messages that were sent before its events.
        """
        lives = self._lives
        for index, stream in enumerate(run.stream_ids()):
            life = lives.get(stream)
            if life is not None:
                yield index, life
            elif self._topic is None:
                life = lives[stream] = _Life("", 0)
                yield index, life

    def _receive(self, run: ReceivedRun, at: int) -> None:
        name: str | None = ""
        consumer: _Consumer | None = None
        topic: str | None = None
        names, principals = run.consumers, run.principals
        for index, life in self._lives_of(run):
            own = names[index] if type(names) is list else names
            if consumer is None or own != name or life.topic != topic:
                name, topic = own, life.topic  # type: ignore[assignment] # a column of texts, or one
                key = name or "", life.topic
                consumer = self._consumers.get(key)
                if consumer is None:
                    consumer = self._consumers[key] = _Consumer(at)
            consumer.received += 1
            consumer.last = at
            consumer.principal = principals[index] if type(principals) is list else principals  # type: ignore[assignment] # as above
            life.taken = consumer, at
            if not life.received:
                life.received = at

    def _ack(self, run: AckedRun, at: int) -> None:
        for _, life in self._lives_of(run):
            life.acked = at
            if life.taken is not None:
                consumer, taken = life.taken
                life.work = at - taken
                consumer.work.append(at - taken)
                life.taken = None

    def _fail(self, run: RequeuedRun | DeadLetteredRun, at: int) -> None:
        is_dead = type(run) is DeadLetteredRun
        reasons, errors = run.reasons, run.last_errors
        for index, life in self._lives_of(run):
            life.dead += is_dead
            if life.taken is None:
                continue
            consumer, life.taken = life.taken[0], None
            reason = reasons[index] if type(reasons) is list else reasons
            if reason == "released":
                continue
            life.failed += 1
            consumer.failed += 1
            error = errors[index] if type(errors) is list else errors
            if reason == "visibility_expired":
                error = "The visibility timeout ended."
            consumer.error = str(error or reason)[:ERROR_CHARS]

    def _end(self, run: AnyRun, at: int) -> None:
        for _, life in self._lives_of(run):
            life.taken = None

    # -- results ---

    def consumers(self, receivers: Mapping[tuple[str, str], int]) -> list[ConsumerReport]:
        """Return the consumers: first those that have or wait for messages, then the latest receivers."""
        held: dict[tuple[str, str], list[int]] = {}
        names = {id(each): key for key, each in self._consumers.items()}
        for life in self._lives.values():
            if life.taken is not None:
                held.setdefault(names[id(life.taken[0])], []).append(life.taken[1])
        keys = [*self._consumers, *(each for each in receivers if each not in self._consumers)]
        keys.sort(key=lambda key: (key not in held and not receivers.get(key), -self._last(key), key))
        return [
            self._report(key, held.get(key, ()), receivers.get(key, 0))
            for key in keys[:MAX_CONSUMERS]
            if self._topic is None or key[1] == self._topic
        ]

    def _last(self, key: tuple[str, str]) -> int:
        consumer = self._consumers.get(key)
        return self._now if consumer is None else consumer.last

    def _report(self, key: tuple[str, str], held: Sequence[int], receivers: int) -> ConsumerReport:
        consumer = self._consumers.get(key)
        report = ConsumerReport(*key, receivers, len(held), rfc3339(min(held, default=None)))
        if consumer is None:
            return report
        work = sorted(consumer.work)
        return replace(
            report,
            received=consumer.received,
            acked=len(work),
            failed=consumer.failed,
            work_p50_ms=_percentile(work, 0.5),
            work_p95_ms=_percentile(work, 0.95),
            last_error=consumer.error,
            first_received=rfc3339(consumer.first),
            last_received=rfc3339(consumer.last),
            principal=consumer.principal,
        )

    def periods(self) -> list[TopicPeriod]:
        """Return what became of the messages that were sent in each period."""
        times = _Times(self._lives.values())
        return [self._period(times, *each) for each in zip(PERIODS_MS, STEPS_MS, strict=True)]

    def _period(self, times: "_Times", period_ms: int, step_ms: int) -> TopicPeriod:
        begin = self._now - period_ms * 1_000
        is_whole = self.is_whole or self.since <= begin
        since = begin if is_whole else self.since
        first = bisect_left(times.sent, since)
        figures = times.count(first) | times.percentiles(("queue", "work", "total"), first)
        return TopicPeriod(
            period_ms,
            rfc3339(since) or "",
            is_whole,
            (self._now - since) / US,
            received=sum(each >= 0 for each in times.queue[first:]),
            step_ms=step_ms,
            steps=list(times.steps(first, step_ms * 1_000)),
            **figures,
        )


class _Times:
    """The messages in the order in which they were sent: a list for each figure, times in µs.

    `queue`, `work` and `total` are -1 for messages that were not received, or not acked.
    """

    def __init__(self, lives: Iterable[_Life]) -> None:
        rows = sorted(
            (
                each.sent,
                each.received - each.sent if each.received else -1,
                each.work if each.acked else -1,
                each.acked - each.sent if each.acked else -1,
                each.failed,
                each.dead,
            )
            for each in lives
        )
        columns: list[list[int]] = [list(each) for each in zip(*rows, strict=True)] or [[] for _ in range(6)]
        self.sent, self.queue, self.work, self.total, self.failed, self.dead = columns

    def count(self, first: int, end: int | None = None) -> dict[str, Any]:
        """Return the counts of the messages of a range."""
        total = self.total[first:end]
        return {
            "sent": len(total),
            "acked": sum(each >= 0 for each in total),
            "failed": sum(self.failed[first:end]),
            "dead": sum(self.dead[first:end]),
        }

    def percentiles(self, names: Sequence[str], first: int, end: int | None = None) -> dict[str, Any]:
        """Return the percentiles of some times of the messages of a range."""
        figures: dict[str, float | None] = {}
        for name in names:
            values = sorted(getattr(self, name)[first:end])
            del values[: bisect_left(values, 0)]
            for title, rank in PERCENTILES:
                figures[f"{name}_{title}_ms"] = _percentile(values, rank)
        return figures

    def steps(self, first: int, width: int) -> Iterator[TopicStep]:
        """Yield the steps that have messages, from a message on."""
        while first < len(self.sent):
            at = self.sent[first] - self.sent[first] % width
            end = bisect_left(self.sent, at + width, first)
            figures = self.count(first, end) | self.percentiles(("total",), first, end)
            yield TopicStep(rfc3339(at) or "", **figures)
            first = end


def _percentile(values: Sequence[int], rank: float) -> float | None:
    """Return a percentile in ms of sorted times in µs, by nearest rank; None without values."""
    return values[ceil(rank * len(values)) - 1] / 1_000 if values else None


class DescribeTopic:
    """The queries for a topic and for consumers; see `Mailbox.describe_topic` and `Mailbox.list_consumers`.

    Arguments:
        receivers: returns the receives that wait at this process; none if it does not own the mailbox.
    """

    def __init__(
        self, log: EventLogReader, state_at: StateAt, now: Callable[[], int], receivers: Receivers = dict
    ) -> None:
        self._log = log
        self._state_at = state_at
        self._now = now
        self._receivers = receivers

    def __call__(self, topic: str) -> TopicReport:
        """Return the report of a topic."""
        return self.add_events(self.read_state(topic))

    def read_state(self, topic: str) -> TopicReport:
        """Return the report of a topic, which need not exist, from the state of the mailbox alone."""
        mailbox, now = self._state_at(None)
        check_topic(topic)
        explained = explain_policy(mailbox.settings, topic)
        waiting = {key: count for key, count in self._receivers().items() if key[1] == topic}
        summary = summarize_topic(mailbox, topic, now)
        return TopicReport(
            replace(summary, receivers=sum(waiting.values())),
            replace(mailbox.policy(topic), key_weights=dict(mailbox.policy(topic).key_weights)),
            {name: each.section for name, each in explained.items()},
            sorted(each.name for each in mailbox.subscriptions_of(topic)),
            [ConsumerReport(name, topic, count) for (name, _), count in waiting.items()],
            count_keys(mailbox, topic, MAX_KEYS),
        )

    def add_events(self, report: TopicReport) -> TopicReport:
        """Return a report completed from the latest events of the log; blocks."""
        topic = report.summary.topic
        recent = RecentEvents(self._log, self._now(), topic)
        waiting = {(each.consumer, topic): each.receivers for each in report.consumers}
        return replace(
            report, consumers=recent.consumers(waiting), periods=recent.periods(), events=recent.events
        )

    def list_consumers(self, waiting: Mapping[tuple[str, str], int] | None = None) -> list[ConsumerReport]:
        """Return the consumers of all topics; blocks.

        Arguments:
            waiting: what `receivers` returned; None asks it.
        """
        receivers = self._receivers() if waiting is None else waiting
        return RecentEvents(self._log, self._now()).consumers(receivers)


def count_receivers(waiting: Iterable[tuple[str | None, Sequence[str]]]) -> Counter[tuple[str, str]]:
    """Return how many receives wait, by name of the consumer and topic."""
    return Counter((name or "", topic) for name, topics in waiting for topic in topics)
