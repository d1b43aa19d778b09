"""`MeasureMailbox`, `DescribeMailbox`, `GetBacklog`: figures of a mailbox (svc-mailbox I-10, P-9, C-12)."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from heapq import nlargest

import msgspec

from postroom.application.mailbox.stored_snapshots import fold, refuse_altered_records
from postroom.application.messages import rfc3339
from postroom.application.metrics import OTHERS, MailboxMetrics, Metric, counter, gauge
from postroom.application.ports.event_log import EventLogReader
from postroom.application.ports.lease_store import Ownership
from postroom.application.queries.mailbox_past import StateAt
from postroom.application.query_results import Backlog, DlqProfile, Moment
from postroom.application.reports import SubscriptionReport
from postroom.domain.arguments import check_optional_text
from postroom.domain.errors import BrokenLog
from postroom.domain.mailbox.counts import TopicSummary, count, summarize_topics
from postroom.domain.mailbox.events import MailboxCreated, MailboxMode
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.mailbox.topic import Topic
from postroom.domain.names import mailbox_stream
from postroom.domain.policy import MIN_VISIBILITY_MS, SECOND_MS, TopicPolicy
from postroom.domain.redrive.job import ENDED, JobStatus
from postroom.domain.subscription import Subscription

DURABILITIES = ("power-cut", "process-crash", "nothing")
"""Values of `EventLog.durability`."""
MAX_TOPICS = 100
"""Topics that have their own labels; the others are added up."""


class _ShardState(msgspec.Struct):
    waiting: int
    in_flight: int
    saturation: float

    def __add__(self, other: "_ShardState") -> "_ShardState":
        return _ShardState(
            self.waiting + other.waiting,
            self.in_flight + other.in_flight,
            max(self.saturation, other.saturation),
        )


class MeasureMailbox:
    """A query for the metrics of a mailbox; its cost grows with topics and shards, not with messages."""

    def __init__(
        self,
        current: Callable[[], Mailbox],
        metrics: MailboxMetrics,
        dlq_profile: DlqProfile = "durable",
        lateness: Callable[[], Mapping[str, float]] = dict,
        durability: Callable[[], str] = lambda: "power-cut",
    ) -> None:
        """Initialise with functions that return the current state and other figures.

        Arguments:
            lateness: returns the lateness of schedules by name, in seconds.
            durability: returns that of the log; see `EventLog.durability`.
        """
        self._current = current
        self._metrics = metrics
        self._dlq_profile = dlq_profile
        self._lateness = lateness
        self._durability = durability

    def __call__(self) -> list[Metric]:
        """Return the metrics.

        Raises: Unavailable while the state is void.
        """
        mailbox = self._current()
        return [
            gauge("postroom_mailbox_epoch", "Epoch of the owner of the mailbox.", mailbox.epoch),
            counter("postroom_log_records", "Records ever appended to the log.", mailbox.position),
            Metric(
                "postroom_dlq_profile",
                "gauge",
                "1 for the profile of the dead letters: durable, or ephemeral in memory.",
                [({"dlq_profile": self._dlq_profile}, 1.0)],
            ),
            Metric(
                "postroom_log_durability",
                "gauge",
                "1 for the failure that an append to the log survives now, 0 for the others.",
                [({"survives": each}, float(each == self._durability())) for each in DURABILITIES],
            ),
            *_shards(mailbox),
            *_topics(mailbox),
            *_policies(mailbox),
            *_subscriptions(mailbox),
            *_schedules(mailbox, self._lateness()),
            *_redrives(mailbox),
            *self._metrics.collect(),
        ]


def _shards(mailbox: Mailbox) -> Iterable[Metric]:
    """Yield the gauges of the shards that hold messages."""
    named = _labelled_topics(topic for topic in mailbox.topics.values() if not topic.is_empty)
    states: dict[tuple[str, int], _ShardState] = {}
    for topic in mailbox.topics.values():
        label = topic.name if topic.name in named else OTHERS
        for number, shard in topic.shards.items():
            if size := shard.size:
                key = label, number
                in_flight = shard.in_flight
                state = _ShardState(size - in_flight, in_flight, size / topic.policy.shard_capacity)
                states[key] = states[key] + state if key in states else state
    labels = {key: {"topic": key[0], "shard": str(key[1])} for key in sorted(states)}
    for name, text, field in (
        ("queue_depth", "Messages ready or delayed.", "waiting"),
        ("inflight", "Messages in flight.", "in_flight"),
        ("saturation", "Unsettled messages per shard capacity, 0 to 1.", "saturation"),
    ):
        samples = [(names, getattr(states[key], field)) for key, names in labels.items()]
        yield Metric(f"postroom_{name}", "gauge", text, samples)


def _topics(mailbox: Mailbox) -> Iterable[Metric]:
    """Yield the metrics of topics.

    Counters are of all topics, at most `MailboxLimits.topics`: one that moved between its own label and the
    common one would seem to be reset.
    """
    topics = sorted(mailbox.topics.values(), key=lambda topic: topic.name)
    named = _labelled_topics(topic for topic in topics if topic.dead)
    dead: dict[str, int] = {}
    for topic in topics:
        if topic.dead:
            label = topic.name if topic.name in named else OTHERS
            dead[label] = dead.get(label, 0) + len(topic.dead)
    samples = [({"topic": name}, number) for name, number in sorted(dead.items())]
    yield Metric("postroom_dead_letters", "gauge", "Dead letters.", samples)
    held = [({"topic": topic.name}, float(topic.held_keys)) for topic in topics if topic.name in named]
    yield Metric("postroom_held_keys", "gauge", "Ordered keys that wait for a dead letter.", held)
    yield Metric(
        "postroom_dlq",
        "counter",
        "Dead-letterings by topic and reason.",
        [
            ({"topic": topic.name, "reason": reason}, number)
            for topic in topics
            for reason, number in sorted(topic.dead_letterings.items())
        ],
    )
    paused = [({"topic": name}, 1.0) for name in sorted(mailbox.paused_topics)[:MAX_TOPICS]]
    yield Metric("postroom_topic_paused", "gauge", "1 for a topic that is paused.", paused)


_SETTINGS: Mapping[str, tuple[str, Callable[[TopicPolicy], float]]] = {
    "ready_retention_seconds": (
        "Age at which an undelivered message is dead-lettered.",
        lambda policy: policy.ready_retention_ms / SECOND_MS,
    ),
    "in_flight_retention_seconds": (
        "Longest delivery with extensions.",
        lambda policy: policy.in_flight_retention_visibilities * policy.visibility_ms / SECOND_MS,
    ),
    "dead_retention_seconds": (
        "Age at which a dead letter expires.",
        lambda policy: policy.dead_retention_ms / SECOND_MS,
    ),
    "dead_capacity": (
        "Number of dead letters above which the oldest expire.",
        lambda policy: policy.dead_capacity,
    ),
    "replay_window_seconds": (
        "Time for which an idempotency key is remembered.",
        lambda policy: policy.replay_window_ms / SECOND_MS,
    ),
    "backoff_max_seconds": (
        "Longest pause between attempts.",
        lambda policy: policy.backoff_max_ms / SECOND_MS,
    ),
}


def _policies(mailbox: Mailbox) -> Iterable[Metric]:
    """Yield the settings in force: of the default policy, and of the topics that have their own."""
    names = sorted(name for name in mailbox.topic_names() if mailbox.own_policy(name) is not None)
    policies = {OTHERS: mailbox.settings.default_policy}
    policies |= {name: mailbox.policy(name) for name in names[:MAX_TOPICS]}
    for name, (text, read) in _SETTINGS.items():
        samples = [({"topic": topic}, read(policy)) for topic, policy in policies.items()]
        yield Metric(f"postroom_{name}", "gauge", text, samples)
    yield gauge(
        "postroom_visibility_min_seconds",
        "Shortest visibility timeout.",
        MIN_VISIBILITY_MS / SECOND_MS,
    )
    yield gauge(
        "postroom_history_retention_seconds",
        "Time for which the records of settled messages are retained.",
        mailbox.limits.history_retention_ms / SECOND_MS,
    )


def _subscriptions(mailbox: Mailbox) -> Iterable[Metric]:
    """Yield the metrics of subscriptions."""
    subscriptions = [each for _, each in sorted(mailbox.subscriptions.items())]
    behind = [({"subscription": each.name}, each.behind(mailbox.position)) for each in subscriptions]
    text = "Positions of the log that a subscription has yet to read; 0 if it is live."
    yield Metric("postroom_subscription_behind", "gauge", text, behind)
    status = [({"subscription": each.name, "status": str(each.status)}, 1.0) for each in subscriptions]
    text = "1 for the status of a subscription: live, copying or clearing."
    yield Metric("postroom_subscription_status", "gauge", text, status)
    skipped = [({"subscription": each.name}, each.skipped) for each in subscriptions]
    text = "Messages that a subscription could not copy, as their bytes were altered or forgotten."
    yield Metric("postroom_subscription_skipped", "counter", text, skipped)


def _schedules(mailbox: Mailbox, lateness: Mapping[str, float]) -> Iterable[Metric]:
    """Yield the metrics of schedules."""
    late = [({"schedule": name}, seconds) for name, seconds in sorted(lateness.items())]
    text = "Time since the first tick of a schedule that was due and is not sent; 0 otherwise."
    yield Metric("postroom_schedule_late_seconds", "gauge", text, late)
    runs = [({"schedule": name}, each.runs) for name, each in sorted(mailbox.schedules.items())]
    yield Metric("postroom_schedule_runs", "counter", "Messages that a schedule sent.", runs)


def _redrives(mailbox: Mailbox) -> Iterable[Metric]:
    """Yield the metrics of redrive jobs."""
    counts = Counter(job.status for job in mailbox.redrives.values() if job.status not in ENDED)
    samples = [({"status": str(status)}, counts[status]) for status in sorted({*JobStatus} - ENDED)]
    yield Metric("postroom_redrive_jobs", "gauge", "Redrive jobs that have not ended.", samples)
    remaining = sum(
        max(0, job.matched - job.moved - job.skipped)
        for job in mailbox.redrives.values()
        if job.status == JobStatus.RUNNING
    )
    yield gauge(
        "postroom_redrive_remaining", "Messages that running redrive jobs have yet to change.", remaining
    )


def _labelled_topics(topics: Iterable[Topic]) -> set[str]:
    """Return the names of the topics with most messages, which have their own labels."""

    def size(topic: Topic) -> tuple[int, str]:
        return topic.size, topic.name

    return {topic.name for topic in nlargest(MAX_TOPICS, topics, key=size)}


class MailboxSummary(msgspec.Struct, frozen=True):
    """A mailbox of a store.

    Arguments:
        owner: name of the process that owns it now, by default with its id; None if nobody does.
        epoch: of its last owner.
        records: number of records that retention has left in its log.
        bytes: estimated size of these records.
    """

    mailbox: str
    mode: MailboxMode
    owner: str | None
    epoch: int
    records: int
    bytes: int


class DescribeMailbox:
    """A query for the summary of one mailbox; needs no ownership."""

    def __init__(self, log: EventLogReader, ownership: Ownership) -> None:
        self._log = log
        self._ownership = ownership

    async def __call__(self) -> MailboxSummary:
        """Return the summary.

        Raises: Unavailable when the store can't be read.
        """
        log = self._log
        head, first = log.head(), log.first_position()
        return MailboxSummary(
            log.mailbox,
            self._mode(),
            await self._ownership.owner(log.mailbox),
            0 if head is None else head.epoch,
            0 if head is None or first is None else head.position - first + 1,
            log.size().commits,
        )

    def _mode(self) -> MailboxMode:
        for record in self._log.read_stream(mailbox_stream(self._log.mailbox)):
            if isinstance(record.event, MailboxCreated):
                return record.event.mode
        return fold(self._log).mode  # retention removed the first record


class GetBacklog:
    """A query for the numbers of ready, delayed, in-flight and dead messages by topic and shard."""

    def __init__(self, state_at: StateAt, dlq_profile: DlqProfile = "durable") -> None:
        self._state_at = state_at
        self._dlq_profile = dlq_profile

    @refuse_altered_records
    def __call__(self, topic: str | None = None, *, at: Moment | None = None) -> Backlog:
        """Return the backlog of one topic or of all, now or as it was at a moment (see `StateAt`)."""
        check_optional_text("topic", topic)
        mailbox, as_of = self._state_at(at)
        shards = count(mailbox, as_of, topic)
        return Backlog(
            mailbox.name,
            mailbox.position,
            mailbox.epoch,
            mailbox.owner,
            rfc3339(mailbox.at or None) or "",
            mailbox.archived,
            rfc3339(as_of) or "",
            shards,
            [name for name in sorted(mailbox.paused_topics) if topic in (None, name)],
            self._dlq_profile,
        )


class ListTopics:
    """A query for the topics of a mailbox; see `Mailbox.list_topics`."""

    def __init__(self, state_at: StateAt) -> None:
        self._state_at = state_at

    def __call__(self) -> list[TopicSummary]:
        """Return the topics as they are now, sorted by name."""
        return summarize_topics(*self._state_at(None))


def report_subscription(subscription: Subscription, mailbox: Mailbox) -> SubscriptionReport:
    """Return the report of a subscription."""
    name = subscription.name
    topic = mailbox.topics.get(name) or Topic(name, mailbox.policy(name))
    behind = subscription.behind(mailbox.position)
    return SubscriptionReport(
        name,
        subscription.filter.topics,
        subscription.filter.headers,
        subscription.status,
        mailbox.position - behind,
        behind,
        subscription.skipped,
        topic.unsettled - topic.in_flight,
        topic.in_flight,
        len(topic.dead),
        name in mailbox.paused_topics,
        rfc3339(subscription.created_at) or "",
    )


def report_subscriptions(mailbox: Mailbox) -> list[SubscriptionReport]:
    """Return the reports of all subscriptions, sorted by name."""
    return [report_subscription(each, mailbox) for _, each in sorted(mailbox.subscriptions.items())]


class ListSubscriptions:
    """A query for the subscriptions of a mailbox; see `Mailbox.list_subscriptions`."""

    def __init__(self, state_at: StateAt, log: EventLogReader) -> None:
        self._state_at = state_at
        self._log = log

    def __call__(self) -> list[SubscriptionReport]:
        """Return the subscriptions as they are now, sorted by name."""
        return [with_problem(each, self._log) for each in report_subscriptions(self._state_at(None)[0])]


def with_problem(report: SubscriptionReport, log: EventLogReader) -> SubscriptionReport:
    """Return a report with the error of the commit after its position, if that can't be read."""
    if report.status == "copying":
        try:
            next(iter(log.replay_runs(report.position)), None)
        except BrokenLog as error:
            return msgspec.structs.replace(report, problem=str(error))
    return report
